"""State of a request in flight: one `RequestGroup`, and one `Sequence` for each of its samples."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from burnish.engine.protocol import Request, completed
from burnish.randomness import Stream
from burnish.types import Completion, Finish

if TYPE_CHECKING:
    from burnish.model.tokenizer import Tokenizer


class DrawLimits(NamedTuple):
    """Restrictions on how a token is drawn; by default any token may be sampled."""

    greedy: bool = False
    """Whether the most likely token is selected; its log-probability is taken at temperature 1."""
    banned: frozenset[int] = frozenset()
    """Tokens that must not be drawn: end ids before min_tokens."""
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    penalty: float = 1.0
    """Repetition penalty for the tokens of prompt and response."""
    forced: int | None = None
    """Token that the system inserts; None if the token is drawn."""

    @property
    def truncates(self) -> bool:
        """Whether top-p, top-k or min-p excludes unlikely tokens."""
        return self.top_p < 1 or self.top_k is not None or self.min_p > 0


ANY, GREEDY = DrawLimits(), DrawLimits(greedy=True)


@dataclass(frozen=True, eq=False)
class Prefix:
    """The part of a request's prompt whose pages all its samples share, so that decoding reads them
    once for all samples."""

    pages: list[int]
    """Full pages, which no sample writes to."""


class RequestGroup:
    """State that the samples of a request share, and the samples that are not complete."""

    def __init__(
        self, request: Request, tokenizer: Tokenizer | None = None, context: int = sys.maxsize
    ) -> None:
        """Derive the limits of the samples from the request, and create its `Sequence` objects.

        ``tokenizer``: None if completions need no text; then only ``stop_ids`` and the limit end a
        response. ``context``: maximum number of tokens of prompt and response together.
        """
        self.request, self.tokenizer = request, tokenizer
        params, self.given = request.params, request.given
        self.prompt_length = len(self.given)
        """Number of tokens before the first sampled one. A partial response is computed with its
        prompt."""
        self.limit = min(params.max_tokens, context - len(request.prompt))
        """Maximum number of tokens of a response."""
        self.phrase: list[int] = []
        """The tokens of the phrase that ends a response's thinking."""
        self.budget: int | None = None
        """Index in the response at which the phrase is inserted; None if the request has no think
        budget, or if the response has no room for phrase and answer."""
        if params.think_tokens is not None and tokenizer is not None:
            self.phrase = tokenizer.encode(params.think_phrase, add_special=False).tolist()
            if params.think_tokens + len(self.phrase) < self.limit - request.turn:
                self.budget = request.turn + params.think_tokens
        self.end_ids = frozenset((*(tokenizer.end_ids if tokenizer else ()), *params.stop_ids))
        self.limits = GREEDY
        if params.temperature:
            self.limits = DrawLimits(top_p=params.top_p, top_k=params.top_k, min_p=params.min_p)
        self.limits = self.limits._replace(penalty=params.repetition_penalty)
        self.held_limits = self.limits._replace(banned=self.end_ids)
        """Limits of a turn's first min_tokens tokens, which also ban end ids; ``limits`` holds
        after that."""
        self.sequences = [Sequence(self, index) for index in range(request.n)]
        """Samples that are not complete."""
        self.filler: Sequence | None = None
        """The sample that computes the prompt for all samples, while the others wait for it; None
        if no sample does."""
        self.names: list[bytes] | None = None
        """Result of `page_names`: None before its first call; empty if older weights have computed
        some of the pages, so that other requests must not use them."""

    def page_names(self, size: int) -> list[bytes]:
        """Return the names of the prompt's full pages of ``size`` tokens, by which requests with
        the same prefix share them; an empty list if older weights have computed some of the pages.

        A name is a hash of all tokens up to the page's end. The page of the prompt's last token has
        no name, because that token is always computed.
        """
        if self.names is None:
            self.names = names_of_pages(self.given[: self.prompt_length - 1], size)
        return self.names


def names_of_pages(tokens: npt.ArrayLike, size: int, *, partial: bool = False) -> list[bytes]:
    """Return the names of the full pages of tokens: hashes of all tokens up to each page's end.
    With ``partial``, the tokens after the last full page have a name, too."""
    names, name = list[bytes](), b""
    whole = np.asarray(tokens, dtype=np.int64)  # one width, so that equal tokens have equal bytes
    end = len(whole) if partial else len(whole) // size * size
    for start in range(0, end, size):
        page = whole[start : start + size].tobytes()
        names.append(name := blake2b(name + page, digest_size=16).digest())
    return names


