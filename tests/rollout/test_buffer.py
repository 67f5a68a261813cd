"""The replay buffer: what stays, what leaves, and what a step draws."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from burnish.rollout.buffer import Buffer


def group(index: int, version: int = 0) -> Any:
    return SimpleNamespace(index=index, oldest_version=version)


def numbers(groups: list[Any]) -> list[int]:
    return [g.index for g in groups]


def test_the_oldest_leave_first() -> None:
    buffer = Buffer(3, max_uses=9)
    assert buffer.put([group(0), group(1)]) == []
    assert [kept.group.index for kept in buffer.put([group(2), group(3)])] == [0]
    assert numbers([kept.group for kept in buffer.kept]) == [1, 2, 3]


def test_a_group_leaves_when_it_is_used_up() -> None:
    buffer = Buffer(4, "recent", max_uses=2)
    buffer.put([group(0), group(1)])
    assert numbers(buffer.take(1, step=1, version=0)) == [1]
    assert numbers(buffer.take(2, step=2, version=0)) == [0, 1]
    assert numbers([kept.group for kept in buffer.kept]) == [0]


def test_groups_that_are_too_old_leave() -> None:
    buffer = Buffer(4, max_age=2)
    buffer.put([group(0, version=0), group(1, version=3)])
    assert [kept.group.index for kept in buffer.age(version=3)] == [0]
    assert numbers([kept.group for kept in buffer.kept]) == [1]


def drawn(order: Any, versions: list[int]) -> Counter[int]:
    """How often each group is the one that a step draws, over 4,000 steps."""
    found: Counter[int] = Counter()
    for step in range(4000):
        buffer = Buffer(len(versions), order, max_uses=2)
        buffer.put([group(k, version) for k, version in enumerate(versions)])
        found[buffer.take(1, step, version=3)[0].index] += 1
    return found


@pytest.mark.slow
def test_uniform_draws_all_alike() -> None:
    found = drawn("uniform", [0, 1, 3])
    assert [found[k] / 4000 for k in range(3)] == pytest.approx([1 / 3] * 3, abs=0.03)


def test_weighted_draws_by_recency() -> None:
    """Ages 3, 2, 0 have weights 1/4, 1/3, 1, which are 3/19, 4/19 and 12/19 of their sum."""
    found = drawn("weighted", [0, 1, 3])
    wanted = [3 / 19, 4 / 19, 12 / 19]
    assert [found[k] / 4000 for k in range(3)] == pytest.approx(wanted, abs=0.03)


def test_draws_depend_on_the_step_and_the_groups_alone() -> None:
    first, second = Buffer(6, "uniform", max_uses=9), Buffer(6, "uniform", max_uses=9)
    first.put([group(k) for k in range(6)])
    second.put([group(k) for k in (5, 3, 1, 0, 2, 4)])
    first.take(3, step=1, version=0)
    assert numbers(first.take(2, step=2, version=0)) == numbers(second.take(2, step=2, version=0))
