"""Allocation of the KV cache's pages: reference counts, and names under which sequences with the
same tokens find a page. This module uses no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile


class Pages:
    """A pool of ``count`` pages of ``size`` tokens each, with reference counts.

    A page may have several holders while none of them writes to it: a writer makes a copy first. A
    page whose tokens are all computed may have a name (`RequestGroup.page_names`), by which other
    sequences find it while it has a holder.
    """

    def __init__(self, count: int, size: int) -> None:
        self.count, self.size = count, size
        self._free = list(range(count - 1, -1, -1))
        self.holders = [0] * count
        """Number of holders of each page."""
        self._named: dict[bytes, int] = {}
        self._names: dict[int, bytes] = {}

    @property
    def free(self) -> int:
        """Number of pages without a holder."""
        return len(self._free)

    def needed(self, tokens: int) -> int:
        """Return the number of pages that ``tokens`` tokens occupy."""
        return -(-tokens // self.size)

    def allocate(self) -> int:
        """Take a page that is free, with one holder, and return its index. At least one page must
        be free."""
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

    def forget_names(self) -> None:
        """Forget all names, because new prompts must not reuse pages that older weights
        computed."""
        self._named, self._names = {}, {}
