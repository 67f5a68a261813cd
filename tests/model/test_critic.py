"""The value of each action's context, whatever the packing; and which weights a critic has."""

import pytest
import torch

from burnish.model import lora
from burnish.model.attention import causal
from burnish.model.critic import Critic
from burnish.recipe.recipe import TrainConfig
from burnish.rollout.packing import pack
from tests.learner.conftest import make_groups, make_policy


def make_critic(policy, *, shared):
    critic = Critic(policy, shared=shared)
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        critic.weight.normal_(generator=random)
        critic.bias.fill_(0.7)
    return critic


@pytest.mark.parametrize("layers", [None, 1])
@pytest.mark.parametrize("shared", [True, False])
def test_values_stand_before_their_tokens(shared, layers):
    """values[t] = w · h + b with h after the tokens before t, in a sequence of its own."""
    policy = make_policy(layers=layers)
    critic, groups = make_critic(policy, shared=shared), make_groups()
    batch = pack(groups)
    got = critic.score(policy, batch).split(batch.segment_offsets.diff().tolist())
    responses = (part for part, skip in zip(got, batch.segment_is_prompt, strict=True) if not skip)
    for group in groups:
        for completion in group.completions:
            whole = torch.tensor([*group.prompt.token_ids, *completion.token_ids])
            places = torch.arange(len(whole))
            hidden = policy(whole, places, causal([len(whole)], places.device))
            before = hidden[len(group.prompt.token_ids) - 1 : -1] @ critic.weight + 0.7
            want = torch.where(torch.tensor(completion.sampled), before, 0.0)
            torch.testing.assert_close(next(responses), want, rtol=0, atol=1e-12)


def test_a_fresh_critic_values_everything_at_0_and_shares_weights_that_never_change():
    policy = make_policy(torch.float32, layers=1)
    critic = Critic(policy, shared=False)
    assert critic.score(policy, pack(make_groups())).abs().max() == 0
    ours, theirs = dict(critic.body.named_parameters()), dict(policy.named_parameters())
    assert ours.keys() == theirs.keys()
    for name, weight in ours.items():
        assert (weight is theirs[name]) == (not theirs[name].requires_grad), name
        assert torch.equal(weight, theirs[name])
    head = Critic(policy, shared=True)
    assert [tuple(p.shape) for p in head.parameters()] == [(16,), (1,)]


def test_a_value_in_low_precision_is_summed_in_float32():
    policy = make_policy(torch.float32).to(torch.bfloat16)
    assert Critic(policy, shared=True).score(policy, pack(make_groups())).dtype == torch.float32


def test_a_critic_of_a_policy_with_an_adapter_has_an_adapter_of_its_own():
    policy = make_policy(torch.float32)
    lora.learn(policy, TrainConfig(learn={"name": "lora", "rank": 2}), seed=7)
    critic = Critic(policy, shared=False)
    learns = {name for name, p in policy.named_parameters() if p.requires_grad}
    ours = {name: p for name, p in critic.named_parameters() if p.requires_grad}
    assert ours.keys() == {f"body.{name}" for name in learns} | {"weight", "bias"}
    theirs = dict(policy.named_parameters())
    assert not any(ours[f"body.{name}"] is theirs[name] for name in learns)
    assert critic.body.embed.weight is policy.embed.weight
