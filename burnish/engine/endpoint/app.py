"""The ASGI application of the endpoint.

    POST /v1/chat/completions    complete a conversation
    POST /v1/completions         continue texts
    GET  /v1/models              the name of the model
    GET  /health                 the number of unfinished samples

A page in a browser can't use the endpoint: a request must have the content type of JSON, which a
page of another origin can't send without a CORS preflight request, and its Host header must not be
a foreign name, which prevents DNS rebinding. A response depends only on its request, up to the
rounding of logits, which depends on the other samples in the engine's batch.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from ipaddress import ip_address
from itertools import count
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pydantic import ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from burnish.engine.endpoint.requests import (
    MOST_SAMPLES,
    ChatRequest,
    CompletionRequest,
    SamplingFields,
    explain_request_errors,
)
from burnish.engine.endpoint.thread import Completions, EngineThread, QueueFull, Stopped
from burnish.engine.protocol import Request
from burnish.errors import BurnishError
from burnish.randomness import Stream
from burnish.types import Completion, Finish, IntArray, SamplingParams

JSON = "application/json"
LARGEST, PATIENCE = 10_000_000, 60.0
"""Maximum size of a request in bytes, and the seconds within which it must arrive."""
PLACES = ("POST /v1/chat/completions", "POST /v1/completions", "GET /v1/models", "GET /health")
STATUS: dict[type[Exception], int] = {QueueFull: 429, Stopped: 503}
"""HTTP status of errors of the engine; 400 for all others, which concern the request."""
Messages = Sequence[Mapping[str, Any]]
AnyFields = TypeVar("AnyFields", bound=SamplingFields)


class RequestRefused(Exception):
    """Raised for a request that the endpoint refuses. ``status``: HTTP status of the response;
    ``message``: its error message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(status, message)
        self.status, self.message = status, message


class Endpoint:
    """Answers HTTP requests for one model. Each method answers one of `PLACES`; `make_app` adds the
    routes and turns exceptions into error responses."""

    def __init__(
        self,
        model: str,
        engine: EngineThread,
        *,
        encode: Callable[[str], IntArray],
        encode_chat: Callable[[Messages], IntArray],
    ) -> None:
        """``model`` is the name that requests must give. ``encode`` and ``encode_chat`` return the
        token ids of a text and of a conversation."""
        self._model, self._engine = model, engine
        self._encode, self._encode_chat = encode, encode_chat
        self._numbers = count()

    async def chat(self, http: HttpRequest) -> Response:
        """Answer POST /v1/chat/completions: sample answers to a conversation."""
        asked, name = await self._read(http, ChatRequest)
        messages = [message.model_dump() for message in asked.messages]
        prompt = await run_in_threadpool(self._encode_chat, messages)
        (answers,) = await self._sample(http, [prompt], asked.n, asked.params)
        choices = [
            {"message": {"role": "assistant", "content": text_of(answer)}} | ending(answer)
            for answer in answers
        ]
        return self._respond(f"chatcmpl-{name}", "chat.completion", choices, [prompt], [answers])

    async def complete(self, http: HttpRequest) -> Response:
        """Answer POST /v1/completions: sample continuations of one or several texts."""
        asked, name = await self._read(http, CompletionRequest)
        if len(asked.prompt) * asked.n > MOST_SAMPLES:
            raise RequestRefused(
                400,
                f"one request may have {MOST_SAMPLES} responses, got {len(asked.prompt)} prompts "
                f"with n = {asked.n}; send several requests",
            )
        prompts = [await run_in_threadpool(self._encode, text) for text in asked.prompt]
        answers = await self._sample(http, prompts, asked.n, asked.params)
        choices = [{"text": text_of(one)} | ending(one) for each in answers for one in each]
        return self._respond(f"cmpl-{name}", "text_completion", choices, prompts, answers)

    async def models(self, http: HttpRequest) -> Response:
        """Answer GET /v1/models: the list with the one model."""
        model = {"id": self._model, "object": "model", "created": 0, "owned_by": "burnish"}
        return JSONResponse({"object": "list", "data": [model]})

    async def health(self, http: HttpRequest) -> Response:
        """Answer GET /health: the number of unfinished samples. The status is always ok."""
        return JSONResponse({"status": "ok", "unfinished": self._engine.unfinished})

    async def _read(self, http: HttpRequest, kind: type[AnyFields]) -> tuple[AnyFields, str]:
        """Read and check the body of a request; return the body's fields, and its hash, which names
        the response. Raise RequestRefused if the body is invalid or names another model."""
        body = await read_body(http)
        try:
            asked = kind.model_validate_json(body, strict=True)
        except ValidationError as error:
            fields = [*kind.model_fields]
            raise RequestRefused(400, explain_request_errors(error, fields)) from error
        if asked.model != self._model:
            message = f"this server has the model {self._model!r}, not {asked.model[:200]!r}"
            raise RequestRefused(404, message)
        return asked, blake2b(body, digest_size=12).hexdigest()

    async def _sample(
        self, http: HttpRequest, prompts: Sequence[IntArray], n: int, params: SamplingParams
    ) -> list[Completions]:
        """Sample ``n`` responses to each prompt; return the completions of each. If the client
        disconnects, or if sampling fails for one of the prompts, abort all requests and raise.
        Raise RequestRefused if a log-probability was not finite."""
        gone: asyncio.Future[Any] = asyncio.ensure_future(disconnected(http))
        futures: list[asyncio.Future[Any]] = []
        try:
            for index, prompt in enumerate(prompts):
                name = f"served-{next(self._numbers)}"
                request = Request(name, prompt, n, params, index, Stream.GENERATE)
                futures.append(asyncio.wrap_future(self._engine.submit(request)))
            while waiting := [future for future in futures if not future.done()]:
                await asyncio.wait([gone, *waiting], return_when=asyncio.FIRST_COMPLETED)
                if gone.done():
                    raise ClientDisconnect
                _ = [future.result() for future in futures if future.done()]
            found: list[Completions] = [future.result() for future in futures]
        finally:
            for future in (gone, *futures):
                if not future.cancel() and not future.cancelled():
                    future.exception()  # asyncio would log an exception that nobody reads
        if any(one.finish is Finish.ABORT for completions in found for one in completions):
            raise RequestRefused(
                500,
                "the model's log-probabilities were not finite: the temperature is too low (use 0, "
                "or at least 0.01), or the model's weights overflow",
            )
        return found

    def _respond(
        self,
        name: str,
        kind: str,
        choices: Sequence[dict[str, Any]],
        prompts: Sequence[IntArray],
        answers: Sequence[Completions],
    ) -> Response:
        used = {
            "prompt_tokens": sum(map(len, prompts)),
            "completion_tokens": sum(len(one.token_ids) for each in answers for one in each),
        }
        used["total_tokens"] = sum(used.values())
        fixed = {"id": name, "object": kind, "created": 0, "model": self._model}
        numbered = [{"index": index} | choice for index, choice in enumerate(choices)]
        return JSONResponse(fixed | {"choices": numbered, "usage": used})