class Sequence:
    """One sample: its tokens, its pages in the cache, and how its response ended.

    A token at index t < min_tokens ends no response: no end id is drawn there, and a stop string
    that the token completes is ignored. The same holds for tokens of the phrase that ends the
    thinking. A stop string may start in the phrase if a sampled token completes it.

    In an episode, min_tokens, stop strings and the think budget count from `Request.turn`. A stop
    string can't start before it.
    """

    def __init__(self, group: RequestGroup, index: int) -> None:
        self.group, self.index = group, index
        begun = group.request.begun
        self.tokens: list[int] = group.given.tolist()
        self.logprobs: list[float] = [] if begun is None else begun.logprobs.tolist()
        self.versions: list[int] = [] if begun is None else begun.versions.tolist()
        self.finish: Finish | None = None
        """Why the response ended; None while it continues."""
        self.stop: str | int | None = None
        """Stop string or end id that ended the response; None if none did."""
        self.forced_from: int | None = None
        """Index in the response at which the phrase is inserted; None if it is not inserted."""
        self.waits = True
        """Whether the sample is in the scheduler's queue instead of running."""
        self.computed = 0
        """Number of tokens whose keys and values are in the cache."""
        self.pages: list[int] = []
        self.update = 0
        """Number of the scheduler's weight updates before the first of the pages was computed."""
        self.prefix: Prefix | None = None
        """The part of the prompt whose pages the sample shares with its group; None if it shares
        none."""
        watched = group.tokenizer if group.request.params.stop else None
        self._read = watched.stream() if watched else None
        self._text = ""
        """Decoded text of the turn up to the end of a stop string; empty if there are no stop
        strings."""
        if self._read is not None:
            self._text = "".join(self._read(token) or "" for token in self.turn)

    @property
    def pending(self) -> int:
        """Number of tokens to compute before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.computed

    @property
    def key(self) -> tuple[Stream, int, int]:
        """The sample's place in the run, which all turns of an episode share."""
        request = self.group.request
        return request.stream, request.group, request.first + self.index

    @property
    def response(self) -> list[int]:
        """Tokens of the response so far, beginning with the partial response if there is one."""
        return self.tokens[len(self.group.request.prompt) :]

    @property
    def turn(self) -> list[int]:
        """Tokens of the current turn so far; of the whole response unless it is an episode."""
        return self.response[self.group.request.turn :]

    @property
    def room(self) -> int:
        """Number of tokens that may follow until the think budget ends or, after that, until the
        maximum length."""
        count, budget = len(self.logprobs), self.group.budget
        return (self.group.limit if budget is None or count >= budget else budget) - count

    @property
    def held(self) -> int:
        """Number of tokens that must follow before the turn has min_tokens and may end."""
        request = self.group.request
        return max(0, request.turn + request.params.min_tokens - len(self.logprobs))

    @property
    def limits(self) -> DrawLimits:
        """Restrictions on the next token: it is forced, must not end the response yet, or has only
        the request's own limits."""
        if self.forced is not None:
            return DrawLimits(forced=self.forced)
        return self.group.held_limits if self.held else self.group.limits

    @property
    def forced(self) -> int | None:
        """The next token of the phrase that ends the thinking, while the phrase is being inserted;
        None if the next token is drawn."""
        if self.forced_from is None:
            return None
        left = self.group.phrase[len(self.logprobs) - self.forced_from :]
        return left[0] if left else None

    @property
    def put_in(self) -> slice:
        """Slice of the response's tokens that the system inserted, which is the phrase that ends
        the thinking; it selects nothing if no token was inserted."""
        first = len(self.tokens) if self.forced_from is None else self.forced_from
        return slice(first, first + len(self.group.phrase))

    @property
    def text(self) -> str:
        """Text of the response, up to the end of a stop string and without an end token; empty
        without a tokenizer."""
        shown, tokenizer = self.response, self.group.tokenizer
        if tokenizer is None:
            return ""
        if isinstance(self.stop, str):
            before = shown[: self.group.request.turn]
            return tokenizer.decode(before, skip_special=True) + self._text
        return tokenizer.decode(shown if self.stop is None else shown[:-1], skip_special=True)

    def take(self, tokens: list[int], logprobs: list[float], version: int) -> int:
        """Append new tokens with their log-probabilities and the version that sampled them, up to
        the one that ends the response. Return the number of appended tokens.

        Set `finish` if the response has ended, and `stop` if a stop string or end id ended it.
        Tokens beyond the end, the maximum length or the think budget are discarded. If the budget
        is used up before the thinking has ended, the next tokens are those of the phrase: see
        `forced`. Meanwhile, exactly one token is appended per call.
        """
        end_ids, held, count = self.group.end_ids, self.held, min(len(tokens), self.room)
        if self.forced is not None:
            held = count = min(1, count)  # no token if its logits have overflowed
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
        """Build the completion of the sample, with the tokens so far and ``finish``."""
        recorded = self.response, self.logprobs, self.versions
        ended = finish, self.stop, self.text
        return completed(self.group.request, self.index, recorded, ended, self.put_in)

    def _thinks(self) -> bool:
        """Whether the turn is still thinking: its text does not contain think_end."""
        assert self.group.tokenizer is not None, "a budget needs a tokenizer"
        text = self.group.tokenizer.decode(self.turn)
        return self.group.request.params.think_end not in text

    def _watch(self, tokens: list[int], held: int) -> int:
        """Decode tokens up to the one that completes a stop string, and record that stop string.
        Return the number of tokens up to and including that one; all tokens if there is none. Stop
        strings that the first ``held`` tokens complete are ignored."""
        assert self._read is not None
        for index, token in enumerate(tokens if self.stop is None else tokens[:-1]):
            fresh = self._read(token) or ""
            self._text += fresh
            if fresh and index >= held and self._find_stop(len(self._text) - len(fresh)):
                return index + 1
        return len(tokens)

    def _find_stop(self, seen: int) -> bool:
        """Look for stop strings that end after the first ``seen`` characters of the text. If there
        is one, set `finish` and `stop`, cut the text after the one that starts first, and return
        True."""
        text, stops = self._text, self.group.request.params.stop
        found = [(text.find(s, max(0, seen - len(s) + 1)), -len(s), s) for s in stops]
        hits = [hit for hit in found if hit[0] >= 0]
        if hits:
            at, _, self.stop = min(hits)
            self.finish, self._text = Finish.STOP, text[: at + len(self.stop)]
        return bool(hits)
