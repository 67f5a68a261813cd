from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import tiny

from burnish.engine.native.sequence import ANY, GREEDY, DrawLimits, RequestGroup, Sequence
from burnish.engine.protocol import Request
from burnish.types import Finish, SamplingParams

EVERY_BYTE = "".join(map(chr, (*range(0x800), *range(0x800, 0xD800, 0x800), 0xE000, 0xF000)))
EVERY_BYTE += "".join(map(chr, range(0x10000, 0x110000, 0x10000)))
"""A text whose UTF-8 has all bytes that there are in UTF-8."""


def sample(text: bool = True, context: int = 500, **params: Any) -> Sequence:
    request = Request("a", tiny.prompt(3), 1, SamplingParams(**params))
    return RequestGroup(request, tiny.tokenizer() if text else None, context).sequences[0]


def take(sequence: Sequence, tokens: list[int]) -> int:
    return sequence.take(tokens, [0.0] * len(tokens), 0)


def read(text: str, limit: int = 100, end: int | None = None, **params: Any) -> Sequence:
    """A response of one token per byte."""
    spelled = tiny.tokenizer().encode(EVERY_BYTE).tolist()
    ids = dict(zip(EVERY_BYTE.encode(), spelled, strict=True))
    sequence = sample(max_tokens=limit, **params)
    for token in [ids[byte] for byte in text.encode()] + ([end] if end is not None else []):
        if sequence.finish is None:
            assert take(sequence, [token]) == 1
    return sequence


def test_a_stop_string_straddles_tokens() -> None:
    done = read("go \n## stop", stop=(" st",))
    assert (done.finish, done.stop, done.text) == (Finish.STOP, " st", "go \n## st")
    assert len(done.response) == len(done.text)


def test_the_earliest_stop_wins() -> None:
    done = read("xabc", stop=("c", "abc", "bc"))
    assert (done.stop, done.text) == ("abc", "xabc")


def test_characters_straddle_tokens() -> None:
    done = read("é漢🙂", stop=("漢",))
    assert (done.text, done.stop, len(done.response)) == ("é漢", "漢", 5)


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_a_character_cut_short_by_the_limit(stop: tuple[str, ...]) -> None:
    done = read("ab🙂", limit=4, stop=stop)
    assert (done.finish, done.text) == (Finish.LENGTH, "ab\ufffd")


@pytest.mark.parametrize("stop", [(), ("x",)])
def test_the_end_token_is_no_text(stop: tuple[str, ...]) -> None:
    done = read("ab", end=tiny.END, stop=stop)
    assert (done.finish, done.stop, done.text) == (Finish.STOP, tiny.END, "ab")
    assert len(done.response) == 3


def test_min_tokens_holds_back_stop_strings_and_end_ids() -> None:
    done = read("..x..x", min_tokens=3, stop=("x",))
    assert (done.stop, len(done.response), done.text) == ("x", 6, "..x..x")
    done = read("..xx", min_tokens=3, stop=("xx",))
    assert len(done.response) == 4  # begun while held back, completed after
    assert read("ab", end=tiny.END, min_tokens=3).finish is None
    assert read("abc", end=tiny.END, min_tokens=3).finish is Finish.STOP


def test_without_a_tokenizer() -> None:
    sequence = sample(text=False, context=9, stop_ids=(7,))
    assert sequence.room == 6
    assert (take(sequence, [1, 2]), take(sequence, [7, 3])) == (2, 1)
    assert (sequence.finish, sequence.stop, sequence.text) == (Finish.STOP, 7, "")


def test_limits_on_the_next_token() -> None:
    sequence = sample(min_tokens=1, stop_ids=(7,))
    assert sequence.limits == DrawLimits(False, frozenset((tiny.END, 7)))
    take(sequence, [1])
    assert sequence.limits == ANY
    assert sample(temperature=0.0).limits == GREEDY


@pytest.mark.parametrize("size", [3, 8, 40])
@pytest.mark.parametrize("params", [{}, {"stop": ("e", "a b")}, {"min_tokens": 4}])
def test_several_tokens_at_once_are_read_like_one_after_another(
    size: int, params: dict[str, Any]
) -> None:
    for seed, limit in product(range(20), (1, 5, 8, 13, 40)):
        tokens = tiny.prompt(40, seed).tolist()
        tokens[seed], tokens[seed + 10 : seed + 12] = tiny.END, [7, 7]
        if limit >= params.get("min_tokens", 0):
            chosen = {"max_tokens": limit, "stop_ids": (7,)} | params
            one, other = (_taken(sample(**chosen), tokens, n) for n in (1, size))
            assert one == other


def _taken(sequence: Sequence, tokens: list[int], size: int) -> tuple[Any, ...]:
    taken = 0
    while sequence.finish is None:
        taken += take(sequence, tokens[taken : taken + size])
    assert len(sequence.logprobs) == len(sequence.versions) == len(sequence.response) == taken
    return taken, sequence.finish, sequence.stop, sequence.room, sequence.text


def test_names_of_pages_depend_on_all_tokens_before() -> None:
    def names(ids: list[int]) -> list[bytes]:
        return RequestGroup(Request("a", np.array(ids, np.int32))).page_names(2)

    first, again, other = names([1, 2, 3, 4, 5]), names([1, 2, 3, 4]), names([9, 2, 3, 4, 5])
    assert (len(first), first[:1]) == (2, again)  # the page of the last token has no name
    assert set(first).isdisjoint(other)
