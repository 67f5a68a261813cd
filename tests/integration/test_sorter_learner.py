import math

import pytest
import torch

from burnish.engine.sorter import SorterEngine
from burnish.errors import BurnishError
from burnish.learner.learner import LocalLearner
from burnish.learner.program import compile
from burnish.model.sorter import Sorter
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.recipe.recipe import TrainConfig
from burnish.recipe.tasks import SortTask
from burnish.rollout.packing import Pack, pack, train_batches
from burnish.rollout.rollout import grade, sample
from burnish.runs.metrics import combine
from burnish.tasks.sorting import Sorting
from burnish.types import SamplingParams


def rate(learning_rate, **more):
    """Two epochs: with one step on a batch nothing would be scored before it."""
    return TrainConfig(learning_rate=learning_rate, clip_norm=math.inf, **{"epochs": 2} | more)


OLD = Sorter(5, 3, 10, seed=9)
"""A policy that samples tokens of version 0."""
TASK = Sorting(SortTask(), seed=0)


def rollout(model, temperature=1.0):
    params = SamplingParams(temperature=temperature, seed=1)
    asked = list(enumerate(TASK.prompts))
    responses = sample(SorterEngine(model), asked, 6, params, 0)
    return pack(grade(TASK, asked, responses))


def make_learner(seed=0, train=None, **objective):
    model = Sorter(5, 3, 10, seed=seed)
    return LocalLearner(model, compile(ObjectiveConfig(**objective)), train or rate(1e-2))


def learn_batch(learner, batch):
    program, scores = learner.program, learner.score(batch)
    advantages = program.advantages(batch, scores)
    (learn,) = program.batches(batch, advantages, scores, [Pack.whole(batch)])
    return learn


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sampler_and_learner_agree(temperature):
    learner = make_learner(train=rate(1e-3))
    batch = rollout(learner.policy, temperature)
    torch.testing.assert_close(learner.score(batch).proximal, batch.behavior_logprobs)
    learn = learn_batch(learner, batch)
    first, second = learner.step(learn), learner.step(learn)
    assert first["mismatch/logprob_max"] < 1e-6
    assert "mismatch/logprob_max" not in second  # the policy has moved on: no longer numerics alone


def test_a_step_is_adam_on_the_weighted_loss():
    pieces = {"loss": "reinforce", "reduction": "token_mean", "entropy_coefficient": 0.1}
    learner, plain = make_learner(**pieces), Sorter(5, 3, 10, seed=0)
    batch = rollout(learner.policy)
    learn = learn_batch(learner, batch)
    metrics = learner.step(learn)
    optimizer = torch.optim.Adam(plain.parameters(), lr=1e-2)
    logprobs, entropy = plain.score(batch)
    action = batch.is_action
    loss = (-learn.advantages * logprobs - 0.1 * entropy)[action].mean()
    loss.backward()
    norm = torch.sqrt(sum((p.grad**2).sum() for p in plain.parameters()))
    optimizer.step()
    assert metrics["train/loss"] == pytest.approx(loss.item(), abs=1e-7)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    for a, b in zip(learner.policy.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_versions_count_steps_and_weights_are_a_copy():
    learner = make_learner()
    learn = learn_batch(learner, rollout(learner.policy))
    before = learner.weights()
    learner.step(learn)
    after = learner.weights()
    assert (before.version, after.version) == (0, 1)
    assert not torch.equal(before.tensors["decode"], after.tensors["decode"])


def test_behavior_may_serve_as_proximal():
    learner = make_learner(proximal="behavior")
    batch = rollout(Sorter(5, 3, 10, seed=9))
    assert learner.score(batch).proximal is None
    assert torch.equal(learn_batch(learner, batch).proximal_logprobs, batch.behavior_logprobs)


def test_the_reference_stays_until_it_is_refreshed():
    learner = make_learner(kl={"name": "k3", "coefficient": 0.1, "refresh": 4})
    batch = rollout(learner.policy)
    start = learner.score(batch).proximal
    metrics = [learner.step(learn_batch(learner, batch)) for _ in range(3)]
    assert metrics[0]["kl/reference_k3"] == 0
    assert metrics[2]["kl/reference_k3"] > 0
    torch.testing.assert_close(learner.score(batch).reference, start)
    learner.begin(3)
    torch.testing.assert_close(learner.score(batch).reference, start)
    learner.begin(4)
    torch.testing.assert_close(learner.score(batch).reference, learner.score(batch).proximal)


def test_without_a_kl_term_there_is_no_reference():
    learner = make_learner()
    assert learner.score(rollout(learner.policy)).reference is None


def test_a_step_that_is_not_finite_is_refused_and_changes_nothing():
    learner = make_learner(train=rate(1e-2, max_skipped=1))
    learn = learn_batch(learner, rollout(learner.policy))
    learn.advantages[-1] = torch.nan
    before = learner.weights()
    with pytest.raises(BurnishError, match=r"not finite.*lower train\.learning_rate"):
        learner.step(learn)
    assert learner.version == 0
    assert torch.equal(before.tensors["encode"], learner.weights().tensors["encode"])


@pytest.mark.parametrize("proximal", ["recompute", "behavior"])
def test_drift_is_split_into_staleness_and_update(proximal):
    """Against the log-probabilities of the models themselves."""
    learner = make_learner(proximal=proximal, train=rate(1e-2, epochs=3))
    batch = rollout(OLD)
    learner.version = 4
    learn, start, taken = learn_batch(learner, batch), learner.output(batch).logprobs, []
    for _ in range(3):
        before_last = learner.output(batch).logprobs
        taken.append(learner.step(learn))
    metrics = combine(taken)
    stale = (start - OLD.score(batch).logprobs)[batch.is_action].abs().mean().item()
    moved = (before_last - start)[batch.is_action].abs().mean().item()
    assert metrics["drift/staleness"] == pytest.approx(stale, rel=1e-4)
    assert metrics["drift/update"] == pytest.approx(moved, rel=1e-4)
    assert min(stale, moved) > 1e-3


def test_a_fresh_rollout_with_one_step_has_no_drift_to_tell():
    learner = make_learner(train=rate(1e-2, epochs=1))
    metrics = learner.step(learn_batch(learner, rollout(learner.policy)))
    assert not any(name.startswith("drift/") for name in metrics)


def test_parts_of_a_rollout_tell_the_staleness_of_the_first():
    """Their start is known by the first gradient step alone."""
    learner = make_learner(proximal="behavior", train=rate(1e-2, epochs=1, batch=6))
    batch = rollout(OLD)
    learner.version = 4
    parts, start = train_batches(batch, 6), learner.output(batch).logprobs
    scores = learner.score(batch, parts)
    batches = learner.program.batches(batch, torch.ones_like(start), scores, parts)
    first, *later = [learner.step(learn) for learn in batches]
    gap, own = (start - batch.behavior_logprobs).abs(), batches[0]
    expected = gap[own.slots][own.batch.is_action].mean().item()
    assert first["drift/staleness"] == pytest.approx(expected, rel=1e-4)
    assert not any(name.startswith("drift/") for metrics in later for name in metrics)
