import dataclasses

import pytest

from burnish.errors import DataError
from burnish.rollout.rollout import describe, grade
from burnish.types import Grade, Status


def test_grading_keeps_the_order_and_numbers_the_groups(two_groups):
    class Lengths:
        def grade_all(self, pairs):
            return [Grade(10 * len(p.token_ids) + len(c.token_ids)) for p, c in pairs]

    prompts = [group.prompt for group in two_groups]
    groups = grade(Lengths(), prompts, [group.completions for group in two_groups], 7)
    assert [group.index for group in groups] == [7, 8]
    assert [group.rewards.tolist() for group in groups] == [[22, 21], [33, 31, 32]]
    assert [group.oldest_version for group in groups] == [0, 1]


def test_a_task_that_forgets_a_grade_is_told(two_groups):
    class Forgetful:
        def grade_all(self, pairs):
            return [Grade(0.0) for _ in pairs[1:]]

    prompts = [group.prompt for group in two_groups]
    with pytest.raises(DataError, match="gave 4 grades for 5 responses"):
        grade(Forgetful(), prompts, [group.completions for group in two_groups], 7)


def test_describe(two_groups):
    first, second = two_groups
    grades = (Grade(1.0, {"format": 1.0}), Grade(1.0, {"format": 0.0}, Status.TIMEOUT))
    metrics = describe([dataclasses.replace(first, grades=grades), second])
    assert metrics["rollout/reward"] == 14 / 5
    assert (metrics["rollout/reward_min"], metrics["rollout/reward_max"]) == (1, 7)
    assert metrics["rollout/dead_groups"] == 0.5
    assert metrics["rollout/length"] == 9 / 5
    assert metrics["rollout/part_format"] == 0.5
    assert metrics["rollout/grades_timeout"] == 0.2
    assert metrics["rollout/grades_scored"] == 0.8
    assert metrics["rollout/responses"] == 5
