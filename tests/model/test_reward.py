"""A reward model reads each response at its last token."""

import pytest
import torch

from burnish.model.reward import last_slots
from burnish.rollout.packing import pack
from tests.engine import tiny as small
from tests.learner.preference_pairs import groups, make_model, one_by_one
from tests.learner.test_sequences import cut_up


@pytest.mark.parametrize("pad", [None, small.END])
def test_rewards_are_read_at_the_last_token(pad):
    model, rows = make_model(pad=pad), groups()
    batch = pack(rows)
    got = model.score(batch).rewards
    torch.testing.assert_close(
        got[last_slots(batch)], one_by_one(model, rows), rtol=1e-9, atol=1e-9
    )
    assert got.count_nonzero() == len(last_slots(batch))


@pytest.mark.parametrize("pad", [None, small.END])
def test_an_episode_of_several_sequences_is_read_at_its_end(pad):
    """After the same tokens, the last sequence has the reward of the single sequence."""
    model, rows = make_model(pad=pad), groups()
    cuts = [[(1,) if len(c.token_ids) > 1 else (0,) for c in group.completions] for group in rows]
    batch = pack(cut_up(rows, cuts))
    assert batch.segment_is_prompt.sum() > len(rows)
    got = model.score(batch).rewards
    torch.testing.assert_close(
        got[last_slots(batch)], one_by_one(model, rows), rtol=1e-9, atol=1e-9
    )
