"""From the names in a recipe to the per-token streams and the loss: ``rl/``'s pieces, put together.

This is the one place where names of pieces meet their functions. The learner executes what comes
out of here and does not know what it is called.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from burnish.config import ObjectiveConfig
from burnish.rl import advantages, kl, losses, ratios, reduce
from burnish.rl.sequences import finite_gradient, on_last_action, sequence_sum, to_tokens
from burnish.types import LearnBatch, Measured, PackedBatch

Metrics = dict[str, float]

GROUP_ADVANTAGES: dict[str, Callable[[ObjectiveConfig, Tensor, Tensor], Tensor]] = {
    "raw": lambda c, r, g: advantages.raw(r, g),
    "group_mean": lambda c, r, g: advantages.group_mean(r, g),
    "group_zscore": lambda c, r, g: advantages.group_zscore(r, g, eps=c.advantage_eps),
    "leave_one_out": lambda c, r, g: advantages.leave_one_out(r, g),
    "best_of_group": lambda c, r, g: advantages.best_of_group(r, g, centered=c.centered),
}
KL = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}
REDUCTIONS: dict[str, Callable[[ObjectiveConfig, Tensor, Tensor], Tensor]] = {
    "sequence_mean": lambda c, mask, ids: reduce.sequence_mean(mask, sequence_ids=ids),
    "token_mean": lambda c, mask, ids: reduce.token_mean(mask, sequence_ids=ids),
    "constant": lambda c, mask, ids: reduce.constant(
        mask, length=float(c.constant_length or 0), sequence_ids=ids
    ),
}
LOSSES: dict[str, Callable[[ObjectiveConfig, Tensor, Tensor, Tensor], Tensor]] = {
    "reinforce": lambda c, logprobs, ratio, a: losses.reinforce(logprobs, a),
    "unclipped": lambda c, logprobs, ratio, a: losses.unclipped(ratio, a),
    "clip": lambda c, logprobs, ratio, a: losses.clipped(
        ratio, a, low=c.clip_low, high=c.clip_high, dual=c.dual_clip
    ),
    "cispo": lambda c, logprobs, ratio, a: losses.cispo(
        logprobs, ratio, a, cap=c.cispo_cap, floor=c.cispo_floor
    ),
}


def token_advantages(
    config: ObjectiveConfig, batch: PackedBatch, proximal: Tensor | None, reference: Tensor | None
) -> Tensor:
    """The advantage of every action, [N]; a KL term in the reward is a part of it."""
    mask, ids, rewards = batch.is_action, batch.sequence_ids, batch.rewards
    penalty = None
    if reference is not None and config.kl_in == "reward":
        assert proximal is not None, "pieces.reads_proximal_first"
        penalty = KL[config.kl](proximal, reference)
    if config.advantage == "reinforce_plus_plus":
        if penalty is None:
            per_token = on_last_action(rewards, mask, ids)
        else:
            per_token = kl.penalised_rewards(
                rewards, penalty, mask, coefficient=config.kl_coefficient, sequence_ids=ids
            )
        return advantages.reinforce_plus_plus(per_token, mask, gamma=config.gamma, sequence_ids=ids)
    if penalty is not None:
        rewards = rewards - config.kl_coefficient * sequence_sum(penalty, mask, ids)
    if config.advantage == "reinforce_plus_plus_baseline":
        return advantages.reinforce_plus_plus_baseline(
            rewards, batch.group_ids, mask, sequence_ids=ids
        )
    per_response = GROUP_ADVANTAGES[config.advantage](config, rewards, batch.group_ids)
    return to_tokens(per_response, mask, ids)


def loss_weight(config: ObjectiveConfig, batch: PackedBatch) -> Tensor:
    """The denominator over this train batch, [N]."""
    weights = REDUCTIONS[config.reduction](config, batch.is_action, batch.sequence_ids)
    return weights.to(batch.behavior_logprobs.dtype)


def importance(
    config: ObjectiveConfig, batch: PackedBatch, proximal: Tensor | None
) -> Tensor | None:
    """The correction for the gap between sampler and learner, [N]; None if the recipe has none."""
    if config.importance == "none":
        return None
    assert proximal is not None, "pieces.reads_proximal_first"
    weights = ratios.importance_ratio(
        proximal,
        batch.behavior_logprobs,
        batch.is_action,
        level=config.importance_level,
        sequence_ids=batch.sequence_ids,
    )
    low, high = config.importance_low, config.importance_high
    if config.importance == "truncate":
        return ratios.truncate(weights, low=low, high=high)
    return ratios.keep_between(weights, low=low, high=high)


def token_loss(config: ObjectiveConfig, measured: Measured, learn: LearnBatch) -> Tensor:
    """The loss of every slot before its weight, [N]."""
    logprobs = measured.logprobs
    ratio = _ratio(config, logprobs, learn)
    loss = LOSSES[config.loss](config, logprobs, ratio, learn.advantages)
    if learn.importance is not None:
        loss = learn.importance * finite_gradient(loss, learn.importance)
    if learn.reference_logprobs is not None and config.kl_in == "loss":
        loss = loss + config.kl_coefficient * KL[config.kl](logprobs, learn.reference_logprobs)
    if config.entropy_coefficient:
        loss = loss + config.entropy_coefficient * losses.entropy_bonus(measured.entropy)
    return loss


def describe(config: ObjectiveConfig, measured: Measured, learn: LearnBatch) -> Metrics:
    """What to report of a train batch, from what was measured without gradient."""
    logprobs, entropy = measured.logprobs, measured.entropy
    reference = learn.reference_logprobs
    action = learn.batch.is_action
    ratio, advantage = _ratio(config, logprobs, learn)[action], learn.advantages[action]
    metrics = {
        "train/entropy": entropy[action].mean().item(),
        "train/ratio_min": ratio.min().item(),
        "train/ratio_max": ratio.max().item(),
        "train/advantage_std": advantage.std(correction=0).item(),
    }
    if config.loss == "clip":
        clipped = losses.is_clipped(ratio, advantage, low=config.clip_low, high=config.clip_high)
        if config.dual_clip is not None:
            clipped |= losses.is_dual_clipped(ratio, advantage, dual=config.dual_clip)
        metrics["train/clip_fraction"] = clipped.float().mean().item()
    if config.loss == "cispo":
        outside = (ratio < config.cispo_floor) | (ratio > config.cispo_cap)
        metrics["train/clip_fraction"] = outside.float().mean().item()
    if learn.importance is not None:
        metrics["train/importance"] = learn.importance[action].mean().item()
    if reference is not None:
        metrics |= _mean_kl("reference", logprobs[action], reference[action])
    return metrics


def describe_kl(name: str, logprobs: Tensor, other: Tensor, batch: PackedBatch) -> Metrics:
    """KL to another policy, k1 and k3: mean per token, and sum per response, mean over those."""
    action = batch.is_action
    metrics = _mean_kl(name, logprobs[action], other[action])
    for estimator in ("k1", "k3"):
        sums = sequence_sum(KL[estimator](logprobs, other), action, batch.sequence_ids)
        metrics[f"kl/{name}_{estimator}_response"] = sums.mean().item()
    return metrics


def _mean_kl(name: str, logprobs: Tensor, other: Tensor) -> Metrics:
    return {f"kl/{name}_{k}": KL[k](logprobs, other).mean().item() for k in ("k1", "k3")}


def _ratio(config: ObjectiveConfig, logprobs: Tensor, learn: LearnBatch) -> Tensor:
    proximal = learn.proximal_logprobs
    if proximal is None:  # the policy is where it was: the ratio is 1, its gradient is not 0
        proximal = logprobs.detach()
    if config.ratio == "token":
        return ratios.token_ratio(logprobs, proximal)
    mask, ids = learn.batch.is_action, learn.batch.sequence_ids
    return ratios.sequence_ratio(logprobs, proximal, mask, sequence_ids=ids)
