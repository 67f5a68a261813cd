"""The bound on lag, tried on random schedules of generators and learner."""

from __future__ import annotations

import random

import pytest

from burnish.rollout.lag_bound import Pace


def lags(
    seed: int, *, batch: int, window: int, steps: int, max_lag: int, withdrawals: int = 0
) -> list[int]:
    """The lags of a run in which generators answer in random order, and so do loads of weights."""
    chance = random.Random(seed)
    pace = Pace(batch, window, steps, max_lag)
    loaded, version, issued, rollouts = [0, 0], 0, 0, 0
    sampling: dict[int, int] = {}
    graded: dict[int, int] = {}
    found: list[int] = []
    idle = 0
    while rollouts < 40:
        idle += 1
        assert idle < 10_000, "nobody can go on"
        move = chance.choice(["issue", "finish", "load", "learn", *["withdraw"] * withdrawals])
        if move == "issue":
            who = chance.randrange(2)
            if pace.may_begin(loaded[who], version):
                pace.begin(issued, loaded[who])
                sampling[issued] = loaded[who]
                issued += 1
        elif move == "finish" and sampling:
            number = chance.choice(list(sampling))
            graded[number] = sampling.pop(number)
        elif move == "withdraw" and graded and chance.random() < 0.3:
            number = chance.choice(list(graded))  # it is dead
            pace.withdraw(number)
            del graded[number]
        elif move == "load":
            loaded[chance.randrange(2)] = version
        elif move == "learn" and (numbers := pace.ready(graded)):
            found.append(version - min(graded[number] for number in numbers))
            pace.learn(numbers)
            for number in numbers:
                del graded[number]
            version += chance.randint(0, steps)  # steps that are not finite are skipped
            rollouts += 1
            idle = 0
    return found


@pytest.mark.parametrize(
    ("batch", "window", "steps", "max_lag"),
    [(4, 4, 1, 0), (4, 4, 1, 1), (4, 8, 1, 1), (4, 9, 2, 5), (3, 9, 1, 2), (2, 6, 4, 8)],
)
@pytest.mark.parametrize("withdrawals", [0, 1])
def test_no_group_is_older_than_the_bound(
    batch: int, window: int, steps: int, max_lag: int, withdrawals: int
) -> None:
    sizes = {"batch": batch, "window": window, "steps": steps, "max_lag": max_lag}
    found = [lag for seed in range(20) for lag in lags(seed, **sizes, withdrawals=withdrawals)]
    assert max(found) <= max_lag
    assert max(found) > max_lag - steps, "the bound is not wasted"


def test_a_rollout_is_the_lowest_graded_groups_of_the_window() -> None:
    pace = Pace(batch=2, window=5, gradient_steps=1, max_lag=9)
    for number in range(7):
        pace.begin(number, 0)
    assert pace.ready({5, 6}) == [], "the window ends at 4"
    assert pace.ready({2, 1, 5}) == [1, 2]
    pace.learn([1, 2])
    assert pace.ready({3, 4, 5}) == [], "group 0 would be left alone in the window"
    assert pace.ready({0, 3, 4}) == [0, 3]


def test_a_withdrawn_group_leaves_its_place_to_the_next() -> None:
    """Otherwise two groups would be left of a window of two, one of them closed for good."""
    pace = Pace(batch=2, window=2, gradient_steps=1, max_lag=9)
    for number in range(3):
        pace.begin(number, 0)
    pace.withdraw(1)
    assert pace.ready({0}) == []
    assert pace.ready({0, 2}) == [0, 2]
    pace.withdraw(0)
    assert pace.line == [2]
