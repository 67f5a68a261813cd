import dataclasses
import math

import pytest

from burnish.errors import GraderError
from burnish.rollout.rollout import check_errors, describe, drop_errors
from burnish.types import Grade, Status
from tests.conftest import make_group


def failed(group, *places, message="boom"):
    grades = [
        Grade(math.nan, status=Status.ERROR, message=message) if i in places else grade
        for i, grade in enumerate(group.grades)
    ]
    return dataclasses.replace(group, grades=tuple(grades))


def test_errors_leave_and_small_groups_with_them(two_groups):
    first, second = two_groups
    groups, metrics = drop_errors([failed(first, 0), failed(second, 1)])
    assert [group.index for group in groups] == [1]
    assert groups[0].rewards.tolist() == [2.0, 7.0]
    assert [c.sample_index for c in groups[0].completions] == [0, 2]
    # one error and its companion of the first group, one of the second
    assert metrics == {"rollout/dropped_samples": 3.0, "rollout/dropped_groups": 1.0}


def test_nothing_is_touched_without_errors(two_groups):
    alone = make_group(2, [1], [[1]], [1.0])  # a group of one is its recipe's business
    timeout = dataclasses.replace(alone, grades=(Grade(0.0, status=Status.TIMEOUT),))
    groups = [*two_groups, alone, timeout]
    assert drop_errors(groups) == (
        groups,
        {"rollout/dropped_samples": 0.0, "rollout/dropped_groups": 0.0},
    )
    assert drop_errors([failed(alone, 0)])[0] == []


def test_too_many_errors_halt_with_the_first_messages(two_groups):
    first, second = two_groups
    groups = [failed(first, 0, message="KeyError: 'gold'"), failed(second, 2)]
    check_errors(groups, limit=0.4)
    with pytest.raises(GraderError) as caught:
        check_errors(groups, limit=0.39)
    assert str(caught.value) == (
        "2 of 5 responses got no grade, more than a share of 0.39; mend what the messages name, or "
        "raise rollout.max_errors. response 0 to p0 ('7 8', row [5, 6]): KeyError: 'gold'; "
        "response 2 to p1 ('8 9', row [1, 2, 3]): boom"
    )
    check_errors(two_groups, limit=0)
    many = [failed(make_group(i, [1], [[1]], [0]), 0, message=f"m{i}") for i in range(5)]
    with pytest.raises(GraderError, match=r"5 of 5 .*: m0; .*: m1; .*: m2; …$"):
        check_errors(many, limit=0.9)


def test_what_a_halt_quotes_does_not_steer_a_terminal(two_groups):
    first, _ = two_groups
    hostile = dataclasses.replace(first.completions[0], text="\x1b[2J" + 200 * "x")
    prompt = dataclasses.replace(first.prompt, reference={"prompt": "\x1b[2J"})
    group = dataclasses.replace(first, prompt=prompt, completions=(hostile, *first.completions[1:]))
    with pytest.raises(GraderError) as caught:
        check_errors([failed(group, 0)], limit=0)
    assert str(caught.value).isprintable()
    assert r"response 0 to p0 ('\x1b[2Jxxx" in str(caught.value)
    assert r"row {'prompt': '\x1b[2J'}): boom" in str(caught.value)
    assert len(str(caught.value)) < 400


def test_an_error_is_no_part_of_the_described_rewards(two_groups):
    first, second = two_groups
    metrics = describe([failed(first, 1), failed(second, 2)])
    assert metrics["rollout/reward"] == 2.0
    assert metrics["rollout/reward_max"] == 3.0
    assert metrics["rollout/grades_error"] == 0.4
    assert metrics["rollout/responses"] == 5
    assert "rollout/reward" not in describe([failed(first, 0, 1)])
    assert describe([failed(first, 1)])["rollout/reward_std"] == 0.0  # of one reward
