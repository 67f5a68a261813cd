from __future__ import annotations

import pytest

from burnish.engine.native.pages import Pages


def test_a_page_is_free_again_when_its_last_holder_lets_go() -> None:
    pages = Pages(3, 4)
    page = pages.allocate()
    pages.share([page])
    pages.release([page])
    assert (pages.free, pages.holders[page]) == (2, 1)
    pages.release([page])
    assert pages.free == 3
    with pytest.raises(AssertionError, match="released twice"):
        pages.release([page])
    with pytest.raises(AssertionError, match="can't be shared"):
        pages.share([page])


def test_pages_needed() -> None:
    assert [Pages(1, 4).needed(n) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]
