"""A request in flight: its group, and one sequence per sample."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from burnish.engine.protocol import Request
from burnish.engine.reader import Reader

if TYPE_CHECKING:
    from burnish.model.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Prefix:
    """A group's prompt in the cache, once it has been computed."""

    pages: tuple[int, ...]
    """They hold the whole prompt; the last one may be partly filled."""
    whole: int
    """The number of pages that no sample writes to: decoding reads them once for all samples."""


class RequestGroup:
    def __init__(
        self, request: Request, tokenizer: Tokenizer | None = None, context: int = sys.maxsize
    ) -> None:
        """context: tokens that prompt and response may have together."""
        self.request = request
        self.sequences = [
            Sequence(self, Reader(request, index, tokenizer, context), index)
            for index in range(request.n)
        ]
        """The samples that are not complete."""
        self.prefix: Prefix | None = None
        """Held by the group itself while samples wait to join; one that joined has its own hold."""
        self.filler: Sequence | None = None
        """The sample that is computing the prompt for all; the others wait for it."""
        self.names: list[bytes] | None = None
        """Of its pages; None until `page_names` is called, empty if older weights filled some."""

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    def page_names(self, size: int) -> list[bytes]:
        """A hash of all tokens up to its end for each page before the prompt's last token, which
        always runs."""
        if self.names is None:
            self.names, name = [], b""
            tokens = self.request.prompt.astype("int64")  # bytes of another width would mix up
            for start in range(0, (self.prompt_length - 1) // size * size, size):
                page = tokens[start : start + size].tobytes()
                self.names.append(name := blake2b(name + page, digest_size=16).digest())
        return self.names


class Sequence:
    """One sample: its tokens, its part in the cache, and the records of its response."""

    def __init__(self, group: RequestGroup, reader: Reader, index: int) -> None:
        """reader: turns the response into text and watches for its end."""
        self.group, self.reader, self.index = group, reader, index
        self.tokens: list[int] = [int(token) for token in group.request.prompt]
        self.logprobs: list[float] = []
        self.versions: list[int] = []
        self.waits = True
        """In the scheduler's queue, not running."""
        self.computed = 0
        """Tokens whose keys and values are in the cache."""
        self.pages: list[int] = []
        self.prefix: Prefix | None = None
        """The shared prompt in this sequence's first pages; None if it has pages of its own."""

    @property
    def pending(self) -> int:
        """Tokens to run before the next one can be sampled; 1 is plain decoding."""
        return len(self.tokens) - self.computed

    @property
    def response(self) -> list[int]:
        return self.tokens[self.group.prompt_length :]
