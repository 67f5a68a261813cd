import dataclasses

import numpy as np
import pytest
import torch

from burnish.errors import ConfigError
from burnish.rollout.packing import cut, pack, take, take_streams, train_batches
from burnish.types import LearnBatch, PackedBatch, SamplingParams, Turn
from tests.conftest import make_group


def test_a_group_packs_as_prompt_then_responses(two_groups):
    batch = pack(two_groups)
    expected = {
        "tokens": [5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        "positions": [0, 1, 2, 3, 2, 0, 1, 2, 3, 4, 5, 3, 3, 4],
        "predecessor": [0, 0, 1, 2, 1, 5, 5, 6, 7, 8, 9, 7, 7, 12],
        "sample_ids": [0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 4, 4],
        "in_prompt": [1, 1, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0],
        "is_action": [0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1],
        "versions": [0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1],
        "segment_offsets": [0, 2, 4, 5, 8, 11, 12, 14],
        "segment_is_prompt": [1, 0, 0, 1, 0, 0, 0],
        "group_ids": [0, 0, 1, 1, 1],
        "rewards": [1, 0, 2, 3, 7],
    }
    for name, values in expected.items():
        assert getattr(batch, name).tolist() == values, name
    torch.testing.assert_close(
        batch.behavior_logprobs,
        -torch.tensor([0, 0, 0.1, 0.2, 0.1, 0, 0, 0, 0.1, 0.2, 0.3, 0.1, 0.1, 0.2]),
    )
    assert batch.temperature.tolist() == [1, 1, 0.5, 0.5, 0.5] + [1.0] * 9


def test_what_the_system_put_there_is_no_action(two_groups):
    group = make_group(0, [1], [[2, 3, 4]], [1.0], sampled=[[True, False, True]])
    batch = pack([group])
    assert batch.is_action.tolist() == [False, True, False, True]
    assert batch.in_prompt.tolist() == [True, False, False, False]


def valued(groups):
    """The groups with values before some tokens."""

    def one(completion):
        values = np.where(completion.token_ids % 2, np.nan, 0.5).astype(np.float32)
        return dataclasses.replace(completion, values=values)

    return [dataclasses.replace(g, completions=tuple(map(one, g.completions))) for g in groups]


def with_turns(completion, turns, **changes):
    """The completion with turns, given as end and reward."""
    starts = [0, *(end for end, _ in turns)]
    found = tuple(
        Turn(start, end, "", (), reward, {}, None)
        for start, (end, reward) in zip(starts, turns, strict=False)
    )
    return dataclasses.replace(completion, turns=found, **changes)


def test_rewards_of_turns_are_on_their_last_sampled_tokens():
    """Scaled by 2; the rest of a grade, such as a length penalty or a grader's reward, belongs to
    the last turn, so that the turns of each sample add up to its reward."""
    sampled = [[1, 1, 0, 1, 0], [1, 0], [1, 1, 0], [1, 1]]
    sampled = [[bool(x) for x in own] for own in sampled]
    responses = [[1, 2, 3, 4, 5], [1, 2], [1, 2, 3], [8, 9]]
    group = make_group(0, [7], responses, [1.5, 1.0, 0.5, -3.0], sampled=sampled)
    a, b, c, d = group.completions
    completions = (
        with_turns(a, [(3, 0.5), (5, 1.0)]),  # all of its reward is from its turns
        with_turns(b, [(2, None)], in_loss=False),  # a grader's reward
        with_turns(c, [(1, 0.75), (3, None)]),  # a penalty of 0.25
        d,  # a response without turns
    )
    prompt = dataclasses.replace(group.prompt, scale=2.0)
    group = dataclasses.replace(group, prompt=prompt, completions=completions)
    batch = pack([group])
    nan = np.nan
    want = [nan, nan, 1, nan, 2, nan, 2, nan, 1.5, -0.5, nan, nan, -6]
    assert_equal(batch.turn_rewards, torch.tensor(want))
    assert not batch.is_action[batch.sample_ids == 1].any()
    heats = SamplingParams(temperature=3.0, turn_temperatures=(0.5, 2.0))
    heated = tuple(dataclasses.replace(c, params=heats) for c in completions)
    heat = pack([dataclasses.replace(group, completions=heated)]).temperature
    want = [1, 0.5, 0.5, 0.5, 2, 2, 0.5, 0.5, 0.5, 2, 2, 3, 3]  # one response has no turns
    assert_equal(heat, torch.tensor(want))
    assert [heats.temperature_of(n) for n in range(4)] == [0.5, 2.0, 2.0, 2.0]
    sums = torch.zeros(4).index_add(0, batch.sample_ids, batch.turn_rewards.nan_to_num())
    assert_equal(sums, batch.rewards)
    assert pack([dataclasses.replace(group, completions=(d,) * 4)]).turn_rewards is None


@pytest.mark.parametrize("weight", [0.0, 0.5, -2.0])
def test_rewards_of_turns_have_the_weight_of_the_tasks_reward(weight):
    """A reward model gives 3, and the task's reward, 0.5 + 1 from two turns, has a weight. All is
    scaled by 2, and the turns add up to the episode's reward."""
    group = make_group(0, [7], [[1, 2], [8, 9]], [3 + 1.5 * weight, 1.0])
    a, b = group.completions
    grades = (dataclasses.replace(group.grades[0], turn_weight=weight), group.grades[1])
    prompt = dataclasses.replace(group.prompt, scale=2.0)
    completions = (with_turns(a, [(1, 0.5), (2, 1.0)]), with_turns(b, [(1, 0.25), (2, 0.75)]))
    batch = pack(
        [dataclasses.replace(group, prompt=prompt, completions=completions, grades=grades)]
    )
    want = [np.nan, 2 * 0.5 * weight, 2 * (3 + weight), 0.5, 1.5]
    assert_equal(batch.turn_rewards, torch.tensor(want))
    sums = torch.zeros(2).index_add(0, batch.sample_ids, batch.turn_rewards.nan_to_num())
    assert_equal(sums, batch.rewards)


def assert_equal(got, expected):
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True)


