"""Steps of responses, their continuations, and the values that these give."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from burnish.engine.protocol import Request
from burnish.errors import ConfigError, GraderError
from burnish.learner.program import compile
from burnish.randomness import Stream, uniforms
from burnish.recipe.load import load_recipe
from burnish.rollout.packing import pack, take
from burnish.rollout.rollout import ABORTED, check_errors, costs, describe, drop_errors, grade
from burnish.rollout.step_values import Branching, starts_of
from burnish.types import Branch, Completion, Finish, Grade, Prompt, SamplingParams, Scores, Status
from tests.conftest import aborted, make_group


@pytest.mark.parametrize(
    ("steps", "texts", "starts"),
    [
        (2, ["a", "b", "c", "d", "e"], [2, 4]),
        (9, ["a", "b"], []),
        ("lines", ["1+", "1=2", "\n", "2+", "1=3"], [3]),
        ("lines", ["a", "\n\n", "\n", "  ", "b"], [4]),  # empty lines and indents begin nothing
        ("lines", ["a.\n", " b", "\n", ""], [1]),  # nor does an end token
        ("lines", ["one. two", " three"], []),
        # A space before the word belongs to the word's token; 3.5 and "…" inside words are no ends.
        (
            "sentences",
            ["It", " is", " 3", ".", "5", ".", " So", '."', " No", "\n", "x"],
            [6, 8, 10],
        ),
        ("sentences", ["Why", "?", "!", " ", "Yes"], [4]),
    ],
)
def test_steps(steps: int | str, texts: list[str], starts: list[int]) -> None:
    assert starts_of(texts, steps) == starts


def letters(ids: Any) -> list[str]:
    return [chr(i) for i in ids]


def branching(**settings: Any) -> Branching:
    given = {"steps": "lines", "continuations": 3, "group_size": 2, "decode": letters}
    return Branching(**given | settings)


def responses(*texts: str) -> tuple[Completion, ...]:
    return make_group(
        5, [1, 2], [list(map(ord, text)) for text in texts], [0] * len(texts)
    ).completions


def asked(samples: int = 2) -> Request:
    return Request("group-5", np.array([1, 2], np.int32), samples, SamplingParams(), 5)


def test_each_step_but_the_first_is_continued_from_its_own_beginning() -> None:
    seen: list[Request] = []

    def complete(requests: list[Request], report: Any) -> list[tuple[Completion, ...]]:
        seen.extend(requests)
        return [(responses("x")[0],) * request.n for request in requests]

    own = responses("a\nbc\nd", "e")
    ((first, second),) = branching().extend([asked()], [own], complete)
    assert [r.begun.text for r in seen if r.begun] == [own[0].text] * 2
    assert [r.begun.token_ids.tolist() for r in seen if r.begun] == [[97, 10], [97, 10, 98, 99, 10]]
    assert {(r.n, r.stream, r.group) for r in seen} == {(3, Stream.CONTINUATION, 5)}
    assert all((r.params, r.prompt.tolist()) == (SamplingParams(), [1, 2]) for r in seen)
    assert len({r.request_id for r in seen} | {"group-5"}) == 3
    assert first.branches is not None
    assert [branch.start for branch in first.branches] == [2, 5]
    assert second.branches == ()


def test_no_two_continuations_of_a_group_share_draws() -> None:
    """Token t of sample s, continuation k: the number of the sample is one to one."""
    seen: list[int] = []

    def complete(requests: list[Request], report: Any) -> list[tuple[Completion, ...]]:
        seen.extend(request.first + k for request in requests for k in range(request.n))
        return [(responses("x")[0],) * request.n for request in requests]

    own = responses(*["abcdefgh"] * 4)
    branching(steps=1, group_size=4).extend([asked(4)], [own], complete)
    assert len(set(seen)) == len(seen) == 4 * 7 * 3
    draws = [float(uniforms(0, Stream.CONTINUATION, 5, number, 8)) for number in seen]
    draws += [float(uniforms(0, Stream.TRAIN, 5, number, 8)) for number in range(4)]
    assert len(set(draws)) == len(draws)


def test_tokens_of_the_system_and_aborted_samples_begin_no_steps() -> None:
    (one,) = responses("a\nb\nc")
    # The system put "b" and the line's end there: the second step begins with "c".
    held = replace(one, sampled=np.array([True, True, False, False, True]))
    assert branching().starts(held) == [4]
    assert branching().starts(aborted(one, tokens=3)) == []
    # An end token is no step of its own.
    assert branching().starts(replace(one, stop=ord("c"))) == [2]


class ByText:
    """A reward by the response's text; a text without one has a grader that fails."""

    def __init__(self, rewards: dict[str, float]) -> None:
        self.rewards = rewards

    def grade_all(self, pairs: list[tuple[Prompt, Completion]]) -> list[Grade]:
        return [
            Grade(self.rewards[c.text])
            if c.text in self.rewards
            else Grade(math.nan, status=Status.ERROR, message=f"{c.text} fails")
            for _, c in pairs
        ]


