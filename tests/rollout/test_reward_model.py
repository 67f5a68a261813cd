"""A reward model grades the responses that the task could grade, and no others."""

import math

import numpy as np
import pytest

from burnish.rollout.packing import Pack
from burnish.rollout.reward_model import LearnedReward
from burnish.types import Completion, Finish, Grade, Prompt, SamplingParams, Status
from tests.learner.preference_pairs import groups, make_model, one_by_one

EMPTY = Completion(
    "group-0", 0, *(np.zeros(0, kind) for kind in (np.int32, np.float32, np.int32, np.bool_)),
    SamplingParams(), Finish.STOP, None, "",
)  # fmt: skip
"""An episode whose environment failed before the first turn."""
FAILED = Grade(math.nan, {"n": 1.0}, Status.ERROR, "it failed", {"calls": 2.0})


class Listed:
    """A task with given grades."""

    validation = ()

    def __init__(self, grades):
        self.grades = grades

    def grade_all(self, pairs):
        assert len(pairs) == len(self.grades)
        return self.grades


def learned(grades, model, weight):
    return LearnedReward(Listed(grades), model, weight=weight, cut=lambda b: [Pack.whole(b)])


def test_errors_stay_errors_and_the_model_does_not_read_them(monkeypatch):
    model, rows = make_model(), groups()
    good = [(g.prompt, c) for g in rows for c in g.completions]
    scores = one_by_one(model, rows).tolist()
    nothing = Prompt("p", "", np.zeros(0, np.int32), "t")
    pairs, grades = [(nothing, EMPTY)], [FAILED]
    for pair in good:
        pairs += [pair, (pair[0], EMPTY)]
        grades += [Grade(2.0, {"n": 3.0}), FAILED]
    task = learned(grades, model, 0.5)
    seen = []
    monkeypatch.setattr(task, "rewards", lambda own, get=task.rewards: seen.append(own) or get(own))
    found = task.grade_all(pairs)
    assert seen == [good]
    assert found[0] is FAILED
    assert all(grade is FAILED for grade in found[2::2])
    for grade, score in zip(found[1::2], scores, strict=True):
        assert grade.reward == pytest.approx(1.0 + score)
        assert grade.parts == {"n": 3.0, "task": 2.0, "learned": pytest.approx(score)}
        assert grade.turn_weight == 0.5


def test_a_rollout_of_errors_is_not_scored():
    pairs = [(Prompt("p", "", np.zeros(0, np.int32), "t"), EMPTY)]
    assert learned([FAILED], None, 1.0).grade_all(pairs) == [FAILED]
    assert learned([], None, 1.0).grade_all([]) == []


def test_a_reward_that_is_not_finite_is_an_error(monkeypatch):
    task = learned([Grade(1.0, cost={"calls": 1.0})], None, 1.0)
    monkeypatch.setattr(task, "rewards", lambda pairs: [math.inf])
    (grade,) = task.grade_all([(groups()[0].prompt, EMPTY)])
    assert (grade.status, math.isnan(grade.reward)) == (Status.ERROR, True)
    assert grade.message == "the reward model gave inf; set train.precision to fp32"
    assert grade.cost == {"calls": 1.0}
