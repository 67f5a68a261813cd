"""A frozen teacher scores the policy's samples: its pass, its metrics, and the gradient."""

import pytest
import torch

from burnish.learner.learner import LocalLearner
from burnish.learner.program import compile
from burnish.model.transformer import Transformer
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.recipe.recipe import TrainConfig
from burnish.rollout.packing import Pack
from burnish.types import Scores
from tests.learner.conftest import CONFIG, make_policy

OBJECTIVE = {"advantage": "teacher", "loss": "reinforce", "reduction": "token_mean"}


def make_teacher():
    return Transformer(CONFIG).init_weights(8).to(torch.float64).requires_grad_(False)


def make_learner(policy, **changes):
    program = compile(ObjectiveConfig(**OBJECTIVE | changes))
    train = TrainConfig(batch=100, clip_norm=1e9, learning_rate=1e-2)
    return LocalLearner(policy, program, train, teacher=make_teacher())


@pytest.mark.parametrize("layers", [None, 1])
def test_the_teacher_scores_at_the_sampling_temperature(layers, batch):
    """0.8 in this batch; a policy whose lower layers are frozen shares nothing with its teacher."""
    learner = make_learner(make_policy(layers=layers))
    scores = learner.score(batch)
    expected = make_teacher().score(batch).logprobs
    torch.testing.assert_close(scores.teacher, expected, rtol=1e-12, atol=1e-12)
    own = make_policy().score(batch).logprobs.detach()
    torch.testing.assert_close(scores.proximal, own, rtol=1e-12, atol=1e-12)
    action, (metrics, _) = batch.is_action, learner.finish()
    gap = (own - expected)[action]
    assert metrics["kl/teacher_k1"] == pytest.approx(gap.mean().item())
    assert metrics["kl/teacher_k3"] == pytest.approx((torch.exp(-gap) + gap - 1).mean().item())
    per_response = gap.sum().item() / len(batch.rewards)
    assert metrics["kl/teacher_k1_response"] == pytest.approx(per_response)


@pytest.mark.parametrize("proximal", ["recompute", "behavior"])
def test_the_gradient_is_that_of_the_weighted_logprobs(proximal, batch):
    """loss = −mean over actions of sg[log π_T − log π_prox] log π."""
    policy, learner = make_policy(), make_learner(make_policy(), proximal=proximal)
    scores = learner.score(batch)
    assert (scores.proximal is None) == (proximal == "behavior")
    advantages = learner.program.advantages(batch, scores)
    (learn,) = learner.program.batches(batch, advantages, scores, [Pack.whole(batch)])
    learner._accumulate(learn)
    logprobs = policy.score(batch).logprobs
    own = logprobs.detach() if proximal == "recompute" else batch.behavior_logprobs
    weights = make_teacher().score(batch).logprobs - own
    (-(weights * logprobs)[batch.is_action].mean()).backward()
    for ours, theirs in zip(learner.policy.parameters(), policy.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-6, atol=1e-9)


def test_only_a_program_with_a_teacher_asks_for_its_pass():
    assert compile(ObjectiveConfig(**OBJECTIVE)).passes(1) == ["proximal", "teacher"]
    sampled = ObjectiveConfig(**OBJECTIVE, proximal="behavior", kl="k3")
    assert compile(sampled).passes(4) == ["reference", "teacher"]
    assert compile(ObjectiveConfig()).passes(2) == ["proximal"]
    with pytest.raises(ValueError, match=r"'teacher' does not support"):
        ObjectiveConfig(**OBJECTIVE, kl={"name": "k1", "where": "reward"})


def test_a_teacher_that_is_the_policy_teaches_nothing(batch):
    learner = make_learner(make_policy())
    scores = learner.score(batch)
    same = Scores(proximal=scores.proximal, teacher=scores.proximal)
    assert not learner.program.advantages(batch, same).any()
