"""Allocation of the KV cache's pages: reference counts, names under which sequences with the same
tokens find a page, and pages that are kept for the next turn of an episode. This module uses no
tensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterable, Sequence
from itertools import takewhile


class Pages:
    """A pool of ``count`` pages of ``size`` tokens each, with reference counts.

    A page may have several holders while none of them writes to it: a writer makes a copy first. A
    page whose tokens are all computed may have a name (`RequestGroup.page_names`), by which other
    sequences find it while it has a holder.

    Pages of a sequence that has ended may be kept under a key (`keep`); the last one need not be
    full. Without a holder they count as free, and the least recently kept ones are allocated again
    when no other page is free. Only a sequence with the same key finds them (`take`), so that other
    sequences share the same pages whatever ran before.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._free = list(range(count - 1, -1, -1))
        self.holders = [0] * count
        """Number of holders of each page."""
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}
        self._kept: OrderedDict[Hashable, list[tuple[bytes, int]]] = OrderedDict()
        """The names and pages that are kept, by key; least recently kept first."""
        self._lengths: dict[Hashable, int] = {}
        """Number of tokens in the pages that `keep` was called with, by key."""
        self._keepers = [0] * count
        """Number of keys under which each page is kept."""
        self._idle = 0
        """Number of pages that are kept and have no holder."""

    @property
    def free(self) -> int:
        """Number of pages without a holder."""
        return len(self._free) + self._idle

    def held(self, pages: Iterable[int]) -> int:
        """Return how many of the pages have a holder."""
        return sum(self.holders[page] > 0 for page in pages)

    def private(self, pages: Iterable[int]) -> list[int]:
        """Return those of the pages that have a single holder and are not kept."""
        return [p for p in pages if self.holders[p] == 1 and not self._keepers[p]]

    def needed(self, tokens: int) -> int:
        """Return the number of pages that ``tokens`` tokens occupy."""
        return -(-tokens // self.size)

    def allocate(self) -> int:
        """Take a page that is free, with one holder, and return its index. At least one page must
        be free."""
        while not self._free:
            key, kept = next(iter(self._kept.items()))
            self._let_go(kept.pop()[1])
            if not kept:
                del self._kept[key], self._lengths[key]
        page = self._free.pop()
        self.holders[page] = 1
        return page

    def share(self, pages: Iterable[int]) -> None:
        """Add one holder to each of the pages, none of which may be free."""
        for page in pages:
            assert self.holders[page] > 0, f"page {page} is free and can't be shared"
            self.holders[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Remove one holder from each of the pages. A page without holders is free and loses its
        name."""
        for page in pages:
            assert self.holders[page] > 0, f"page {page} was released twice"
            self.holders[page] -= 1
            if not self.holders[page]:
                if self._keepers[page]:
                    self._idle += 1
                else:
                    self._free.append(page)
                if page in self._names:
                    del self._named[self._names.pop(page)]

    def name(self, page: int, name: bytes) -> None:
        """Give a page a name, unless another page has the name already."""
        if name not in self._named:
            self._named[name], self._names[page] = page, name

    def find(self, names: Iterable[bytes]) -> list[int]:
        """Return the pages with these names, up to the first name that no page has. The caller must
        `share` them to hold them."""
        return [self._named[name] for name in takewhile(self._named.__contains__, names)]

    def keep(
        self, key: Hashable, names: Sequence[bytes], pages: Sequence[int], length: int
    ) -> None:
        """Keep pages, which have a holder, these names and ``length`` tokens, under a key, in place
        of those that are kept under it. If the last page is not full, it is only kept if no other
        sequence holds or keeps it, because the next turn will write to it."""
        self.drop(key)
        if length % self.size and (self.holders[pages[-1]] > 1 or self._keepers[pages[-1]]):
            names, pages, length = names[:-1], pages[:-1], length // self.size * self.size
        if pages:
            self._kept[key], self._lengths[key] = list(zip(names, pages, strict=True)), length
        for page in pages:
            assert self.holders[page] > 0, f"page {page} is free and can't be kept"
            self._keepers[page] += 1

    def kept_length(self, key: Hashable) -> int:
        """Return the number of tokens in the pages that are kept under a key."""
        return min(self._lengths.get(key, 0), self.size * len(self._kept.get(key, ())))

    def kept(self, key: Hashable, names: Iterable[bytes]) -> list[int]:
        """Return the pages that are kept under a key, up to the first whose name differs from the
        given one."""
        pairs = zip(self._kept.get(key, ()), names, strict=False)
        return [page for (own, page), _ in takewhile(lambda pair: pair[0][0] == pair[1], pairs)]

    def take(self, key: Hashable, pages: Sequence[int]) -> None:
        """Add one holder to each of the pages, the first ones that are kept under a key, and keep
        none under it any more."""
        for page in pages:
            self._idle -= not self.holders[page]
            self.holders[page] += 1
        self.drop(key)

    def drop(self, key: Hashable) -> None:
        """Keep no pages under a key any more."""
        self._lengths.pop(key, None)
        for _, page in self._kept.pop(key, ()):
            self._let_go(page)

    def _let_go(self, page: int) -> None:
        self._keepers[page] -= 1
        if not self._keepers[page] and not self.holders[page]:
            self._idle -= 1
            self._free.append(page)

    def forget_names(self) -> None:
        """Forget all names and keep no pages any more, because new prompts must not reuse pages
        that older weights computed."""
        self._named, self._names = {}, {}
        for key in list(self._kept):
            self.drop(key)
