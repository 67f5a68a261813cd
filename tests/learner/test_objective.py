"""Every name in ``pieces`` has its function, and each piece reaches the loss with its settings."""

import pytest
import torch

from burnish import pieces
from burnish.config import ObjectiveConfig
from burnish.learner import objective
from burnish.rl import advantages, kl, losses, ratios
from burnish.rollout.packing import pack
from burnish.types import LearnBatch, Measured


def random(batch, seed):
    noise = 0.3 * torch.randn(len(batch.tokens), generator=torch.manual_seed(seed))
    return torch.where(batch.is_action, batch.behavior_logprobs + noise, 0.0)


def learn_batch(config, batch, reference=None):
    proximal = random(batch, 0)
    return LearnBatch(
        batch=batch,
        advantages=objective.token_advantages(config, batch, proximal, reference),
        loss_weight=objective.loss_weight(config, batch),
        proximal_logprobs=proximal,
        reference_logprobs=reference,
        importance=objective.importance(config, batch, proximal),
    )


def test_names_and_functions_are_the_same_set():
    over_time = {"reinforce_plus_plus", "reinforce_plus_plus_baseline"}
    assert set(pieces.ADVANTAGES) == set(objective.GROUP_ADVANTAGES) | over_time
    assert set(pieces.LOSSES) == set(objective.LOSSES)
    assert set(pieces.REDUCTIONS) == set(objective.REDUCTIONS)
    assert set(pieces.KLS) == set(objective.KL) | {"none"}


@pytest.mark.parametrize("name", pieces.ADVANTAGES)
def test_advantages(name, two_groups):
    batch = pack(two_groups)
    mask, ids = batch.is_action, batch.sequence_ids
    config = ObjectiveConfig(advantage=name, advantage_eps=0.5, gamma=0.9, centered=True)
    got = objective.token_advantages(config, batch, random(batch, 0), None)
    r, g = batch.rewards, batch.group_ids
    over_tokens = {
        "reinforce_plus_plus_baseline": lambda: advantages.reinforce_plus_plus_baseline(
            r, g, mask, sequence_ids=ids
        ),
        "reinforce_plus_plus": lambda: advantages.reinforce_plus_plus(
            objective.on_last_action(r, mask, ids), mask, gamma=0.9, sequence_ids=ids
        ),
    }
    settings = {"group_zscore": {"eps": 0.5}, "best_of_group": {"centered": True}}
    if name in over_tokens:
        expected = over_tokens[name]()
    else:
        per_response = getattr(advantages, name)(r, g, **settings.get(name, {}))
        expected = torch.where(mask, per_response[ids], 0.0)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["raw", "reinforce_plus_plus"])
def test_kl_in_the_reward_lowers_it(name, two_groups):
    batch = pack(two_groups)
    mask, ids = batch.is_action, batch.sequence_ids
    proximal, reference = random(batch, 0), random(batch, 1)
    config = ObjectiveConfig(advantage=name, kl="k1", kl_in="reward", kl_coefficient=0.5)
    got = objective.token_advantages(config, batch, proximal, reference)
    x = kl.k1(proximal, reference)
    if name == "raw":
        sums = [x[mask & (ids == i)].sum() for i in range(5)]
        expected = torch.where(mask, (batch.rewards - 0.5 * torch.stack(sums))[ids], 0.0)
    else:
        rewards = kl.penalised_rewards(batch.rewards, x, mask, coefficient=0.5, sequence_ids=ids)
        expected = advantages.reinforce_plus_plus(rewards, mask, sequence_ids=ids)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("loss", pieces.LOSSES)
