"""The interface between the HTTP application and a model, which answers requests in pieces.

    app.py (HTTP) ──Asked──► AnswerBackend ──AnswerPiece, AnswerPiece, …──► app.py

`burnish serve` answers with an engine in its own process (`engine_backend.py`). During training the
server is a process of its own, and its backend (`channel.py`) forwards requests to the training
process as JSON. This module and the application import no torch.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from burnish.engine.endpoint.requests import ChatRequest, CompletionRequest

FinishReason = Literal["stop", "length", "tool_calls"]
TOO_LONG = "context_length_exceeded"
"""Error code for a prompt that has no room in the model's context."""


class RequestRefused(Exception):
    """Raised for a request that is not answered. ``status``: HTTP status of the response;
    ``message``, ``code`` and ``param``: fields of its error, where ``code`` is a name such as
    "context_length_exceeded" and ``param`` is the field that is wrong, or None."""

    def __init__(
        self, status: int, message: str, *, code: str | None = None, param: str | None = None
    ) -> None:
        super().__init__(status, message)
        self.status, self.message, self.code, self.param = status, message, code, param


@dataclass(frozen=True)
class Asked:
    """A checked request."""

    number: int
    """Number of the request, unique in the process of the server."""
    body: ChatRequest | CompletionRequest
    digest: str
    """Hash of the body as it was sent, which names the response."""
    session: str | None = None
    """Name of the session that the request belongs to, from its path /session/NAME/v1, or else from
    its header X-Session-ID; None if it has none."""
    trace: str | None = None
    """The header X-Session-ID if the path names the session: a part of the session, such as one of
    several agents; None if it has none."""
    retry_key: str | None = None
    """The header Idempotency-Key, which all tries of a request share; None if it has none."""
    retry: int = 0
    """Number of earlier tries, from the header x-stainless-retry-count."""

    @property
    def choices(self) -> int:
        """Number of responses: n for each prompt."""
        prompts = len(self.body.prompt) if isinstance(self.body, CompletionRequest) else 1
        return prompts * self.body.n


@dataclass(frozen=True)
class TokenLogprob:
    """A sampled token and its log-probability under the model at the sampling temperature."""

    token: str
    """The token's text; it contains U+FFFD if the token is a part of a character."""
    logprob: float


@dataclass(frozen=True)
class AnswerPiece:
    """A part of one response. The texts of all pieces, joined in their order, are its text."""

    choice: int
    """Index of the response in the request."""
    text: str = ""
    """Text that follows the previous pieces. It ends with a whole character, and contains no part
    of a stop string or of a tool call."""
    tool_calls: tuple[Mapping[str, Any], ...] = ()
    """The response's tool calls as OpenAI's API writes them; only in the last piece."""
    tokens: int = 0
    """Number of sampled tokens that are new, including an end token."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """The new tokens, if the request asks for logprobs; a token may precede its text."""
    finish: FinishReason | None = None
    """Why the response ended, in its last piece; None in all others."""
    prompt_tokens: int = 0
    """Tokens of the prompt, in one piece of each prompt; 0 in all others."""


@dataclass(frozen=True)
class ModelCard:
    """The model as /v1/models and /health describe it."""

    name: str
    """Name of the model."""
    context: int
    """Maximum number of tokens of prompt and response together."""
    any_name: bool = False
    """Whether requests may give any name as ``model``, as in training."""
    version: int | None = None
    """Version of the weights; None if they do not change."""


class AnswerBackend(Protocol):
    """Answers requests with one model."""

    def card(self) -> ModelCard:
        """Return the current description of the model. It must not block."""

    def health(self) -> dict[str, Any]:
        """Return further fields of /health, such as the number of unfinished samples."""

    def answer(self, asked: Asked) -> AsyncGenerator[AnswerPiece, None]:
        """Yield the pieces of all responses to a request; each response's last piece has a
        ``finish``. Closing the generator aborts the request, for example because its client has
        disconnected.

        If the request does not stream (``asked.body.stream``), each response may be one piece.
        Raise RequestRefused or a burnish error if the request can't be answered, before the first
        piece if possible.
        """