def make_app(endpoint: Endpoint, hosts: Iterable[str] = ()) -> Starlette:
    """Return the ASGI application that routes requests to ``endpoint``. ``hosts`` are the names
    that a request's Host header may have beside IP addresses, localhost and this machine's own
    name."""
    answers = (endpoint.chat, endpoint.complete, endpoint.models, endpoint.health)
    routes = [
        Route(place.partition(" ")[2], answer, methods=[place.partition(" ")[0]])
        for place, answer in zip(PLACES, answers, strict=True)
    ]
    return Starlette(
        routes=routes,
        middleware=[Middleware(check_host, names=known_hosts(hosts))],
        exception_handlers={
            HTTPException: _on_no_route,
            RequestRefused: _on_refusal,
            BurnishError: _on_engine_error,
            ClientDisconnect: _on_disconnect,
        },
    )


def known_hosts(hosts: Iterable[str] = ()) -> frozenset[str]:
    """Return the names of this server in lower case: localhost, this machine's name and
    ``hosts``."""
    return frozenset({"localhost", socket.gethostname().lower(), *map(str.lower, hosts)})


def check_host(app: ASGIApp, names: Collection[str]) -> ASGIApp:
    """Return an application that refuses requests, with status 403, if their Host header is neither
    an IP address nor one of ``names``, and passes all others to ``app``."""

    async def checked(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            hosts = [value.decode("latin-1") for key, value in scope["headers"] if key == b"host"]
            if [is_known(host, names) for host in hosts] != [True]:
                message = (
                    f"the Host header {', '.join(hosts)[:200]!r} is not a name of this server; use "
                    "its IP address, or start it with --allow-host NAME"
                )
                return await error_response(403, message)(scope, receive, send)
        return await app(scope, receive, send)

    return checked


def is_known(host: str, names: Collection[str]) -> bool:
    """Return whether a Host header is an IP address or one of ``names``, which are in lower case. A
    port may follow; an invalid header is not known."""
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name in names or bool(ip_address(name))
    except ValueError:
        return False


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


async def disconnected(http: HttpRequest) -> None:
    """Wait until the client has disconnected. The request's body must have been read."""
    while (await http.receive())["type"] != "http.disconnect":
        pass


def text_of(completion: Completion) -> str:
    """Return the text of a response, without the stop string if one ended it."""
    stop = completion.stop
    return completion.text.removesuffix(stop) if isinstance(stop, str) else completion.text


def ending(completion: Completion) -> dict[str, Any]:
    """Return the fields of a choice that say how its response ended."""
    return {"finish_reason": str(completion.finish), "logprobs": None}


def error_response(status: int, message: str) -> JSONResponse:
    """Return an error response with an HTTP status, in the form of the OpenAI API."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse({"error": {"message": message, "type": kind}}, status)


async def _on_no_route(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    asked = f"{http.method} {http.url.path[:200]!r}"
    return error_response(error.status_code, f"there is no {asked}; use {', '.join(PLACES)}")


async def _on_refusal(http: HttpRequest, error: Exception) -> Response:
    assert isinstance(error, RequestRefused)
    return error_response(error.status, error.message)


async def _on_engine_error(http: HttpRequest, error: Exception) -> Response:
    return error_response(STATUS.get(type(error), 400), str(error))


async def _on_disconnect(http: HttpRequest, error: Exception) -> Response:
    return Response(status_code=499)  # nobody receives it
