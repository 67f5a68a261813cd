"""A request in flight: its group, and one sequence per sample."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from burnish.engine.protocol import Request, completed
from burnish.types import Completion, Finish

if TYPE_CHECKING:
    from burnish.model.tokenizer import Tokenizer


class Limits(NamedTuple):
    """How a token is drawn; by default any token may be, by chance."""

    greedy: bool = False
    """Whether the likeliest token is taken; its log-probability is the one at temperature 1."""
    banned: frozenset[int] = frozenset()
    """Tokens that may not be drawn: end ids before min_tokens."""
    top_p: float = 1.0
    top_k: int | None = None
    forced: int | None = None
    """The token that is taken whatever the model says; None if the token is drawn."""


ANY, GREEDY = Limits(), Limits(greedy=True)


@dataclass(frozen=True, eq=False)
class Prefix:
    """The part of a group's prompt that decoding reads once for all samples."""

    pages: list[int]
    """Whole pages, which no sample writes to."""


class RequestGroup:
    def __init__(
        self, request: Request, tokenizer: Tokenizer | None = None, context: int = sys.maxsize
    ) -> None:
        """context: tokens that prompt and response may have together."""
        self.request, self.tokenizer = request, tokenizer
        params, self.given = request.params, request.given
        self.prompt_length = len(self.given)
        """Tokens before the first that is sampled: a response's beginning is computed with its
        prompt."""
        self.limit = min(params.max_tokens, context - len(request.prompt))
        """Tokens that a response has at most."""
        self.phrase: list[int] = []
        """The tokens that end a response's thinking."""
        self.budget: int | None = None
        """Tokens before the phrase; None if there is no budget, or no room for phrase and answer
        in the model's context."""
        if params.think_tokens is not None and tokenizer is not None:
            self.phrase = tokenizer.encode(params.think_phrase, add_special=False).tolist()
            if params.think_tokens + len(self.phrase) < self.limit:
                self.budget = params.think_tokens
        self.end_ids = frozenset((*(tokenizer.end_ids if tokenizer else ()), *params.stop_ids))
        self.limits = Limits(top_p=params.top_p, top_k=params.top_k)
        if params.temperature == 0:
            self.limits = GREEDY
        self.held_limits = self.limits._replace(banned=self.end_ids)
        """How tokens are drawn once a response may end, and before that."""
        self.sequences = [Sequence(self, index) for index in range(request.n)]
        """The samples that are not complete."""
        self.filler: Sequence | None = None
        """The sample that is computing the prompt for all; the others wait for it."""
        self.names: list[bytes] | None = None
        """Of its pages; None until `page_names` is called, empty if older weights filled some."""

    def page_names(self, size: int) -> list[bytes]:
        """A hash of all tokens up to its end for each page before the prompt's last token, which
        always runs."""
        if self.names is None:
            self.names, name = [], b""
            tokens = self.given.astype("int64")  # bytes of another width would mix up
            for start in range(0, (self.prompt_length - 1) // size * size, size):
                page = tokens[start : start + size].tobytes()
                self.names.append(name := blake2b(name + page, digest_size=16).digest())
        return self.names


class Sequence:
    """One sample: its tokens, its pages in the cache, and its response with its records and end.

    A token at index t < min_tokens ends nothing: no end id is drawn there, and a stop string that
    the token completes does not count. Neither does a token of the phrase that ends the thinking;
    a stop string may begin in the phrase if a sampled token completes it.
    """

    def __init__(self, group: RequestGroup, index: int) -> None:
        self.group, self.index = group, index
        begun = group.request.begun
        self.tokens: list[int] = group.given.tolist()
        self.logprobs: list[float] = [] if begun is None else begun.logprobs.tolist()
        self.versions: list[int] = [] if begun is None else begun.versions.tolist()
        self.finish: Finish | None = None
        self.stop: str | int | None = None
        """The stop string or end id that ended the response; None if none did."""
        self.forced_from: int | None = None
        """The place of the phrase in the response; None if its thinking was not ended by it."""
        self.waits = True
        """In the scheduler's queue, not running."""
        self.computed = 0
        """Tokens whose keys and values are in the cache."""
        self.pages: list[int] = []
        self.prefix: Prefix | None = None
        """The shared prompt in this sequence's first pages; None if all its pages are its own."""
        watched = group.tokenizer if group.request.params.stop else None
        self._read = watched.stream() if watched else None
        self._text = ""
        """The text that was read so far, for stop strings alone, up to the end of one."""
        if self._read is not None:
            self._text = "".join(self._read(token) or "" for token in self.response)

    @property
    def pending(self) -> int:
        """Tokens to run before the next one can be sampled; 1 is plain decoding."""
        return len(self.tokens) - self.computed

    @property
    def response(self) -> list[int]:
        return self.tokens[len(self.group.request.prompt) :]

    @property
    def room(self) -> int:
        """Tokens up to the response's limit, or first to the end of its think budget."""
        count, budget = len(self.logprobs), self.group.budget
        return (self.group.limit if budget is None or count >= budget else budget) - count

    @property
    def held(self) -> int:
        """Tokens until the response may end."""
        return max(0, self.group.request.params.min_tokens - len(self.logprobs))

    @property
    def limits(self) -> Limits:
        """How the next token is drawn."""
        if self.forced is not None:
            return Limits(forced=self.forced)
        return self.group.held_limits if self.held else self.group.limits

    @property
    def forced(self) -> int | None:
        """The next token if it is the phrase's; None if it is drawn."""
        if self.forced_from is None:
            return None
        left = self.group.phrase[len(self.logprobs) - self.forced_from :]
        return left[0] if left else None

    @property
    def put_in(self) -> slice:
        """The tokens of the response that were not sampled."""
        first = len(self.tokens) if self.forced_from is None else self.forced_from
        return slice(first, first + len(self.group.phrase))

    @property
    def text(self) -> str:
        """The response up to the end of its stop string, without its end token."""
        if isinstance(self.stop, str):
            return self._text
        told = self.response if self.stop is None else self.response[:-1]
        tokenizer = self.group.tokenizer
        return tokenizer.decode(told, skip_special=True) if tokenizer else ""

    def take(self, tokens: list[int], logprobs: list[float], version: int) -> int:
        """The next tokens, up to the one that ends the response -> their number."""
        end_ids, held, count = self.group.end_ids, self.held, min(len(tokens), self.room)
        if self.forced is not None:
            held = count = 1
        if not end_ids.isdisjoint(tokens[held:count]):
            count = next(i for i, t in enumerate(tokens[held:], held + 1) if t in end_ids)
            self.finish, self.stop = Finish.STOP, tokens[count - 1]
        if self._read is not None:
            count = self._watch(tokens[:count], held)
        self.tokens += tokens[:count]
        self.logprobs += logprobs[:count]
        self.versions += [version] * count
        if self.finish is None and not self.room:
            self.finish = Finish.LENGTH
        if self.finish is None and len(self.logprobs) == self.group.budget and self._thinks():
            self.forced_from = self.group.budget
        return count

    def complete(self, finish: Finish) -> Completion:
        recorded = self.response, self.logprobs, self.versions
        ended = finish, self.stop, self.text
        return completed(self.group.request, self.index, recorded, ended, self.put_in)

    def _thinks(self) -> bool:
        """Whether the response has not said the end of its thinking."""
        assert self.group.tokenizer is not None, "a budget needs a tokenizer"
        said = self.group.tokenizer.decode(self.response)
        return self.group.request.params.think_end not in said

    def _watch(self, tokens: list[int], held: int) -> int:
        """Reads tokens up to a stop string -> their number."""
        assert self._read is not None
        for index, token in enumerate(tokens if self.stop is None else tokens[:-1]):
            fresh = self._read(token) or ""
            self._text += fresh
            if fresh and index >= held and self._find_stop(len(self._text) - len(fresh)):
                return index + 1
        return len(tokens)

    def _find_stop(self, seen: int) -> bool:
        """Whether a stop string ends after the `seen` characters; the first to begin wins."""
        text, stops = self._text, self.group.request.params.stop
        found = [(text.find(s, max(0, seen - len(s) + 1)), -len(s), s) for s in stops]
        hits = [hit for hit in found if hit[0] >= 0]
        if hits:
            at, _, self.stop = min(hits)
            self.finish, self._text = Finish.STOP, text[: at + len(self.stop)]
        return bool(hits)
