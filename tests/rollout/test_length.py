"""Shaped rewards, and responses that were cut at the length limit."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from burnish.errors import ConfigError
from burnish.launch.settings import rollout_settings
from burnish.learner.program import compile
from burnish.loops.sync import count_tokens
from burnish.recipe.load import load_recipe
from burnish.rollout.length import check_phrase
from burnish.rollout.packing import pack
from burnish.rollout.rollout import describe, drop_errors
from burnish.rollout.saved_groups import load_held, save_held
from burnish.runs import responses
from burnish.types import Finish, Grade, Scores, Status
from tests.conftest import byte_tokenizer, make_group

MODEL = ["task=keywords", "model=smollm2-135m", "rollout.max_tokens=8", "rollout.group_size=10"]


def recipe(*overrides):
    return load_recipe("sort", [*MODEL, *overrides])


def cut(group, *places):
    completions = tuple(
        dataclasses.replace(c, finish=Finish.LENGTH) if i in places else c
        for i, c in enumerate(group.completions)
    )
    return dataclasses.replace(group, completions=completions)


def test_the_penalty_is_a_part_of_the_grade():
    group = make_group(0, [1], [[1, 2], [1, 2, 3, 4], [1] * 8], [1.0, 0.0, 1.0])
    failed = Grade(math.nan, status=Status.ERROR)
    group = dataclasses.replace(group, grades=(*group.grades[:2], failed))
    # Of the two graded answers one is right: 0.4 × 1/2 × |y| / 8.
    shaped = rollout_settings(recipe("length=solve_rate", "length.coefficient=0.4")).penalize(group)
    assert [g.parts for g in shaped.grades] == [
        {"length": pytest.approx(-0.05)},
        {"length": pytest.approx(-0.1)},
        {},
    ]
    assert shaped.rewards.tolist() == pytest.approx([0.95, -0.1, math.nan], nan_ok=True)
    metrics = describe([shaped])
    assert metrics["rollout/part_length"] == pytest.approx(-0.075)
    assert metrics["rollout/length_correct"] == 2
    assert rollout_settings(recipe()).penalize(group) is group


def test_tokens_that_were_put_in_have_no_length():
    sampled = [[True, False, False, True]]
    group = make_group(0, [1], [[1, 2, 3, 4]], [1.0], sampled=sampled)
    shaped = rollout_settings(
        recipe("length=target", "length.tokens=1", "length.coefficient=0.1")
    ).penalize(group)
    assert shaped.rewards.tolist() == pytest.approx([0.9])  # 2 tokens, not 4
    assert describe([group])["rollout/length"] == 2
    batch = pack([group])
    assert batch.is_action.tolist() == [False, True, False, False, True]
    assert batch.behavior_logprobs.tolist() == pytest.approx([0, -0.1, 0, 0, -0.4])
    (row,) = responses.rows(
        1, [group], decode=lambda ids: list(map(str, ids)), learner_logprobs=[np.zeros(4)]
    )
    assert row["forced"] == [1, 2]
    assert row["learner_logprobs"] == [0, None, None, 0]
    assert count_tokens([group]) == 2


def test_overlong_responses_leave_the_loss_and_by_choice_the_statistics():
    # Rewards 1, 0, 0 of which the last was cut: mean 1/3 if it counts, 1/2 if it does not.
    group = cut(make_group(0, [1], [[2], [3, 4], [5, 6, 7]], [1.0, 0.0, 0.0]), 2)
    program = compile(recipe("objective.advantage=group_mean").objective)

    def advantages(how):
        (kept,), metrics = drop_errors([group], how)
        batch = pack([kept])
        found = program.advantages(batch, Scores())
        return batch, found.tolist(), metrics

    batch, found, metrics = advantages("mask")
    third = pytest.approx(-1 / 3)
    assert found == [0, pytest.approx(2 / 3), third, third, 0, 0, 0]
    assert batch.is_action.tolist() == [False, True, True, True, False, False, False]
    assert metrics["rollout/overlong"] == pytest.approx(1 / 3)
    weights = program.objective.reduction.weights(batch)
    torch.testing.assert_close(weights.sum().item(), 1.0)  # of two responses, not of three

    batch, found, metrics = advantages("drop")
    assert found == [0, 0.5, -0.5, -0.5]
    assert metrics["rollout/dropped_samples"] == 1
    assert "rollout/overlong" not in drop_errors([group], "keep")[1]


def test_a_group_of_cut_responses_leaves_whole():
    groups = [
        cut(make_group(i, [1], [[2], [3]], [1.0, 0.0]), *places)
        for i, places in enumerate([(0, 1), (0,)])
    ]
    assert [g.index for g in drop_errors(groups, "mask")[0]] == [1]
    assert drop_errors(groups, "drop")[0] == []  # one response has no statistics


def test_a_checkpoint_keeps_what_is_out_of_the_loss():
    (group,), _ = drop_errors([cut(make_group(0, [1], [[2], [3]], [1.0, 0.0]), 0)], "mask")
    ((again,),) = load_held(*save_held([[group]]), lambda index: group.prompt)
    assert [c.in_loss for c in again.completions] == [False, True]
    assert count_tokens([again]) == 1


def test_a_budget_reaches_the_sampler():
    params = rollout_settings(recipe("rollout.think.tokens=3")).params
    assert (params.think_tokens, params.think_end) == (3, "</think>")
    assert params.think_phrase == "</think> <answer>"
    ((held,),) = load_held(
        *save_held([[with_params(make_group(0, [1], [[2]], [1.0]), params)]]), lambda index: None
    )
    assert held.completions[0].params == params


def with_params(group, params):
    return dataclasses.replace(
        group, completions=tuple(dataclasses.replace(c, params=params) for c in group.completions)
    )


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["rollout.think.tokens=8"], "leaves no room for an answer within max_tokens = 8"),
        (["rollout.think.tokens=5", "validation.max_tokens=5"], "within max_tokens = 5"),
        (["rollout.think.phrase=Stop"], "rollout.think.tokens is missing"),
        (["rollout.think.tokens=2", "rollout.think.phrase=Stop"], "a phrase that contains end"),
        (["length=target"], "length.tokens is missing: 'target' needs it"),
        (["length=overlong", "length.buffer=9"], "above rollout.max_tokens = 8"),
        (["length.tokens=4"], "length.tokens has no effect with length = 'none'"),
        (["length=solve_rate", "length.coefficient=0"], "greater than 0"),
        (["rollout.overlong=cut"], "'keep', 'mask' or 'drop'"),
    ],
)
def test_settings_without_sense_are_refused(overrides, told):
    with pytest.raises(ConfigError, match=told.replace("(", r"\(")):
        recipe(*overrides)


def test_the_sorting_model_has_one_length():
    for override in ("length=solve_rate", "rollout.overlong=mask", "rollout.think.tokens=2"):
        with pytest.raises(ConfigError, match=r"has no effect with model\.name"):
            load_recipe("sort", override)


def test_a_phrase_must_be_text_of_the_tokenizer_and_find_room():
    short = recipe("rollout.think.tokens=2", "rollout.think.phrase=</think>")
    with pytest.raises(ConfigError, match="2 and the 8 tokens of the phrase leave no room"):
        check_phrase(short.rollout.think, short.rollout.max_tokens, byte_tokenizer())
    think = recipe("rollout.think.tokens=2", *PHRASE).rollout.think
    check_phrase(think, 11, byte_tokenizer())
    with pytest.raises(ConfigError, match="without the end"):
        check_phrase(think, 11, Silent())


PHRASE = ["rollout.think.phrase=</think>"]


class Silent:
    """A tokenizer that knows no text."""

    def encode(self, text, *, add_special=True):
        return np.array([], np.int32)

    def decode(self, ids):
        return ""


def scaled(group, scale):
    return dataclasses.replace(group, prompt=dataclasses.replace(group.prompt, scale=scale))


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_penalties_read_rewards_before_their_scale(scale):
    """Right answers of 2, 4 and 8 tokens; at_most leaves min(1, 0.1 (4 − |y|) + 0.5) of each."""
    group = make_group(0, [1], [[1] * 2, [1] * 4, [1] * 8], [1.0, 1.0, 1.0])
    settings = ["length=at_most", "length.tokens=4", "length.coefficient=0.1"]
    for chosen in (settings, ["length=among_correct"], ["length=solve_rate"]):
        shape = rollout_settings(recipe(*chosen)).penalize
        once, twice = shape(group), shape(scaled(group, scale))
        assert twice.rewards.tolist() == once.rewards.tolist()
        expected = [scale * reward for reward in once.rewards.tolist()]
        assert pack([twice]).rewards.tolist() == pytest.approx(expected)
    assert rollout_settings(recipe(*settings)).penalize(group).rewards.tolist() == pytest.approx(
        [0.7, 0.5, 0.1]
    )


def test_a_dropped_response_does_not_count_in_a_penalty():
    # 2 of 3 are right, 2 of 2 without the truncated one: 0.4 × 1 × |y| / 8.
    group = cut(make_group(0, [1], [[1] * 2, [1] * 4, [1] * 8], [1.0, 1.0, 0.0]), 2)
    settings = ["length=solve_rate", "length.coefficient=0.4"]
    shaped = rollout_settings(recipe(*settings, "rollout.overlong=drop")).penalize(group)
    assert [g.parts["length"] for g in shaped.grades][:2] == pytest.approx([-0.1, -0.2])
    shaped = rollout_settings(recipe(*settings, "rollout.overlong=mask")).penalize(group)
    assert shaped.grades[0].parts["length"] == pytest.approx(-0.1 * 2 / 3)


def test_a_masked_response_counts_in_opos_baseline():
    # Lengths 1, 2, 12 and rewards 0, 1, 1: the baseline is 14 / 15 with the truncated response.
    group = cut(make_group(0, [1], [[2], [3, 4], [5] * 12], [0.0, 1.0, 1.0]), 2)
    program = compile(recipe("objective.advantage=opo").objective)
    (kept,), _ = drop_errors([group], "mask")
    batch = pack([kept])
    found = program.advantages(batch, Scores())[batch.is_action]
    torch.testing.assert_close(found, torch.tensor([-14 / 15, 1 / 15, 1 / 15]))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["objective.advantage=gdpo", "objective.advantage.parts.all=1", "length=target",
          "length.tokens=4"], "use length.name = 'none', or objective.advantage.parts.length = 1"),
        (["objective.advantage=gdpo", "objective.advantage.parts.length=1"],
         "objective.advantage.parts.length reads a length penalty, and length.name = 'none'"),
        (["objective.advantage=maxrl", "length=target", "length.tokens=4"],
         "length.name = 'target' makes rewards negative, and objective.advantage = 'maxrl'"),
        (["objective.advantage=teacher", "teacher.model=smollm2-135m", "length=target",
          "length.tokens=4"], "length.name = 'target' has no effect with objective.advantage = "),
    ],
)  # fmt: skip
def test_a_penalty_that_nobody_reads_is_refused(settings, message):
    with pytest.raises(ConfigError) as caught:
        recipe(*settings)
    assert message in str(caught.value)
