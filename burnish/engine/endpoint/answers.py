"""Responses of the endpoint in the form of the OpenAI API, built from the pieces of a backend.

A response is one JSON object. A stream has the same content as chunks, which are server-sent
events: the texts of its chunks, joined, are the text of the response that does not stream.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

from burnish.engine.endpoint.backend import AnswerPiece, Asked, RequestRefused, TokenLogprob
from burnish.engine.endpoint.requests import ChatRequest

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that is complete."""
KINDS = {401: "authentication_error", 429: "rate_limit_error"}
"""Types of errors by status; invalid_request_error for other ones below 500, and server_error."""


def error_fields(refused: RequestRefused) -> dict[str, Any]:
    """Return an error in the form of the OpenAI API."""
    other = "invalid_request_error" if refused.status < 500 else "server_error"
    kind = KINDS.get(refused.status, other)
    fields = {"message": refused.message, "type": kind, "param": refused.param}
    return {"error": fields | {"code": refused.code}}


def error_response(refused: RequestRefused) -> JSONResponse:
    """Return an error response."""
    return JSONResponse(error_fields(refused), refused.status)


def event(content: Mapping[str, Any]) -> bytes:
    """Return a server-sent event."""
    return b"data: %s\n\n" % json.dumps(content, ensure_ascii=False).encode(errors="replace")


class AnswerWriter:
    """The response to one request, which is either written as a whole or as chunks."""

    def __init__(self, asked: Asked, model: str) -> None:
        """``model``: the name of the model that the response states."""
        self._is_chat, self._body = isinstance(asked.body, ChatRequest), asked.body
        self._has_logprobs = asked.body.has_logprobs
        name = f"{'chatcmpl' if self._is_chat else 'cmpl'}-{asked.digest}"
        self._fixed = {"id": name, "created": 0, "model": model}
        self._started = set[int]()
        """Choices of which a chunk was written."""
        self._tokens = {"prompt_tokens": 0, "completion_tokens": 0}

    def whole(self, pieces: Iterable[AnswerPiece]) -> dict[str, Any]:
        """Return the response with all its choices."""
        found: dict[int, list[AnswerPiece]] = {}
        for piece in pieces:
            self._count(piece)
            found.setdefault(piece.choice, []).append(piece)
        kind = "chat.completion" if self._is_chat else "text_completion"
        choices = [self._choice(index, found[index]) for index in sorted(found)]
        return {**self._fixed, "object": kind, "choices": choices, "usage": self._usage()}

    def chunks(self, piece: AnswerPiece) -> Iterator[dict[str, Any]]:
        """Yield the chunks for a piece, which may be none."""
        self._count(piece)
        is_first = piece.choice not in self._started
        self._started.add(piece.choice)
        logprobs = self._logprobs(piece.logprobs) if piece.logprobs else None
        if self._is_chat:
            if piece.text or piece.logprobs or is_first:
                delta = {"role": "assistant"} if is_first else {}
                yield self._chunk(piece.choice, delta | {"content": piece.text}, logprobs)
            for place, call in enumerate(piece.tool_calls):
                yield self._chunk(piece.choice, {"tool_calls": [{"index": place, **call}]})
            if piece.finish is not None:
                yield self._chunk(piece.choice, {}, finish=piece.finish)
        elif piece.text or piece.logprobs or piece.finish is not None:
            yield self._chunk(piece.choice, piece.text, logprobs, piece.finish)

    def last_chunk(self) -> dict[str, Any] | None:
        """Return the chunk that ends a stream, which has no choices and the number of tokens; None
        if the request does not ask for it."""
        if not self._body.has_usage:
            return None
        return {**self._stream_fields(), "choices": [], "usage": self._usage()}

    def _count(self, piece: AnswerPiece) -> None:
        self._tokens["prompt_tokens"] += piece.prompt_tokens
        self._tokens["completion_tokens"] += piece.tokens

    def _usage(self) -> dict[str, int]:
        return self._tokens | {"total_tokens": sum(self._tokens.values())}

    def _choice(self, index: int, pieces: Sequence[AnswerPiece]) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        calls = [call for piece in pieces for call in piece.tool_calls]
        logprobs = self._logprobs([one for piece in pieces for one in piece.logprobs])
        own: dict[str, Any] = {"text": text}
        if self._is_chat:
            message: dict[str, Any] = {"role": "assistant", "content": text}
            if calls:
                message |= {"content": text or None, "tool_calls": calls}
            own = {"message": message}
        ended = {"finish_reason": pieces[-1].finish, "logprobs": logprobs}
        return {"index": index, **own, **ended}

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        if not self._has_logprobs:
            return None
        if not self._is_chat:
            return {
                "tokens": [one.token for one in tokens],
                "token_logprobs": [one.logprob for one in tokens],
                "top_logprobs": None,
                "text_offset": None,
            }
        content = [
            {
                "token": one.token,
                "logprob": one.logprob,
                "bytes": None if "\ufffd" in one.token else list(one.token.encode()),
                "top_logprobs": [],
            }
            for one in tokens
        ]
        return {"content": content, "refusal": None}

    def _chunk(
        self,
        choice: int,
        content: Any,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> dict[str, Any]:
        own = {"index": choice, "delta" if self._is_chat else "text": content}
        ended = {"logprobs": logprobs, "finish_reason": finish}
        return {**self._stream_fields(), "choices": [own | ended]}

    def _stream_fields(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._is_chat else "text_completion"
        usage = {"usage": None} if self._body.has_usage else {}
        return {**self._fixed, "object": kind, **usage}
