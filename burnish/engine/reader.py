"""Reads a response as it is sampled: its text, and where it ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from burnish.engine.protocol import Request, completed
from burnish.types import Completion, Finish, truncates

if TYPE_CHECKING:
    from burnish.model.tokenizer import Tokenizer


class Reader:
    """Watches one response for end ids, stop strings and its length limit, and completes it.

    A token at index t < min_tokens ends nothing: its end id is not drawn (see `held`) and a stop
    string that it completes does not count.
    """

    def __init__(
        self, request: Request, sample: int, tokenizer: Tokenizer | None, context: int
    ) -> None:
        """context: tokens that prompt and response may have together."""
        self._request, self._sample, params = request, sample, request.params
        self._detokenizer = tokenizer.stream(skip_special=True) if tokenizer else None
        self._reads = request.streamed or bool(params.stop)
        """Whether the text is wanted before the response is complete."""
        cut = truncates(params.temperature, params.top_p, params.top_k)
        self._plain = not request.streamed and not cut
        self.limit = min(params.max_tokens, context - len(request.prompt))
        self.end_ids = frozenset((*(tokenizer.end_ids if tokenizer else ()), *params.stop_ids))
        self.finish: Finish | None = None
        self.stop: str | int | None = None
        self._count = 0
        self._shown = 0
        self._cut: int | None = None

    @property
    def held(self) -> int:
        """Tokens until end ids may be drawn."""
        return max(0, self._request.params.min_tokens - self._count)

    @property
    def plain(self) -> bool:
        """Whether every token may be drawn, and no text is told before the response is complete."""
        return self._plain and not self.held

    @property
    def room(self) -> int:
        """Tokens up to the limit."""
        return self.limit - self._count

    @property
    def text(self) -> str:
        """The text up to the end of the stop string, without the end token."""
        return self._detokenizer.text[: self._cut] if self._detokenizer else ""

    def take(self, tokens: Sequence[int]) -> int:
        """The next tokens, up to the one that ends the response -> their number."""
        held, taken = self.held, min(len(tokens), self.room)
        if not self.end_ids.isdisjoint(tokens[held:taken]):
            taken = next(i for i, t in enumerate(tokens[held:], held + 1) if t in self.end_ids)
            self.finish, self.stop = Finish.STOP, tokens[taken - 1]
        if self._reads:
            taken = self._read(tokens[:taken], held)
        self._count += taken
        if self.finish is None and not self.room:
            self.finish = Finish.LENGTH
        if self._reads and self.finish is not None:
            self._flush()
        return taken

    def show(self) -> str:
        """The text that was not shown yet."""
        text, shown = self.text, self._shown
        self._shown = len(text)
        return text[shown:]

    def completion(
        self, tokens: list[int], logprobs: list[float], versions: list[int], finish: Finish
    ) -> Completion:
        if not self._reads and self._detokenizer:
            self._detokenizer.push(*tokens[: len(tokens) - (finish is Finish.STOP)])
            self._flush()
        recorded = tokens, logprobs, versions
        return completed(self._request, self._sample, recorded, finish, self.stop, self.text)

    def _read(self, tokens: Sequence[int], held: int) -> int:
        """Turn tokens into text, up to a stop string -> how many were read or end the response."""
        if self._detokenizer is None:
            return len(tokens)
        for index, token in enumerate(tokens[: len(tokens) - (self.finish is Finish.STOP)]):
            fresh = self._detokenizer.push(token)
            if fresh and index >= held and self._find_stop(fresh):
                return index + 1
        return len(tokens)

    def _find_stop(self, fresh: str) -> bool:
        """Whether a stop string ends inside the fresh text; the earliest one to begin wins."""
        assert self._detokenizer is not None
        text, stops = self._detokenizer.text, self._request.params.stop
        seen = len(text) - len(fresh)
        found = [(text.find(s, max(0, seen - len(s) + 1)), -len(s), s) for s in stops]
        hits = [hit for hit in found if hit[0] >= 0]
        if hits:
            at, _, self.stop = min(hits)
            self.finish, self._cut = Finish.STOP, at + len(self.stop)
        return bool(hits)

    def _flush(self) -> None:
        """No token follows: a character that was cut short is shown as U+FFFD."""
        if self._detokenizer is not None and self._cut is None:
            self._detokenizer.flush()