def continued(texts: list[str], length: int = 4) -> tuple[Completion, ...]:
    return tuple(replace(responses("x" * length)[0], text=text) for text in texts)


def sampled(*branches: tuple[Branch, ...]) -> list[tuple[Completion, ...]]:
    own = responses(*["abcd"] * len(branches))
    return [
        tuple(
            replace(c, text=f"r{i}", branches=branch)
            for i, (c, branch) in enumerate(zip(own, branches, strict=True))
        )
    ]


TASK = ByText({"good": 1.0, "bad": 0.0, "r0": 1.0, "r1": 0.0, "r2": 0.5})
HEAD = Prompt("p", "text", np.array([1, 2], np.int32), "t")


def test_values_are_means_and_errors_leave_them() -> None:
    # Response 0: V(2) = (1 + 0 + 0 + 1) / 4, V(3) = 1 without the two that failed or were aborted.
    # The first values are those of the others: (0 + 0.5) / 2, (1 + 0.5) / 2, (1 + 0) / 2.
    two = Branch(2, continued(["good", "bad", "bad", "good"]))
    three = Branch(3, (*continued(["good", "fails"]), aborted(continued(["good"])[0], tokens=3)))
    (group,) = grade(TASK, [(7, HEAD)], sampled((two, three), (), ()))  # type: ignore[arg-type]
    nan = math.nan
    expected = [[0.25, nan, 0.5, 1.0], [0.75, nan, nan, nan], [0.5, nan, nan, nan]]
    for completion, values in zip(group.completions, expected, strict=True):
        np.testing.assert_array_equal(completion.values, np.float32(values))
        assert completion.branches is None
    assert group.rewards.tolist() == [1.0, 0.0, 0.5]
    metrics = describe([group])
    assert metrics["rollout/steps_per_response"] == 5 / 3
    # 2 tokens after token 2, four times; 1 after token 3, twice; the aborted one had none.
    assert metrics["rollout/continuation_tokens"] == 8 + 2
    batch = pack([group])
    assert batch.values is not None
    np.testing.assert_array_equal(
        batch.values, np.float32([nan, nan, *expected[0], *expected[1], *expected[2]])
    )
    part = take(batch, batch.sample_ids.new_tensor([2])).batch
    np.testing.assert_array_equal(part.values, np.float32([nan, nan, *expected[2]]))


def test_a_step_without_any_grade_makes_its_sample_an_error() -> None:
    lost, fine = Branch(2, continued(["fails", "fails"])), Branch(2, continued(["good", "bad"]))
    (group,) = grade(TASK, [(7, HEAD)], sampled((lost,), (fine,), (fine,)))  # type: ignore[arg-type]
    assert [g.status for g in group.grades] == [Status.ERROR, Status.SCORED, Status.SCORED]
    assert group.grades[0].message == "no continuation from token 2 has a grade: fails fails"
    # It leaves the first values of the others, too.
    assert [float(c.values[0]) for c in group.completions if c.values is not None][1:] == [0.5, 0.0]
    (left,), dropped = drop_errors([group])
    assert len(left.grades) == 2
    assert dropped["rollout/dropped_samples"] == 1


def test_continuations_without_a_grade_are_counted_and_limited() -> None:
    """As responses are: 2 of 8 fail, one of them aborted by the engine."""
    some = Branch(2, continued(["good", "bad", "good", "fails"]))
    more = Branch(3, (*continued(["good", "bad", "good"]), aborted(continued(["good"])[0])))
    (group,) = grade(TASK, [(7, HEAD)], sampled((some,), (more,), ()))  # type: ignore[arg-type]
    assert [c.continuations for c in group.completions] == [4, 4, 0]
    assert group.completions[0].continuation_errors == ("fails fails",)
    assert group.completions[1].continuation_errors == (ABORTED.message,)
    assert not any(own.is_error for own in group.grades)
    assert describe([group])["rollout/continuation_errors"] == 2
    check_errors([group], limit=0.25)
    with pytest.raises(GraderError) as raised:
        check_errors([group], limit=0.24)
    assert str(raised.value).startswith(
        "2 of 8 continuations of responses got no grade, more than a share of 0.24; mend what the "
        "messages name, or raise rollout.max_errors. response 0 to p ('r0', row None): fails fails;"
    )
    fine = Branch(2, continued(["good", "bad"]))
    (group,) = grade(TASK, [(7, HEAD)], sampled((fine,), ()))  # type: ignore[arg-type]
    assert describe([group])["rollout/continuation_errors"] == 0
    check_errors([group], limit=0)


