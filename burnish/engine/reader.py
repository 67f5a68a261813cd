"""Reads a response as it is sampled: its text, and where it ends."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from burnish.engine.protocol import Request
from burnish.types import Completion, Finish, truncates


class Detokenizer(Protocol):
    """Text of tokens as they come; a character that straddles tokens appears when it is whole."""

    text: str

    def push(self, *tokens: int) -> str: ...

    def flush(self) -> str: ...


class Tokenizer(Protocol):
    end_ids: tuple[int, ...]

    def stream(self, *, skip_special: bool = False) -> Detokenizer: ...


class Reader:
    """Watches one response for end ids, stop strings and its length limit, and completes it.

    A token at index t < min_tokens ends nothing: its end id is not drawn (see `held`) and a stop
    string that it completes does not count.
    """

    def __init__(
        self, request: Request, sample: int, tokenizer: Tokenizer | None, context: int
    ) -> None:
        """context: tokens that prompt and response may have together."""
        self._request, self._sample, self._params = request, sample, request.params
        self._detokenizer = tokenizer.stream(skip_special=True) if tokenizer else None
        self._reads = request.streamed or bool(request.params.stop)
        """Whether the text is wanted before the response is complete."""
        params = request.params
        cut = truncates(params.temperature, params.top_p, params.top_k)
        self._plain = not request.streamed and not cut
        self.limit = min(request.params.max_tokens, context - len(request.prompt))
        ends = (*(tokenizer.end_ids if tokenizer else ()), *map(int, request.params.stop_ids))
        self.end_ids = tuple(dict.fromkeys(ends))
        self._ends = frozenset(ends)
        self.finish: Finish | None = None
        self.stop: str | int | None = None
        self._count = 0
        self._shown = 0
        self._cut: int | None = None

    @property
    def held(self) -> bool:
        """Whether end ids may not be drawn yet."""
        return self._count < self._params.min_tokens

    @property
    def plain(self) -> bool:
        """Whether every token may be drawn, and none is told of before the response is complete."""
        return self._plain and not self.held

    @property
    def room(self) -> int:
        """Tokens up to the limit."""
        return self.limit - self._count

    @property
    def text(self) -> str:
        """The view: cut at the stop string, without the end token."""
        return self._detokenizer.text[: self._cut] if self._detokenizer else ""

    @property
    def silent(self) -> bool:
        """Whether nobody wants its text yet, and any of its next tokens may end it."""
        return not self._reads and not self.held

    def take(self, tokens: list[int]) -> int:
        """The next tokens of a silent response, up to the one that ends it -> how many."""
        taken = min(len(tokens), self.room)
        if not self._ends.isdisjoint(tokens[:taken]):
            taken = next(i for i, token in enumerate(tokens, 1) if token in self._ends)
            self.finish, self.stop = Finish.STOP, tokens[taken - 1]
        self._count += taken
        if self.finish is None and not self.room:
            self.finish = Finish.LENGTH
        return taken

    def push(self, token: int) -> str:
        """Take the next token -> the text that can be shown because of it."""
        held = self.held
        self._count += 1
        if token in self.end_ids and not held:
            self.finish, self.stop = Finish.STOP, token
        elif self._reads:
            fresh = self._detokenizer.push(token) if self._detokenizer else ""
            self._look_for_stop(fresh, held)
        if self.finish is None and self._count >= self.limit:
            self.finish = Finish.LENGTH
        if not self._reads:
            return ""
        if self.finish is not None and self._cut is None and self._detokenizer:
            self._detokenizer.flush()
        return self._show()

    def completion(
        self, tokens: list[int], logprobs: list[float], versions: list[int], finish: Finish
    ) -> Completion:
        if not self._reads and self._detokenizer:
            self._detokenizer.push(*tokens[: len(tokens) - (finish is Finish.STOP)])
            self._detokenizer.flush()
        return Completion(
            request_id=self._request.request_id,
            sample_index=self._sample,
            token_ids=np.array(tokens, dtype=np.int32),
            logprobs=np.array(logprobs, dtype=np.float32),
            versions=np.array(versions, dtype=np.int32),
            sampled=np.ones(len(tokens), dtype=np.bool_),
            params=self._params,
            finish=finish,
            stop=self.stop,
            text=self.text,
        )

    def _look_for_stop(self, fresh: str, held: bool) -> None:
        """A stop string must end inside the fresh text; the earliest one to begin wins."""
        if held or not fresh or not self._params.stop or self._detokenizer is None:
            return
        text = self._detokenizer.text
        seen = len(text) - len(fresh)
        found = [(text.find(s, max(0, seen - len(s) + 1)), s) for s in self._params.stop]
        hits = [(at, -len(stop), stop) for at, stop in found if at >= 0]
        if hits:
            at, _, self.stop = min(hits)
            self.finish = Finish.STOP
            self._cut = at + (len(self.stop) if self._params.include_stop else 0)

    def _show(self) -> str:
        """What was not shown yet, less an ending that a stop string may still take away."""
        text = self.text
        until = len(text)
        if self.finish is None:
            longest = max(map(len, self._params.stop), default=0)
            for size in range(min(longest, len(text)), 0, -1):
                if any(len(s) > size and s.startswith(text[-size:]) for s in self._params.stop):
                    until -= size
                    break
        shown, self._shown = self._shown, max(self._shown, until)
        return text[shown : self._shown]
