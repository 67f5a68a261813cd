"""The backend of `burnish serve`: an engine in this process samples the responses."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any

import numpy as np
from starlette.concurrency import run_in_threadpool

from burnish.calls import CallFormatName
from burnish.engine.endpoint.backend import (
    TOO_LONG,
    AnswerPiece,
    Asked,
    FinishReason,
    ModelCard,
    RequestRefused,
    TokenLogprob,
)
from burnish.engine.endpoint.deltas import TextDeltas
from burnish.engine.endpoint.messages import assistant_message
from burnish.engine.endpoint.prompts import ChatPrompts
from burnish.engine.endpoint.requests import ChatRequest
from burnish.engine.endpoint.thread import EngineThread, NewTokens
from burnish.engine.protocol import Request
from burnish.model.tokenizer import Tokenizer
from burnish.randomness import Stream
from burnish.types import Completion, Finish, IntArray

NOT_FINITE = (
    "the model's log-probabilities were not finite: the temperature is too low (use 0, or at least "
    "0.01), or the model's weights overflow"
)


class EngineBackend:
    """Answers requests with the engine of an `EngineThread`. Streams have the tokens as they are
    sampled if the engine is a `TokenSource`; otherwise each response is one piece."""

    def __init__(
        self,
        thread: EngineThread,
        tokenizer: Tokenizer,
        prompts: ChatPrompts,
        card: Callable[[], ModelCard],
    ) -> None:
        """``card`` returns the current description of the model."""
        self._thread, self._tokenizer, self._prompts = thread, tokenizer, prompts
        self.card = card
        self._numbers = count()
        tokenizer.encode("")  # its first use prepares it, and must not be in two threads

    def health(self) -> dict[str, Any]:
        return {"unfinished": self._thread.unfinished}

    async def answer(self, asked: Asked) -> AsyncGenerator[AnswerPiece, None]:
        prompts, calls = await run_in_threadpool(self._encode, asked)
        body, loop = asked.body, asyncio.get_running_loop()
        events = asyncio.Queue[tuple[int, NewTokens | Completion | BaseException]]()
        samples = {
            (place, sample): _Sample(self._tokenizer, asked, place * body.n + sample, calls)
            for place in range(len(prompts))
            for sample in range(body.n)
        }
        futures = []

        def send(event: tuple[int, NewTokens | Completion | BaseException]) -> None:
            with suppress(RuntimeError):  # the server has ended
                loop.call_soon_threadsafe(events.put_nowait, event)

        try:
            for place, prompt in enumerate(prompts):
                name = f"served-{next(self._numbers)}"
                request = Request(name, prompt, body.n, body.params, place, Stream.GENERATE)
                futures.append(self._submit(request, place, send, streams=body.stream))
            left = len(samples)
            while left:
                place, event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                is_completion = isinstance(event, Completion)
                index = event.sample_index if isinstance(event, Completion) else event.sample
                left -= is_completion
                length = len(prompts[place]) if is_completion and index == 0 else 0
                if piece := samples[place, index].piece(event, length):
                    yield piece
        finally:
            for future in futures:
                future.cancel()

    def _submit(
        self,
        request: Request,
        place: int,
        send: Callable[[tuple[int, Any]], None],
        *,
        streams: bool,
    ) -> Any:
        """Submit the request for the prompt at ``place``; return its future. ``send`` gets the
        completions, the error of a request that fails, and the new tokens if it ``streams``."""

        def listen(event: NewTokens | Completion) -> None:
            if streams or isinstance(event, Completion):
                send((place, event))

        future = self._thread.submit(request, listen)

        def on_done(_: Any) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None:
                send((place, error))

        future.add_done_callback(on_done)
        return future

    def _encode(self, asked: Asked) -> tuple[Sequence[IntArray], CallFormatName | None]:
        """Return the prompts as token ids, and the format of the calls that responses may have.
        Raise RequestRefused if a prompt is too long."""
        body, calls = asked.body, None
        if isinstance(body, ChatRequest):
            tools = body.canonical_tools
            prompts = [self._prompts.encode(body.canonical_messages, tools)]
            if tools and body.tool_choice == "auto":
                calls = self._prompts.call_format
        else:
            prompts = [self._tokenizer.encode(text) for text in body.prompt]
        context = self.card().context
        longest = max(map(len, prompts))
        if longest >= context:
            raise RequestRefused(
                400,
                f"a prompt has 1 to {context - 1} tokens in this model, got {longest}; shorten it, "
                "as the model's context must have room for prompt and response",
                code=TOO_LONG,
                param="messages" if isinstance(body, ChatRequest) else "prompt",
            )
        return prompts, calls


class _Sample:
    """One response: what was sent of it, and what follows."""

    def __init__(
        self, tokenizer: Tokenizer, asked: Asked, choice: int, calls: CallFormatName | None
    ) -> None:
        self._tokenizer, self._choice, self._calls = tokenizer, choice, calls
        self._name = f"{asked.digest}_{choice}"
        self._is_chat = isinstance(asked.body, ChatRequest)
        self._has_logprobs = asked.body.has_logprobs
        self._deltas = TextDeltas(tokenizer, asked.body.stop, calls)
        self._tokens = 0
        """Number of tokens that pieces have reported."""
        self._pending = 0
        """Number of new tokens that no piece has reported, because they have no text yet."""

    def piece(self, event: NewTokens | Completion, prompt_tokens: int) -> AnswerPiece | None:
        """Return the piece that an event adds to the response, or None if it adds none.
        ``prompt_tokens`` becomes a field of the last piece."""
        if isinstance(event, Completion):
            return self._last(event, prompt_tokens)
        text = self._deltas.add(event.tokens)
        self._pending += len(event.tokens)
        logprobs = self._listed(event.tokens, event.logprobs)
        if not (text or logprobs):
            return None
        tokens, self._pending = self._pending, 0
        self._tokens += tokens
        return AnswerPiece(self._choice, text, tokens=tokens, logprobs=logprobs)

    def _last(self, done: Completion, prompt_tokens: int) -> AnswerPiece:
        if done.finish is Finish.ABORT:
            raise RequestRefused(500, NOT_FINITE)
        text = text_of(done)
        message: dict[str, Any] = {"content": text}
        if self._is_chat:
            message = assistant_message(text, self._calls, self._name)
        calls = message.get("tool_calls", ())
        ended: FinishReason = "tool_calls"
        if not calls:
            ended = "stop" if done.finish is Finish.STOP else "length"
        rest = done.token_ids[self._tokens :].tolist(), done.logprobs[self._tokens :].tolist()
        return AnswerPiece(
            self._choice,
            self._deltas.finish(message["content"] or ""),
            tuple(calls),
            len(done.token_ids) - self._tokens,
            self._listed(*rest),
            ended,
            prompt_tokens,
        )

    def _listed(self, tokens: Sequence[int], logprobs: Sequence[float]) -> tuple[TokenLogprob, ...]:
        if not self._has_logprobs:
            return ()
        texts = [self._tokenizer.decode([token]) for token in tokens]
        return tuple(map(TokenLogprob, texts, np.asarray(logprobs, np.float32).tolist()))


def text_of(completion: Completion) -> str:
    """Return the text of a response, without the stop string if one ended it."""
    stop = completion.stop
    return completion.text.removesuffix(stop) if isinstance(stop, str) else completion.text
