"""Several rewards: their weighted sum, parts, status and correctness, by hand."""

import math
import pickle
from contextlib import closing
from pathlib import Path

import pytest

from burnish.graders.in_process import InProcess
from burnish.graders.pool import GraderLimits, GraderPool
from burnish.graders.rewards import Source, score
from burnish.graders.weighted import Member, WeightedGrader, combine
from burnish.types import Status

REWARDS = Path(__file__).with_name("rewards_for_tests.py")


def combined(*given):
    """Combine (weight, value that the reward returned) pairs; the rewards are named a, b, …"""
    members = [Member(name, w, None) for name, (w, _) in zip("abc", given, strict=False)]
    return combine(members, [score(lambda r, row, v=value: v, "", {}) for _, value in given])


def test_the_sum_and_the_parts():
    found = combined((0.5, 0.2), (-2.0, {"reward": 0.25, "length": 7}), (0.0, 3))
    assert found.reward == 0.5 * 0.2 - 2.0 * 0.25
    assert found.parts == {"a": 0.2, "b": 0.25, "b_length": 7.0, "c": 3.0}
    assert (found.status, found.message) == ("scored", None)


@pytest.mark.parametrize(
    ("given", "correct"),
    [
        ([(0.5, 1), (0.5, 1)], True),  # 1 of 0.5 + 0.5
        ([(0.5, 1), (0.5, 0.9)], False),
        ([(2, 1), (-1, 0)], True),  # 2 of 2: a penalty that is not incurred
        ([(2, 1), (-1, 0.5)], False),
        ([(-1, 0)], None),
        ([(1, {"reward": 0.1, "correct": True}), (1, 0)], True),  # one of them says it
        ([(1, {"reward": 1, "correct": True}), (1, {"reward": 1, "correct": False})], False),
        ([(1, {"reward": 0, "correct": None}), (1, 1)], True),  # the first one abstains
        ([(1, {"reward": 0, "correct": None})], None),
    ],
)
def test_correctness(given, correct):
    assert combined(*given).correct is correct


def test_an_error_of_one_is_an_error_of_the_grade():
    found = combined((1, 1), (1, math.nan), (1, 1))
    assert found.status == "error"
    assert math.isnan(found.reward)
    assert found.message == "b: reward must be one finite number, got float nan"
    unread = combined((1, 0.5), (1, {"reward": 0, "status": "unparsed"}))
    assert (unread.status, unread.reward) == ("unparsed", 0.5)
    twice = combine(
        [Member("a", 1, None), Member("a_b", 1, None)],
        [score(lambda r, row: {"reward": 1, "b": 2}, "", {}), score(lambda r, row: 1, "", {})],
    )
    assert twice.message == "a_b: the part a_b belongs to two rewards; rename one"


def test_rewards_of_all_kinds_grade_together():
    pools = {
        name: GraderPool(Source(f"{REWARDS}:{name}"), GraderLimits(workers=1, wall_seconds=2))
        for name in ("length", "in_batch", "concurrently")
    }
    members = [Member(name, 1.0, pool) for name, pool in pools.items()]
    members.append(Member("own", -1.0, InProcess(lambda response, row: float(response == "2"))))
    one_pool = pickle.loads(pickle.dumps(WeightedGrader(members[:1])))  # as for an actor
    with closing(one_pool):
        assert [grade.reward for grade in one_pool.grade([("abc", {})])] == [3]
    with closing(WeightedGrader(members)) as grader:
        grades = grader.grade([("1", {}), ("raise", {}), ("2", {})])
        assert [grade.status for grade in grades] == [Status.ERROR] * 3  # one batch
        one, two = grader.grade([("1", {}), ("2", {})])
        assert grader.grade([]) == []
    assert {k: v for k, v in two.parts.items() if k != "concurrently_most"} == {
        "length": 1.0, "in_batch": 1.0, "concurrently": 2.0, "own": 1.0,
    }  # fmt: skip
    assert (one.reward, two.reward) == (1 + 0 + 1 - 0, 1 + 1 + 2 - 1)
