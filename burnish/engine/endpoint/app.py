"""The ASGI application of the endpoint.

    POST /v1/chat/completions    complete a conversation
    POST /v1/completions         continue texts
    GET  /v1/models              the name of the model and its context length
    GET  /health                 the state of the server

The paths below /v1 also exist below /session/NAME/v1, which assigns requests to a session, as does
the header X-Session-ID. An `AnswerBackend` answers the requests;
`access.py` says who may send them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing, suppress
from hashlib import blake2b
from itertools import count

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from burnish.engine.endpoint.access import check_access, known_hosts
from burnish.engine.endpoint.answers import DONE, AnswerWriter, error_fields, error_response, event
from burnish.engine.endpoint.backend import AnswerBackend, AnswerPiece, Asked, RequestRefused
from burnish.engine.endpoint.requests import (
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    explain_request_errors,
    wrong_field,
)
from burnish.engine.endpoint.thread import QueueFull, Stopped
from burnish.errors import BurnishError

JSON = "application/json"
LARGEST, PATIENCE = 10_000_000, 60.0
"""Maximum size of a request in bytes, and the seconds within which it must arrive, and within which
a client must read each event of a stream."""
PLACES = ("POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models", "GET /health")
LONGEST_SESSION = 200
"""Maximum number of characters of a session's name."""
STATUS: dict[type[Exception], int] = {QueueFull: 429, Stopped: 503}
"""HTTP status of errors of the engine; 400 for all others, which concern the request."""


class Endpoint:
    """Answers HTTP requests for one model. Each method answers one of `PLACES`; `make_app` adds the
    routes and turns exceptions into error responses."""

    def __init__(self, backend: AnswerBackend) -> None:
        self._backend = backend
        self._numbers = count()

    async def chat(self, http: HttpRequest) -> Response:
        """Answer POST /v1/chat/completions: sample answers to a conversation."""
        return await self._respond(http, await self._read(http, ChatRequest))

    async def complete(self, http: HttpRequest) -> Response:
        """Answer POST /v1/completions: sample continuations of one or several texts."""
        return await self._respond(http, await self._read(http, CompletionRequest))

    async def models(self, http: HttpRequest) -> Response:
        """Answer GET /v1/models: the list with the one model."""
        card = self._backend.card()
        model = {"id": card.name, "object": "model", "created": 0, "owned_by": "burnish"}
        model["max_model_len"] = card.context
        if card.version is not None:
            model["version"] = card.version
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, http: HttpRequest) -> Response:
        """Answer GET /health. The status is always ok."""
        version = self._backend.card().version
        fields = {} if version is None else {"version": version}
        return JSONResponse({"status": "ok"} | self._backend.health() | fields)

    async def _read(self, http: HttpRequest, kind: type[ChatRequest | CompletionRequest]) -> Asked:
        """Read and check a request. Raise RequestRefused if its body is invalid or names another
        model."""
        body = await read_body(http)
        try:
            fields = kind.model_validate_json(body, strict=True)
        except ValidationError as error:
            explained = explain_request_errors(error, [*kind.model_fields])
            raise RequestRefused(400, explained, param=wrong_field(error)) from error
        self._check_model(fields)
        path, header = http.path_params.get("session"), http.headers.get("x-session-id")
        session, trace = (header, None) if path is None else (path, header)
        longest = max(len(session or ""), len(trace or ""))
        if longest > LONGEST_SESSION:
            rule = f"the name of a session has at most {LONGEST_SESSION} characters"
            raise RequestRefused(400, f"{rule}, got {longest}")
        retry = http.headers.get("x-stainless-retry-count", "")
        return Asked(
            next(self._numbers),
            fields,
            blake2b(body, digest_size=12).hexdigest(),
            session,
            trace,
            http.headers.get("idempotency-key"),
            int(retry) if retry.isdecimal() and len(retry) < 4 else 0,
        )

    def _check_model(self, asked: SamplingFields) -> None:
        card = self._backend.card()
        if not card.any_name and asked.model != card.name:
            raise RequestRefused(
                404,
                f"this server has the model {card.name!r}, not {asked.model[:200]!r}",
                code="model_not_found",
                param="model",
            )

    async def _respond(self, http: HttpRequest, asked: Asked) -> Response:
        """Sample the response to a request, or the first piece of a stream. If the client
        disconnects, abort the request and raise ClientDisconnect."""
        card = self._backend.card()
        answer = AnswerWriter(asked, asked.body.model if card.any_name else card.name)
        pieces = until_disconnected(http, self._backend.answer(asked))
        if not asked.body.stream:
            async with aclosing(pieces):
                return JSONResponse(answer.whole([piece async for piece in pieces]))
        try:
            first = await anext(pieces)  # its error has a status; later ones are events
        except BaseException:
            await pieces.aclose()
            raise
        return EventStream(answer, first, pieces)


