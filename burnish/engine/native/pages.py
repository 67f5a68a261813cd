"""Pages of the KV cache: their holders, and names for their contents. No tensors here."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile


class Pages:
    """A pool of `count` pages of `size` tokens each, counted by reference.

    A page may have several holders as long as nobody writes to it: a writer takes a copy. A page
    whose tokens are all computed may have a name, under which others find it while it is held.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._free = list(range(count - 1, -1, -1))
        self.holders = [0] * count
        """By page."""
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.size)

    def allocate(self) -> int:
        page = self._free.pop()
        self.holders[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self.holders[page] > 0, f"page {page} is free and can't be shared"
            self.holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self.holders[page] > 0, f"page {page} was released twice"
            self.holders[page] -= 1
            if not self.holders[page]:
                self._free.append(page)
                if page in self._names:
                    del self._named[self._names.pop(page)]

    def name(self, page: int, name: bytes) -> None:
        if name not in self._named:
            self._named[name], self._names[page] = page, name

    def find(self, names: Iterable[bytes]) -> list[int]:
        """The pages of these names, up to the first that nobody holds."""
        return [self._named[name] for name in takewhile(self._named.__contains__, names)]

    def forget_names(self) -> None:
        """The weights have changed: new prompts are not computed on top of older pages."""
        self._named, self._names = {}, {}
