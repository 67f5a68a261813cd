"""The prompt stream. Group indices depend only on the order of calls."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from burnish.errors import DataError
from burnish.recipe.costs import Room
from burnish.tasks.stream import PromptStream
from burnish.types import Prompt


def stream() -> PromptStream:
    """Every fifth prompt is too long, from prompt 4 on."""

    def prompt(number: int) -> Prompt:
        return Prompt(f"p{number}", "", np.ones(9 if number % 5 == 4 else 1, dtype=np.int32), "t")

    task: Any = SimpleNamespace(prompt=prompt)
    return PromptStream(task, Room(5, "the test"))


def names(asked: list[tuple[int, Prompt]]) -> list[tuple[int, str]]:
    return [(number, prompt.prompt_id) for number, prompt in asked]


def test_a_reserve_that_is_released_at_once_was_never_taken() -> None:
    prompts = stream()
    prompts.take(2)
    before = copy.deepcopy(prompts.state())
    assert names(prompts.reserve(4)) == [(2, "p2"), (3, "p3"), (4, "p5"), (5, "p6")]
    assert prompts.skipped == 1
    prompts.release(set())
    assert prompts.state() == before
    prompts.reserve(4)
    prompts.release({2, 3})
    assert prompts.skipped == 0, "nobody has asked beyond the one that is too long"
    assert names(prompts.take(1)) == [(4, "p5")]
    assert prompts.open == [0, 1, 2, 3, 4]


def test_what_a_rollout_left_is_taken_next() -> None:
    """Another rollout was issued meanwhile, or another generator used what came later."""
    prompts = stream()
    prompts.take(2)
    prompts.reserve(3)  # 2, 3, 4
    prompts.take(2)  # 5, 6
    prompts.reserve(3)  # 7, 8, 9
    prompts.release({3})
    assert names(prompts.take(2)) == [(2, "p2"), (4, "p5")]
    prompts.release({8})
    assert prompts.open == [0, 1, 3, 5, 6, 8, 2, 4]
    assert [number for number, _ in prompts.take(3)] == [7, 9, 10]


def test_a_checkpoint_keeps_reserves() -> None:
    prompts = stream()
    prompts.reserve(3)
    prompts.take(1)
    prompts.reserve(3)
    prompts.release({1})
    state = prompts.state()
    written = json.dumps(state)
    after = prompts.take(1), prompts.release({5}), prompts.take(4)
    assert json.dumps(state) == written, "what was noted stays as it was"
    again = stream()
    again.load_state(json.loads(written))
    assert names(again.take(1)) == names(after[0])
    again.release({5})
    assert names(again.take(4)) == names(after[2])
    assert again.state() == prompts.state()


def prompts(*lengths):
    ids = [np.arange(length, dtype=np.int32) + 65 for length in lengths]
    return [Prompt(f"p{i}", "x" * len(row), row, "t") for i, row in enumerate(ids)]


def stream_of(lengths, room=None):
    """A stream over prompts of the given lengths, which come again and again."""
    made = prompts(*lengths)
    return PromptStream(SimpleNamespace(prompt=lambda number: made[number % len(made)]), room)


def test_a_stream_counts_groups_and_skips_prompts_that_are_too_long():
    assert names(stream_of([3, 9, 4]).take(4)) == [(0, "p0"), (1, "p1"), (2, "p2"), (3, "p0")]
    stream = stream_of([3, 9, 6, 5], Room(5, "so"))
    assert names(stream.take(1)) == [(0, "p0")]
    assert stream.skipped == 0
    assert names(stream.take(2)) == [(1, "p3"), (2, "p0")]
    assert stream.skipped == 2
    with pytest.raises(
        DataError, match=r"100 consecutive prompts are too long: .* has 7 tokens, and so leaves 5"
    ):
        stream_of([8, 7], Room(5, "so")).take(1)


def test_a_stream_goes_on_where_its_state_was_saved():
    whole = stream_of([3, 9, 4], Room(5, "so"))
    whole.take(3)
    other = stream_of([3, 9, 4], Room(5, "so"))
    other.load_state(json.loads(json.dumps(whole.state())))
    assert other.skipped == whole.skipped == 1
    assert names(other.take(5)) == names(whole.take(5))