class EventStream(Response):
    """A stream of server-sent events, which ends the backend's work in any case."""

    def __init__(
        self, answer: AnswerWriter, first: AnswerPiece, pieces: AsyncGenerator[AnswerPiece, None]
    ) -> None:
        """``pieces`` are those that follow the ``first`` one."""
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._answer, self._first, self._pieces = answer, first, pieces

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client that has disconnected or does not read ends the stream.
        with suppress(ClientDisconnect, OSError):
            await self._send_all(send)

    async def _send_all(self, send: Send) -> None:
        """Send all events. Raise ClientDisconnect, or an OSError such as TimeoutError, if the
        client does not take them."""
        async with aclosing(self._pieces), asyncio.timeout(None) as limit:

            async def write(content: bytes, *, more: bool = True) -> None:
                limit.reschedule(asyncio.get_running_loop().time() + PATIENCE)
                message = {"type": "http.response.body", "body": content, "more_body": more}
                await send(message)
                limit.reschedule(None)

            start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
            await send(start)
            await write(self._events(self._first))
            ending = DONE
            try:
                async for piece in self._pieces:
                    await write(self._events(piece))
                if chunk := self._answer.last_chunk():
                    await write(event(chunk))
            except (RequestRefused, BurnishError) as error:
                ending = event(error_fields(refusal_of(error)))
            await write(ending, more=False)

    def _events(self, piece: AnswerPiece) -> bytes:
        return b"".join(map(event, self._answer.chunks(piece)))


def make_app(endpoint: Endpoint, hosts: Iterable[str] = (), key: str | None = None) -> Starlette:
    """Return the ASGI application that routes requests to ``endpoint``. ``hosts`` are the names
    that a request's Host header may have beside IP addresses, localhost and this machine's own
    name; ``key`` is the key that a request must have, None for no key."""
    answers = (endpoint.chat, endpoint.complete, endpoint.models, endpoint.health)
    routes = [
        Route(prefix + place.partition(" ")[2], answer, methods=[place.partition(" ")[0]])
        for place, answer in zip(PLACES, answers, strict=True)
        for prefix in ("", "/session/{session}")
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(check_access, names=known_hosts(hosts), key=key)],
        exception_handlers={
            HTTPException: _on_no_route,
            RequestRefused: _on_error,
            BurnishError: _on_error,
            ClientDisconnect: _on_disconnect,
            Exception: _on_defect,
        },
    )


async def read_body(http: HttpRequest) -> bytes:
    """Return the body of a request. Raise RequestRefused if the content type is not JSON, or if the
    body is larger than `LARGEST` bytes or does not arrive within `PATIENCE` seconds."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != JSON:
        raise RequestRefused(415, f"the content type must be {JSON}, got {kind[:200]!r}")
    too_large = RequestRefused(413, f"a request has at most {LARGEST:,} bytes; send a shorter one")
    length = http.headers.get("content-length", "")
    if length.isdigit() and int(length) > LARGEST:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(PATIENCE):
            async for chunk in http.stream():
                body += chunk
                if len(body) > LARGEST:
                    raise too_large
    except TimeoutError:
        message = f"the request did not arrive within {PATIENCE:g} s; send it again"
        raise RequestRefused(408, message) from None
    return bytes(body)


async def until_disconnected(
    http: HttpRequest, pieces: AsyncGenerator[AnswerPiece, None]
) -> AsyncGenerator[AnswerPiece, None]:
    """Yield the pieces until the client has disconnected, which raises ClientDisconnect. Close
    ``pieces`` in any case. The request's body must have been read."""
    gone = asyncio.ensure_future(disconnected(http))
    try:
        while True:
            following = asyncio.ensure_future(anext(pieces, None))
            try:
                await asyncio.wait([gone, following], return_when=asyncio.FIRST_COMPLETED)
            finally:
                if not following.done():
                    following.cancel()
                    await asyncio.wait([following])
            if following.cancelled():
                raise ClientDisconnect
            piece = following.result()
            if piece is None:
                return
            yield piece
    finally:
        gone.cancel()
        await pieces.aclose()


async def disconnected(http: HttpRequest) -> None:
    """Wait until the client has disconnected. The request's body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def refusal_of(error: Exception) -> RequestRefused:
    """Return the refusal that an error means to the client."""
    if isinstance(error, RequestRefused):
        return error
    code = "rate_limit_exceeded" if isinstance(error, QueueFull) else None
    return RequestRefused(STATUS.get(type(error), 400), str(error), code=code)


async def _on_no_route(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = f"{http.method} {http.url.path[:200]!r}"
    message = f"there is no {asked}; use {', '.join(PLACES)}"
    return error_response(RequestRefused(error.status_code, message))


async def _on_error(http: HttpRequest, error: Exception) -> Response:
    return error_response(refusal_of(error))


async def _on_defect(http: HttpRequest, error: Exception) -> Response:
    """Answer a request that failed because of a defect of this server, which logs the exception."""
    said = f"the server failed at this request: {type(error).__name__}; its log has more"
    return error_response(RequestRefused(500, said))


async def _on_disconnect(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # nobody receives it
