from __future__ import annotations

from typing import Any

import pytest
import tiny

from burnish.engine.protocol import Request
from burnish.engine.reader import Reader
from burnish.types import Finish, SamplingParams

EVERY_BYTE = "".join(map(chr, (*range(0x800), *range(0x800, 0xD800, 0x800), 0xE000, 0xF000)))
EVERY_BYTE += "".join(map(chr, range(0x10000, 0x110000, 0x10000)))
"""A text whose UTF-8 has all bytes that there are in UTF-8."""


def read(
    text: str | bytes, limit: int = 100, end: int | None = None, **params: Any
) -> tuple[Reader, list[str], int]:
    """One token per byte -> the reader, what it showed token by token, and the tokens it took."""
    tokenizer = tiny.tokenizer()
    data = text.encode() if isinstance(text, str) else text
    ids = dict(zip(EVERY_BYTE.encode(), tokenizer.encode(EVERY_BYTE).tolist(), strict=True))
    tokens = [ids[byte] for byte in data] + ([end] if end is not None else [])
    request = Request("a", tiny.prompt(3), 1, SamplingParams(max_tokens=limit, **params))
    reader = Reader(request, 0, tokenizer, context=500)
    shown = []
    for token in tokens:
        shown.append(reader.push(token))
        if reader.finish is not None:
            break
    return reader, shown, len(shown)


@pytest.mark.parametrize(("include", "view"), [(True, "go \n## st"), (False, "go \n##")])
def test_a_stop_string_straddles_tokens(include: bool, view: str) -> None:
    reader, shown, taken = read("go \n## stop", stop=(" st",), include_stop=include)
    assert (reader.finish, reader.stop, reader.text) == (Finish.STOP, " st", view)
    assert "".join(shown) == view
    assert taken == len("go \n## st")


def test_text_that_a_stop_may_take_away_is_not_shown() -> None:
    _, shown, _ = read("a##b###", stop=("###",), include_stop=False)
    assert shown == ["a", "", "", "##b", "", "", ""]


def test_the_earliest_stop_wins() -> None:
    reader, _, _ = read("xabc", stop=("c", "abc", "bc"))
    assert (reader.stop, reader.text) == ("abc", "xabc")


def test_characters_straddle_tokens() -> None:
    reader, shown, _ = read("é漢🙂", stop=("漢",), include_stop=False)
    assert (reader.text, reader.stop) == ("é", "漢")
    assert shown == ["", "é", "", "", ""]
    reader, shown, _ = read("a🙂b")
    assert shown == ["a", "", "", "", "🙂", "b"]


def test_a_character_cut_short_by_the_limit() -> None:
    reader, shown, _ = read("ab🙂", limit=4)
    assert (reader.finish, reader.text) == (Finish.LENGTH, "ab\ufffd")
    assert "".join(shown) == reader.text


def test_the_end_token_is_no_text() -> None:
    reader, _, taken = read("ab", end=tiny.END)
    assert (reader.finish, reader.stop, reader.text, taken) == (Finish.STOP, tiny.END, "ab", 3)


def test_min_tokens_holds_back_stop_strings_and_end_ids() -> None:
    reader, _, taken = read("..x..x", min_tokens=3, stop=("x",))
    assert (reader.stop, taken, reader.text) == ("x", 6, "..x..x")
    reader, _, taken = read("..xx", min_tokens=3, stop=("xx",))
    assert taken == 4  # begun while held back, completed after
    reader, _, _ = read("ab", end=tiny.END, min_tokens=3)
    assert reader.finish is None
    reader, _, _ = read("abc", end=tiny.END, min_tokens=3)
    assert reader.finish is Finish.STOP


def test_without_a_tokenizer() -> None:
    request = Request("a", tiny.prompt(3), 1, SamplingParams(stop_ids=(7,)))
    reader = Reader(request, 0, None, context=9)
    assert reader.limit == 6
    assert [reader.push(token) for token in (1, 2, 7)] == ["", "", ""]
    assert (reader.finish, reader.stop, reader.text) == (Finish.STOP, 7, "")


@pytest.mark.parametrize("limit", [1, 5, 8, 13, 40])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_several_tokens_at_once_are_read_like_one_after_another(limit: int, size: int) -> None:
    tokenizer, ends = tiny.tokenizer(), (7, tiny.END)
    for seed in range(20):
        tokens = tiny.prompt(40, seed).tolist()
        tokens[seed], tokens[seed + 10 : seed + 12] = tiny.END, [7, 7]
        params = SamplingParams(max_tokens=limit, stop_ids=ends)
        request = Request("a", tiny.prompt(3), 1, params, streamed=False)
        one, several = (Reader(request, 0, tokenizer, context=500) for _ in range(2))
        taken = [0, 0]
        while one.finish is None:
            one.push(tokens[taken[0]])
            taken[0] += 1
        while several.finish is None:
            assert several.silent
            taken[1] += several.take(tokens[taken[1] : taken[1] + size])
        assert taken[0] == taken[1]
        assert (one.finish, one.stop, one.room) == (several.finish, several.stop, several.room)
