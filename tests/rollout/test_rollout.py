import dataclasses

import numpy as np
import pytest

from burnish.engine.protocol import Request
from burnish.errors import DataError, EngineError
from burnish.randomness import Stream
from burnish.rollout.rollout import complete, describe, drop_errors, grade, requests_of
from burnish.types import Episode, Grade, SamplingParams, Status
from tests.conftest import aborted, make_group


def test_grading_keeps_the_order_and_numbers_the_groups(two_groups):
    class Lengths:
        def grade_all(self, pairs):
            return [Grade(10 * len(p.token_ids) + len(c.token_ids)) for p, c in pairs]

    asked = [(7, two_groups[0].prompt), (9, two_groups[1].prompt)]
    groups = grade(Lengths(), asked, [group.completions for group in two_groups])
    assert [group.index for group in groups] == [7, 9]
    assert [group.rewards.tolist() for group in groups] == [[22, 21], [33, 31, 32]]
    assert [group.oldest_version for group in groups] == [0, 1]


def test_a_held_out_prompt_is_no_group(two_groups):
    """Both may be in one engine at a time, under the same number."""
    asked = [(group.index, group.prompt) for group in two_groups]
    train, held_out = (
        {r.request_id for r in requests_of(asked, 2, SamplingParams(), stream)}
        for stream in (Stream.TRAIN, Stream.EVALUATION)
    )
    assert len(train | held_out) == 2 * len(asked)


def test_a_task_that_forgets_a_grade_is_told(two_groups):
    class Forgetful:
        def grade_all(self, pairs):
            return [Grade(0.0) for _ in pairs[1:]]

    asked = [(group.index, group.prompt) for group in two_groups]
    with pytest.raises(DataError, match="gave 4 grades for 5 responses"):
        grade(Forgetful(), asked, [group.completions for group in two_groups])


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_sample_that_the_engine_aborted_is_not_graded_and_leaves_like_an_error(tokens):
    seen = []

    class Lengths:
        def grade_all(self, pairs):
            seen.extend(completion.sample_index for _, completion in pairs)
            return [Grade(float(completion.sample_index)) for _, completion in pairs]

    given = make_group(0, [1, 2], [[3, 4], [5, 6], [7, 8]], [0, 0, 0])
    first, second, third = given.completions
    responses = [(first, aborted(second, tokens=tokens), third)]
    groups = grade(Lengths(), [(0, given.prompt)], responses)
    assert seen == [0, 2]
    assert [g.status for g in groups[0].grades] == [Status.SCORED, Status.ERROR, Status.SCORED]
    assert "the engine aborted the sample" in groups[0].grades[1].message
    metrics = describe(groups)
    assert metrics["rollout/reward"] == 1.0
    assert metrics["rollout/aborted"] == pytest.approx(1 / 3)
    (left,), dropped = drop_errors(groups)
    assert [c.sample_index for c in left.completions] == [0, 2]
    assert left.rewards.tolist() == [0.0, 2.0]
    assert dropped == {"rollout/dropped_samples": 1.0, "rollout/dropped_groups": 0.0}


def test_a_task_may_be_left_with_nothing_to_grade():
    class Together:
        def grade_all(self, pairs):
            return [Grade(1.0) for _ in pairs]

    given = make_group(0, [1, 2], [[3], [4]], [0, 0])
    (group,) = grade(Together(), [(0, given.prompt)], [tuple(map(aborted, given.completions))])
    assert {g.status for g in group.grades} == {Status.ERROR}
    assert drop_errors([group])[0] == []


def test_describe(two_groups):
    first, second = two_groups
    grades = (Grade(1.0, {"format": 1.0}), Grade(1.0, {"format": 0.0}, Status.TIMEOUT))
    metrics = describe([dataclasses.replace(first, grades=grades), second])
    assert metrics["rollout/reward"] == 14 / 5
    assert (metrics["rollout/reward_min"], metrics["rollout/reward_max"]) == (1, 7)
    # 1, 1, 2, 3, 7: squares 64 − 5 · 2.8² = 24.8, over N − 1 = 4.
    assert metrics["rollout/reward_std"] == pytest.approx(6.2**0.5)
    assert metrics["rollout/length"] == 9 / 5
    assert metrics["rollout/part_format"] == 0.5
    assert metrics["rollout/grades_timeout"] == 0.2
    assert metrics["rollout/grades_scored"] == 0.8
    assert metrics["rollout/responses"] == 5


class Scripted:
    """An engine that answers as it is told, a list of events for each step."""

    def __init__(self, *steps, unfinished=1):
        self.steps, self.unfinished, self.sampled = list(steps), unfinished, 0

    def submit(self, request):
        pass

    def step(self):
        return self.steps.pop(0) if self.steps else []


def asked(n=2):
    return [Request("group-7", np.array([1, 2], np.int32), n, SamplingParams())]


def test_completions_come_in_the_requests_order(two_groups):
    one, two = (
        dataclasses.replace(c, request_id="group-7", sample_index=i)
        for i, c in enumerate(two_groups[0].completions)
    )
    told = []
    report = lambda done, total=None, *, tokens=0: told.append((done, total))  # noqa: E731
    assert complete(Scripted([two], [], [one]), asked(), report=report) == [(one, two)]
    assert told == [(1, 2), (1, 2), (2, 2)]


def test_an_engine_that_stays_silent_or_forgets_is_named_with_what_is_missing():
    now = iter(range(0, 10_000, 100))
    with pytest.raises(EngineError, match=r"silent for 600 s; 2 of 2 .*: sample 0 of group-7"):
        complete(Scripted(), asked(), clock=lambda: next(now))
    episode, now = Episode({}, 0, (), wall_seconds=900.0), iter(range(0, 10_000, 100))
    working = [dataclasses.replace(one, episode=episode) for one in asked()]
    with pytest.raises(EngineError, match=r"silent for 1500 s; 2 of 2 "):
        complete(Scripted(), working, clock=lambda: next(now))
    with pytest.raises(EngineError, match=r"forgot samples; 1 of 1 are missing: sample 0 of group"):
        complete(Scripted(unfinished=0), asked(n=1))
