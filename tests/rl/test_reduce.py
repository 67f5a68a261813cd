import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from burnish.rl import reduce
from tests.rl.literals import close

MASK = torch.tensor([[1, 1, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0]])
IDS = torch.tensor([1, 0, 0, 2, 0, 0])  # row 0 at 1, 2, 4; row 1 at 0; row 2 at 3, no action
PACKED = torch.tensor([1, 1, 1, 0, 1, 0])

REDUCTIONS = {
    "sequence_mean": reduce.sequence_mean,
    "token_mean": reduce.token_mean,
    "constant": lambda mask, **kw: reduce.constant(mask, length=8, **kw),
    "prompt_mean": lambda mask, **kw: reduce.prompt_mean(mask, group_ids=PAIRS, **kw),
}
PAIRS = torch.arange(8) // 2  # two responses to each prompt
# The empty row leaves the denominator: two rows, of three actions and of one.
WEIGHTS = {"sequence_mean": (1 / 6, 1 / 2), "token_mean": (1 / 4, 1 / 4), "constant": (1 / 16,) * 2}
WEIGHTS["prompt_mean"] = (1 / 4, 1 / 4)  # the two rows answer one prompt


@pytest.mark.parametrize("name", REDUCTIONS)
def test_weights(name):
    a, b = WEIGHTS[name]
    expected = torch.tensor([[a, a, 0, a], [b, 0, 0, 0], [0] * 4], dtype=torch.float64)
    torch.testing.assert_close(REDUCTIONS[name](MASK), expected, rtol=0, atol=1e-15)
    packed = torch.tensor([b, a, a, 0, a, 0], dtype=torch.float64)
    got = REDUCTIONS[name](PACKED, sequence_ids=IDS)
    torch.testing.assert_close(got, packed, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", REDUCTIONS)
def test_an_empty_batch_weighs_nothing(name):
    assert torch.equal(REDUCTIONS[name](torch.zeros(2, 3)), torch.zeros(2, 3, dtype=torch.float64))


@pytest.mark.parametrize(
    ("name", "weight"),
    [("sequence_mean", 1), ("token_mean", 1), ("constant", 1 / 8), ("prompt_mean", 1)],
)
def test_a_single_action_has_the_whole_say(name, weight):
    got = REDUCTIONS[name](torch.tensor([[1, 0], [0, 0]]))
    assert got.tolist() == [[weight, 0], [0, 0]]


@pytest.mark.parametrize("name", REDUCTIONS)
def test_a_pack_of_nothing_has_no_weights(name):
    nothing = torch.zeros(0, dtype=torch.long)
    assert REDUCTIONS[name](nothing, sequence_ids=nothing).tolist() == []


def test_what_weighs_nothing_may_hold_anything():
    objective = torch.tensor([2.0, torch.nan, torch.inf], requires_grad=True)
    loss = reduce.weighted_sum(objective, torch.tensor([0.5, 0.0, 0.0]))
    loss.backward()
    assert loss.item() == 1.0
    assert objective.grad.tolist() == [0.5, 0.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 8), min_size=1, max_size=8),
    cuts=st.lists(st.integers(0, 8), max_size=4),
    name=st.sampled_from(sorted(REDUCTIONS)),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_any_split_adds_up_to_the_batch(lengths, cuts, name, dtype):
    mask = torch.arange(8)[None] < torch.tensor(lengths)[:, None]
    weights = REDUCTIONS[name](mask).to(dtype)
    objective = torch.randn(mask.shape, dtype=dtype, generator=torch.manual_seed(1))
    whole = objective.clone().requires_grad_()
    loss = reduce.weighted_sum(whole, weights)
    loss.backward()
    split = objective.clone().requires_grad_()
    edges = [0, *sorted(min(c, len(lengths)) for c in cuts), len(lengths)]
    parts = []
    for start, end in itertools.pairwise(edges):
        part = reduce.weighted_sum(split[start:end], weights[start:end])
        part.backward()
        parts.append(part.detach())
    tolerance = 1e-6 if dtype == torch.float32 else 1e-14
    torch.testing.assert_close(sum(parts), loss.detach(), rtol=0, atol=tolerance)
    assert torch.equal(split.grad, whole.grad)  # gradients are the weights: equal to the last bit


def test_prompt_mean_weighs_prompts_alike():
    # Prompt 5 has responses of 3 and 1 tokens, prompt 2 one of 2; prompt 9 has no action.
    mask = torch.tensor([[1, 1, 0, 1], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    groups = torch.tensor([5, 2, 5, 9])
    a, b = 1 / 8, 1 / 4
    expected = [[a, a, 0, a], [b, b, 0, 0], [a, 0, 0, 0], [0, 0, 0, 0]]
    close(reduce.prompt_mean(mask, group_ids=groups), expected)
    ids = torch.tensor([1, 0, 0, 3, 2, 0, 1])
    packed = reduce.prompt_mean(
        torch.tensor([1, 1, 1, 0, 1, 1, 1]), group_ids=groups, sequence_ids=ids
    )
    close(packed, [b, a, a, 0, a, a, b])
