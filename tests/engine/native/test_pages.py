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


def test_kept_pages_are_free_and_found_by_their_key_alone() -> None:
    pages = Pages(4, 4)
    own = [pages.allocate(), pages.allocate()]
    pages.name(own[0], b"a")
    pages.keep("k", [b"a", b"b"], own, 7)
    assert (pages.free, pages.find([b"a"])) == (2, [own[0]])
    pages.release(own)
    assert (pages.free, pages.find([b"a"])) == (4, [])
    assert pages.kept("other", [b"a"]) == []
    assert pages.kept("k", [b"a", b"x"]) == own[:1]
    assert pages.kept("k", [b"a", b"b", b"c"]) == own
    assert (pages.kept_length("k"), pages.kept_length("other")) == (7, 0)
    pages.take("k", own[:1])
    assert (pages.free, pages.holders[own[0]], pages.held(own)) == (3, 1, 1)
    assert pages.kept("k", [b"a"]) == []
    assert {pages.allocate() for _ in range(3)} == {0, 1, 2, 3} - {own[0]}


def test_the_least_recently_kept_pages_are_allocated_first() -> None:
    pages = Pages(5, 4)
    first, second = ([pages.allocate(), pages.allocate()] for _ in range(2))
    for key, own in (("first", first), ("second", second), ("first", first)):
        pages.keep(key, [b"a", b"b"], own, 8)
    pages.release([*first, *second])
    assert pages.free == 5
    assert pages.allocate() not in {*first, *second}
    assert [pages.allocate() for _ in range(2)] == second[::-1]
    assert pages.kept("second", [b"a"]) == []
    assert pages.kept("first", [b"a", b"b"]) == first
    assert pages.allocate() == first[1]
    assert pages.kept("first", [b"a", b"b"]) == first[:1]
    assert pages.kept_length("first") == 4
    assert pages.free == 1
    pages.forget_names()
    assert pages.kept("first", [b"a"]) == []
    assert pages.free == 1


def test_a_page_that_two_keys_keep_is_free_once() -> None:
    pages = Pages(2, 4)
    page = pages.allocate()
    for key in "ab":
        pages.keep(key, [b"x"], [page], 4)
    pages.release([page])
    pages.take("a", [page])
    assert pages.free == 1
    assert pages.kept("b", [b"x"]) == [page]
    pages.release([page])
    assert pages.free == 2
    assert sorted(pages.allocate() for _ in range(2)) == [0, 1]
    assert pages.free == 0


def test_a_page_that_is_not_full_is_kept_by_one_key_alone() -> None:
    """The next turn writes to it."""
    pages = Pages(3, 4)
    own = [pages.allocate(), pages.allocate()]
    pages.share(own)
    pages.keep("a", [b"x", b"y"], own, 6)  # another sequence holds them, too
    assert (pages.kept("a", [b"x", b"y"]), pages.kept_length("a")) == (own[:1], 4)
    pages.release(own)
    pages.keep("b", [b"x", b"y"], own, 6)
    assert (pages.kept("b", [b"x", b"y"]), pages.kept_length("b")) == (own, 6)
    pages.keep("c", [b"x", b"y"], own, 5)
    assert (pages.kept("c", [b"x", b"y"]), pages.kept_length("c")) == (own[:1], 4)
