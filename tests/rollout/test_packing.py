import dataclasses

import torch

from burnish.rollout.packing import pack, slice_groups
from burnish.types import PackedBatch


def test_a_group_packs_as_prompt_then_responses(two_groups):
    batch = pack(two_groups)
    expected = {
        "tokens": [5, 6, 7, 8, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9],
        "positions": [0, 1, 2, 3, 2, 0, 1, 2, 3, 4, 5, 3, 3, 4],
        "predecessor": [0, 0, 1, 2, 1, 5, 5, 6, 7, 8, 9, 7, 7, 12],
        "sequence_ids": [0, 0, 0, 0, 1, 2, 2, 2, 2, 2, 2, 3, 4, 4],
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
    from tests.conftest import make_group

    group = make_group(0, [1], [[2, 3, 4]], [1.0], sampled=[[True, False, True]])
    batch = pack([group])
    assert batch.is_action.tolist() == [False, True, False, True]
    assert batch.in_prompt.tolist() == [True, False, False, False]


def test_a_slice_is_what_packing_those_groups_gives(two_groups):
    whole = pack([*two_groups, two_groups[0]])
    for first, end in ((0, 1), (1, 3), (2, 3), (0, 3)):
        part, slots = slice_groups(whole, first, end)
        expected = pack([*two_groups, two_groups[0]][first:end])
        for field in dataclasses.fields(PackedBatch):
            assert torch.equal(getattr(part, field.name), getattr(expected, field.name)), field
        assert torch.equal(whole.tokens[slots], part.tokens)