def test_a_part_is_what_packing_those_groups_gives(two_groups):
    two_groups = valued(two_groups)
    whole = pack([*two_groups, two_groups[0]])
    for first, end in ((0, 1), (1, 3), (2, 3), (0, 3)):
        chosen = (whole.group_ids >= first) & (whole.group_ids < end)
        part, slots = take(whole, chosen.nonzero().squeeze(1))
        expected = pack([*two_groups, two_groups[0]][first:end])
        for field in dataclasses.fields(PackedBatch):
            assert_equal(getattr(part, field.name), getattr(expected, field.name))
        assert torch.equal(whole.tokens[slots], part.tokens)


def pieces(packs, whole):
    """What each pack holds: the sequences of the whole, by group."""
    return [
        [
            int(whole.sample_ids[pack.slots[pack.batch.sample_ids == s]][-1])
            for s in range(len(pack.batch.rewards))
        ]
        for pack in packs
    ]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [
        ((None,), [[0, 1, 2, 3, 4]]),
        ((None, 4), [[0, 1], [2, 3, 4]]),  # whole groups
        ((None, 2), [[0, 1], [2, 3], [4]]),  # the second group does not fit
        ((14,), [[0, 1, 2, 3, 4]]),
        ((13,), [[0, 1], [2, 3, 4]]),  # 5 tokens and 9
        ((8,), [[0, 1], [2, 3], [4]]),  # prompt 3 + responses 3, 1 | prompt 3 + 2
        ((6,), [[0, 1], [2], [3, 4]]),
    ],
)
def test_cut_keeps_groups_whole_where_they_fit(limit, expected, two_groups):
    whole = pack(two_groups)
    packs = cut(whole, *limit)
    assert pieces(packs, whole) == expected
    for part in packs:
        assert len(part.batch.tokens) <= (limit[0] or 14)


def test_a_pack_is_what_packing_its_sequences_gives(two_groups):
    two_groups = valued(two_groups)
    whole = pack(two_groups)
    for part, sequences in zip(cut(whole, 8), ([0, 1], [2, 3], [4]), strict=True):
        groups = []
        for group, first in zip(two_groups, (0, 2), strict=True):
            kept = [s - first for s in sequences if 0 <= s - first < len(group.completions)]
            if kept:
                completions = tuple(group.completions[i] for i in kept)
                grades = tuple(group.grades[i] for i in kept)
                groups.append(dataclasses.replace(group, completions=completions, grades=grades))
        expected = pack(groups)
        for field in dataclasses.fields(PackedBatch):
            assert_equal(getattr(part.batch, field.name), getattr(expected, field.name))
        assert torch.equal(whole.tokens[part.slots], part.batch.tokens)


def test_a_sequence_longer_than_the_limit_is_refused(two_groups):
    with pytest.raises(ConfigError, match=r"micro_tokens = 5 is below .* its prompt, 6; use"):
        cut(pack(two_groups), 5)


def test_train_batches_are_whole_groups(two_groups):
    whole = pack([two_groups[0]] * 4)  # 2 responses each
    assert pieces(train_batches(whole, 4), whole) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert pieces(train_batches(whole, 8), whole) == [[*range(8)]]
    assert pieces(train_batches(pack(two_groups), 2), pack(two_groups)) == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(
    ("sizes", "responses", "count", "expected"),
    [
        ((14, 16, 16, 16), 32, 2, [30, 32]),
        ((14, 16, 16, 16), 32, None, [30, 32]),
        ((15, *[16] * 7), 16, 8, [15, *[16] * 7]),
        ((16, 16, 16), 32, 2, [32, 16]),  # of four groups one was dropped
        ((3, 2, 2, 4), 8, 4, [3, 2, 2, 4]),  # most samples were dropped: as many batches still
        ((2, 2, 2), 4, 4, [2, 2, 2]),  # a batch has a whole group
        ((16, *[15] * 13), 32, 8, [31, 30, 30, 15, 30, 30, 30, 15]),
        ((5,), 8, 4, [5]),
    ],
)
def test_dropped_samples_leave_as_many_train_batches(sizes, responses, count, expected):
    groups = [make_group(i, [1, 2], [[3]] * size, [0.0] * size) for i, size in enumerate(sizes)]
    whole = pack(groups)
    parts = train_batches(whole, responses, count=count)
    assert [len(part.batch.rewards) for part in parts] == expected
    assert torch.cat([part.slots for part in parts]).tolist() == list(range(len(whole.tokens)))


def test_streams_go_with_their_tokens(two_groups):
    whole = pack(two_groups)
    numbers = torch.arange(14.0)
    learn = LearnBatch(whole, numbers, numbers + 1, numbers + 2, importance=numbers + 3)
    part = cut(whole, 8)[2]  # prompt 1 2 3, response 8 9
    got = take_streams(learn, part)
    assert got.batch is part.batch
    assert got.advantages.tolist() == [5, 6, 7, 12, 13]
    assert got.loss_weight.tolist() == [6, 7, 8, 13, 14]
    assert got.proximal_logprobs.tolist() == [7, 8, 9, 14, 15]
    assert got.importance.tolist() == [8, 9, 10, 15, 16]
    assert got.reference_logprobs is None