def test_what_judges_of_continuations_cost_is_counted() -> None:
    class Judged(ByText):
        def grade_all(self, pairs: list[tuple[Prompt, Completion]]) -> list[Grade]:
            return [replace(grade, cost={"calls": 2.0}) for grade in super().grade_all(pairs)]

    # The grade of response 0 becomes an error, since its second step has no value: 3 responses and
    # 6 continuations were judged all the same; nobody judged the one that was aborted.
    fine, lost = Branch(2, continued(["good", "bad"])), Branch(3, continued(["fails", "fails"]))
    third = Branch(2, (*continued(["good", "bad"]), aborted(continued(["good"])[0], tokens=3)))
    given = sampled((fine, lost), (third,), ())
    (group,) = grade(Judged(TASK.rewards), [(7, HEAD)], given)  # type: ignore[arg-type]
    assert group.grades[0].is_error
    assert costs([group]) == {"judge/calls": 2 * 9}


def test_a_recipe_without_steps_has_no_values() -> None:
    own = tuple(replace(c, text=f"r{i}") for i, c in enumerate(responses("ab", "c")))
    (group,) = grade(TASK, [(7, HEAD)], [own])  # type: ignore[arg-type]
    assert pack([group]).values is None
    assert "rollout/steps_per_response" not in describe([group])


VINE = "objective.advantage=vine"


@pytest.mark.parametrize(
    ("recipe", "change", "told"),
    [
        ("keywords", ["objective.advantage.continuations=0"], "continuations must be greater"),
        ("keywords", ["objective.advantage.steps=0"], "a number of tokens of at least 1, got 0"),
        ("keywords", ["objective.advantage.steps=words"], "'lines', 'sentences', .* got 'words'"),
        ("keywords", ["rollout.group_size=1"], "group_size must be at least 2"),
        ("keywords", ["length.name=overlong", "length.buffer=8"], "got 'overlong'"),
        ("keywords", ["rollout.overlong=drop"], "overlong = 'mask'"),
        ("keywords", ["selection.dead_groups=active"], "dead_groups = 'dynamic'"),
        ("sort", [], "the sorting model outputs all numbers at once"),
        ("keywords", ["loop=free", "runtime=ray"], "needs loop.name = 'lagged'"),
    ],
)
def test_refusals(recipe: str, change: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        load_recipe(recipe, [VINE, *change])


def test_the_cost_of_continuations() -> None:
    # 10 tokens, steps of 4: from tokens 4 and 8, 6 and 2 tokens are left, three times each.
    piece = load_recipe(
        "keywords", [VINE, "objective.advantage.steps=4", "objective.advantage.continuations=3"]
    ).objective.advantage
    assert piece.continued(10) == 24
    assert piece.continued(4) == 0
    assert load_recipe("keywords").objective.advantage.continued(10) == 0


def test_an_aborted_response_has_values_that_nobody_reads() -> None:
    (own,) = sampled((), ())
    given = (replace(own[0], finish=Finish.ABORT), own[1])
    (group,) = grade(TASK, [(7, HEAD)], [given])  # type: ignore[arg-type]
    assert drop_errors([group])[0] == []


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_values_are_scaled_as_the_rewards_are(scale: float) -> None:
    """All continuations and responses are right, so that no step gains or loses anything."""
    right = Branch(2, continued(["good"] * 3))
    prompt = replace(HEAD, scale=scale)
    own = tuple(replace(c, text="r0") for c in sampled((right,), (right,))[0])
    (group,) = grade(TASK, [(7, prompt)], [own])  # type: ignore[arg-type]
    batch = pack([group])
    program = compile(load_recipe("keywords", ["objective.advantage=vine"]).objective)
    assert not program.advantages(batch, Scores()).any()
    assert batch.values is not None
    assert set(batch.values[batch.values.isfinite()].tolist()) == {scale}
