from __future__ import annotations

from itertools import product
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
        assert reader.take([token]) == 1
        shown.append(reader.show())
        if reader.finish is not None:
            break
    return reader, shown, len(shown)


def test_a_stop_string_straddles_tokens() -> None:
    reader, shown, taken = read("go \n## stop", stop=(" st",))
    view = "go \n## st"
    assert (reader.finish, reader.stop, reader.text) == (Finish.STOP, " st", view)
    assert "".join(shown) == view
    assert taken == len(view)


def test_the_earliest_stop_wins() -> None:
    reader, _, _ = read("xabc", stop=("c", "abc", "bc"))
    assert (reader.stop, reader.text) == ("abc", "xabc")


def test_characters_straddle_tokens() -> None:
    reader, shown, _ = read("é漢🙂", stop=("漢",))
    assert (reader.text, reader.stop) == ("é漢", "漢")
    assert shown == ["", "é", "", "", "漢"]
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
    assert (reader.take([1, 2]), reader.take([7, 3]), reader.show()) == (2, 1, "")
    assert (reader.finish, reader.stop, reader.text) == (Finish.STOP, 7, "")


@pytest.mark.parametrize("size", [3, 8, 40])
@pytest.mark.parametrize("params", [{}, {"stop": ("e", "a b")}, {"min_tokens": 4}])
def test_several_tokens_at_once_are_read_like_one_after_another(
    size: int, params: dict[str, Any]
) -> None:
    tokenizer = tiny.tokenizer()
    for seed, limit in product(range(20), (1, 5, 8, 13, 40)):
        tokens = tiny.prompt(40, seed).tolist()
        tokens[seed], tokens[seed + 10 : seed + 12] = tiny.END, [7, 7]
        chosen = SamplingParams(**{"max_tokens": limit, "stop_ids": (7,)} | params)
        if limit >= chosen.min_tokens:
            request = Request("a", tiny.prompt(3), 1, chosen, streamed=False)
            read = [_taken(Reader(request, 0, tokenizer, 500), tokens, n) for n in (1, size)]
            assert read[0] == read[1]


def _taken(reader: Reader, tokens: list[int], size: int) -> tuple[Any, ...]:
    taken = 0
    while reader.finish is None:
        taken += reader.take(tokens[taken : taken + size])
    text = reader.completion(tokens[:taken], [0.0], [0], reader.finish).text
    return taken, reader.finish, reader.stop, reader.room, text