@pytest.mark.parametrize("ratio", pieces.RATIOS)
def test_losses(loss, ratio, two_groups):
    batch = pack(two_groups)
    config = ObjectiveConfig(
        loss=loss, ratio=ratio, clip_low=0.1, clip_high=0.2, dual_clip=1.3, cispo_cap=1.1,
        cispo_floor=0.9,
    )  # fmt: skip
    learn = learn_batch(config, batch)
    logprobs = random(batch, 2)
    entropy = torch.ones_like(logprobs)
    got = objective.token_loss(config, Measured(logprobs, entropy), learn)
    metrics = objective.describe(config, Measured(logprobs, entropy), learn)
    r = ratios.token_ratio(logprobs, learn.proximal_logprobs)
    if ratio == "sequence":
        r = ratios.sequence_ratio(
            logprobs, learn.proximal_logprobs, batch.is_action, sequence_ids=batch.sequence_ids
        )
    a = learn.advantages
    expected = {
        "reinforce": lambda: losses.reinforce(logprobs, a),
        "unclipped": lambda: losses.unclipped(r, a),
        "clip": lambda: losses.clipped(r, a, low=0.1, high=0.2, dual=1.3),
        "cispo": lambda: losses.cispo(logprobs, r, a, cap=1.1, floor=0.9),
    }[loss]()
    torch.testing.assert_close(got, expected)
    acted = r[batch.is_action]
    assert metrics["train/ratio_min"] == pytest.approx(acted.min().item())
    assert metrics["train/ratio_max"] == pytest.approx(acted.max().item())
    assert metrics["train/entropy"] == 1.0
    assert ("train/clip_fraction" in metrics) == (loss in ("clip", "cispo"))


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_kl_and_entropy_terms_are_added(name, two_groups):
    batch = pack(two_groups)
    reference, logprobs = random(batch, 1), random(batch, 2)
    config = ObjectiveConfig(loss="reinforce", kl=name, kl_coefficient=0.3, entropy_coefficient=0.2)
    learn = learn_batch(config, batch, reference)
    entropy = 3 * torch.ones_like(logprobs)
    got = objective.token_loss(config, Measured(logprobs, entropy), learn)
    metrics = objective.describe(config, Measured(logprobs, entropy), learn)
    term = getattr(kl, name)(logprobs, reference)
    expected = losses.reinforce(logprobs, learn.advantages) + 0.3 * term - 0.2 * 3
    torch.testing.assert_close(got, expected)
    for estimator in (kl.k1, kl.k3):
        mean = estimator(logprobs, reference)[batch.is_action].mean().item()
        assert metrics[f"kl/reference_{estimator.__name__}"] == pytest.approx(mean)


def test_kl_in_the_reward_stays_out_of_the_loss(two_groups):
    batch = pack(two_groups)
    reference, logprobs = random(batch, 1), random(batch, 2)
    config = ObjectiveConfig(loss="reinforce", kl="k1", kl_in="reward")
    learn = learn_batch(config, batch, reference)
    got = objective.token_loss(config, Measured(logprobs, torch.ones_like(logprobs)), learn)
    torch.testing.assert_close(got, losses.reinforce(logprobs, learn.advantages))


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("kind", ["truncate", "mask"])
def test_importance_weighs_the_loss(kind, level, two_groups):
    batch = pack(two_groups)
    config = ObjectiveConfig(
        loss="reinforce", importance=kind, importance_level=level, importance_low=0.8,
        importance_high=1.2,
    )  # fmt: skip
    learn = learn_batch(config, batch)
    logprobs = random(batch, 2)
    entropy = torch.ones_like(logprobs)
    got = objective.token_loss(config, Measured(logprobs, entropy), learn)
    metrics = objective.describe(config, Measured(logprobs, entropy), learn)
    weights = ratios.importance_ratio(
        learn.proximal_logprobs,
        batch.behavior_logprobs,
        batch.is_action,
        level=level,
        sequence_ids=batch.sequence_ids,
    )
    bound = ratios.truncate if kind == "truncate" else ratios.keep_between
    weights = bound(weights, low=0.8, high=1.2)
    torch.testing.assert_close(got, weights * losses.reinforce(logprobs, learn.advantages))
    mean = weights[batch.is_action].mean().item()
    assert metrics["train/importance"] == pytest.approx(mean)


def test_denominators(two_groups):
    batch = pack(two_groups)
    for name, total in {"sequence_mean": 1.0, "token_mean": 1.0, "constant": 9 / (5 * 4)}.items():
        config = ObjectiveConfig(reduction=name, constant_length=4)
        weights = objective.loss_weight(config, batch)
        assert weights.sum().item() == pytest.approx(total)
        assert weights[~batch.is_action].abs().sum() == 0
