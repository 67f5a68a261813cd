"""A recipe's objective as a program: advantages, loss and metrics for a learner that does not know
the pieces of the objective."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from burnish.errors import ConfigError
from burnish.learner.entropy import EntropyControl
from burnish.learner.protocol import Metrics, Pass
from burnish.recipe.critic import CriticConfig
from burnish.recipe.objective.advantages import Gae
from burnish.recipe.objective.kl import KL
from burnish.recipe.objective.losses import Reduction, Streams
from burnish.recipe.objective.objective import ObjectiveConfig, check_functions
from burnish.rl import kl, losses, ratios
from burnish.rl.reduce import weighted_sum
from burnish.rl.sequences import finite_gradient, sequence_lengths, sequence_sum
from burnish.rl.values import explained_variance, is_value_clipped
from burnish.rollout.packing import Pack, take, take_streams
from burnish.types import LearnBatch, Measured, PackedBatch, Scores


def compile(objective: ObjectiveConfig, critic: CriticConfig | None = None) -> ObjectiveProgram:
    """Build the program of an objective. ``critic`` is None if the objective reads no critic.

    Raises a ConfigError if a piece is only the name of a script's function (a stored recipe has
    lost the function), or if the critic is missing or not needed.
    """
    if (critic is not None) != objective.advantage.reads_critic:
        raise ConfigError(
            "objective.advantage = 'gae' with values = 'critic' needs a critic, and no other "
            "advantage uses one"
        )
    check_functions(objective)
    control = None
    if objective.entropy is not None:
        control = EntropyControl(objective.entropy, objective.entropy_coefficient)
    return ObjectiveProgram(objective, critic, control)


@dataclass(frozen=True)
class ObjectiveProgram:
    """Computes the advantages, train batches, token losses and metrics of a policy's objective
    (see `burnish.learner.protocol.LossProgram`)."""

    objective: ObjectiveConfig
    critic: CriticConfig | None = None
    """None if the objective reads no critic."""
    control: EntropyControl | None = None
    """Adapts the entropy coefficient; None if it is constant."""

    @property
    def _kl(self) -> KL | None:
        return self.objective.kl if isinstance(self.objective.kl, KL) else None

    def passes(self, steps: int) -> list[Pass]:
        """Names of the forward passes that are needed before the first of ``steps`` gradient steps.

        With a single gradient step, the step's own forward pass is the proximal policy's. A
        separate pass is needed only for a piece that reads the proximal policy before the step.
        """
        needed: list[Pass] = ["reference"] if self._kl else []
        is_read = steps > 1 or self.objective.reads_proximal_first
        if is_read and self.objective.proximal == "recompute":
            needed.insert(0, "proximal")
        needed += ["values"] if self.critic else []
        return [*needed, *(name for name in self.objective.advantage.reads if name != "proximal")]

    @property
    def graded(self) -> tuple[str, ...]:
        return self.objective.advantage.graded

    @property
    def refresh(self) -> int | None:
        return self.objective.kl.refresh

    @property
    def ema(self) -> float | None:
        return self.objective.kl.ema

    def advantages(self, batch: PackedBatch, scores: Scores) -> Tensor:
        """The advantage of each action token, [N], including a KL term in the reward."""
        return self._estimate(batch, scores)[0]

    def _estimate(self, batch: PackedBatch, scores: Scores) -> tuple[Tensor, Tensor | None]:
        """Estimate the advantages and the returns that the critic learns to predict, [N] each, from
        rewards minus the KL penalty in the reward, if the objective has one. The returns are None
        without a critic."""
        estimator = self.objective.advantage
        rewards = estimator.rewards_of(batch)
        mask, ids = batch.is_action, batch.sample_ids
        coefficient, penalty = 0.0, torch.zeros_like(batch.behavior_logprobs)
        if self._kl and self._kl.where == "reward":
            proximal, reference = self._proximal(batch, scores), scores.reference
            assert proximal is not None, "passes() includes it"
            assert reference is not None, "passes() includes it"
            coefficient, penalty = self._kl.coefficient, self._kl.per_token(proximal, reference)
        if estimator.over_time:
            rewards = kl.penalised_rewards(rewards, penalty, mask, coefficient=coefficient)
        else:
            rewards = rewards - coefficient * sequence_sum(penalty, mask, ids)
        if isinstance(estimator, Gae) and scores.values is not None:
            return estimator.estimate(rewards, batch, scores.values)
        scores = scores._replace(proximal=self._proximal(batch, scores))
        return estimator.from_scores(rewards, batch, scores), None

    def batches(
        self, batch: PackedBatch, advantages: Tensor, scores: Scores, parts: Sequence[Pack]
    ) -> list[LearnBatch]:
        """Build one train batch for each part of a rollout, with loss weights that are normalised
        over that part alone.

        If there are several parts, responses without a gradient are left out (see `live`).
        """
        proximal = self._proximal(batch, scores)
        correction = None
        if self.objective.corrections:
            assert proximal is not None, "passes() includes it"
            pieces = [piece.weights(proximal, batch) for piece in self.objective.corrections]
            correction = ratios.product(pieces)
        returns = None if self.critic is None else self._estimate(batch, scores)[1]
        batches = make_learn_batches(
            parts,
            self.objective.reduction,
            advantages=advantages,
            proximal_logprobs=proximal,
            reference_logprobs=scores.reference,
            importance=correction,
            returns=returns,
            old_values=scores.values,
        )
        has_term = self._kl or self.objective.has_entropy_term or self.objective.loss.has_term
        is_whole = has_term or self.critic or len(batches) == 1
        return batches if is_whole else [live(learn) for learn in batches]

    def token_loss(self, measured: Measured, learn: LearnBatch) -> Tensor:
        logprobs = measured.logprobs
        loss = self.objective.loss.per_token(self._streams(measured, learn))
        if learn.importance is not None:
            loss = learn.importance * finite_gradient(loss, learn.importance)
        if self._kl and self._kl.where == "loss":
            assert learn.reference_logprobs is not None, "passes() includes it"
            term = self._kl.per_token(logprobs, learn.reference_logprobs)
            loss = loss + self._kl.coefficient * term
        if self._entropy_coefficient:
            loss = loss - self._entropy_coefficient * measured.entropy
        return loss

    @property
    def _entropy_coefficient(self) -> float:
        return self.control.applied if self.control else self.objective.entropy_coefficient

    def adapt(self, metrics: Metrics) -> None:
        if self.control is not None:
            self.control.update(metrics)

    def state(self) -> dict[str, Any]:
        return {} if self.control is None else self.control.state()

    def load_state(self, numbers: dict[str, Any]) -> None:
        if self.control is not None:
            self.control.load_state(numbers)

    def policy_logprobs(self, measured: Measured) -> Tensor:
        return measured.logprobs

    def held_out_metrics(self, measured: Measured, batch: PackedBatch) -> Metrics:
        """Return ``validation/loss``, the mean negative log-likelihood of all action tokens: the
        tokens of the answers."""
        return {"validation/loss": -measured.logprobs[batch.is_action].double().mean().item()}

    def metrics(self, measured: Measured, learn: LearnBatch) -> Metrics:
        logprobs, entropy = measured.logprobs, measured.entropy
        action = learn.batch.is_action
        streams = self._streams(measured, learn)
        ratio, advantage = streams["ratio"][action], learn.advantages[action]
        metrics = {
            "train/entropy": entropy[action].mean().item(),
            "train/ratio_min": ratio.min().item(),
            "train/ratio_max": ratio.max().item(),
            "train/advantage_std": advantage.std(correction=int(len(advantage) > 1)).item(),
        }
        clipped = self.objective.loss.is_clipped(streams)
        if self.control is not None:
            metrics["train/entropy_coefficient"] = self.control.applied
        if clipped is not None:
            metrics["train/clip_fraction"] = clipped[action].float().mean().item()
        if learn.importance is not None:
            metrics["train/importance"] = learn.importance[action].mean().item()
            metrics |= self._importance_metrics(learn)
        if learn.reference_logprobs is not None:
            metrics |= _mean_kl("reference", logprobs[action], learn.reference_logprobs[action])
        return metrics

    def _importance_metrics(self, learn: LearnBatch) -> Metrics:
        """Return two metrics for each importance correction: its mean weight, and the fraction of
        actions whose ratio is outside of its bounds. A single correction has no such metrics."""
        pieces, batch = self.objective.corrections, learn.batch
        if len(pieces) < 2:
            return {}
        assert learn.proximal_logprobs is not None, "passes() includes it"
        metrics: Metrics = {}
        for piece in pieces:
            name = f"train/importance_{piece.name}_{piece.level}"
            weights = piece.weights(learn.proximal_logprobs, batch)[batch.is_action]
            outside = piece.is_outside(learn.proximal_logprobs, batch)[batch.is_action]
            metrics[name] = weights.mean().item()
            metrics[f"{name}_outside"] = outside.float().mean().item()
        return metrics

    def _proximal(self, batch: PackedBatch, scores: Scores) -> Tensor | None:
        """Return the log-probabilities [N] of the proximal policy: the sampler's if the objective
        has proximal = "behavior", otherwise those of the pass "proximal". Return None if that pass
        was not run: the proximal policy is then the policy itself."""
        is_sampler = self.objective.proximal == "behavior"
        return batch.behavior_logprobs if is_sampler else scores.proximal

    def _streams(self, measured: Measured, learn: LearnBatch) -> Streams:
        """Return the inputs of a loss by name, [N] each; among them the token or sequence ratio."""
        logprobs, proximal = measured.logprobs, learn.proximal_logprobs
        if proximal is None:  # the policy has not moved: the ratio is 1, but has a gradient
            proximal = logprobs.detach()
        mask, ids = learn.batch.is_action, learn.batch.sample_ids
        if self.objective.ratio == "token":
            ratio = ratios.token_ratio(logprobs, proximal)
        else:
            ratio = ratios.sequence_ratio(logprobs, proximal, mask, sequence_ids=ids)
        policies = {"logprobs": logprobs, "proximal": proximal, "ratio": ratio}
        policies |= {"behavior": learn.batch.behavior_logprobs, "entropy": measured.entropy}
        return policies | {"advantages": learn.advantages, "mask": mask, "sequence_ids": ids}


def critic_loss(critic: CriticConfig, values: Tensor, learn: LearnBatch) -> Tensor:
    """Return half the squared error of each value, with the value clip (`losses.value_loss`), [N],
    before loss weights.

    If the critic shares the policy's body, the result is multiplied by the critic's coefficient,
    because the learner adds it to the policy's loss.
    """
    assert learn.old_values is not None, "passes() includes it"
    assert learn.returns is not None, "passes() includes it"
    loss = losses.value_loss(values, learn.old_values, learn.returns, clip=critic.clip)
    return critic.coefficient * loss if critic.shared else loss


def critic_metrics(critic: CriticConfig, values: Tensor, learn: LearnBatch) -> Metrics:
    """Return the loss, clip fraction and explained variance of a critic in a train batch, as
    metrics. ``values`` [N] are the critic's values now, without gradient. The explained variance is
    computed from the values before the first gradient step, and left out if all returns are
    equal."""
    action, streams = learn.batch.is_action, (values, learn.old_values, learn.returns)
    now, old, returns = (x[action] for x in streams if x is not None)
    clipped = is_value_clipped(now, old, returns, clip=critic.clip)
    loss = weighted_sum(critic_loss(critic, values, learn), learn.loss_weight)
    metrics = {
        "train/value_loss": loss.item(),
        "train/value_clip_fraction": clipped.float().mean().item(),
    }
    explained = explained_variance(old, returns)
    return metrics | ({} if explained is None else {"train/explained_variance": explained.item()})


def make_learn_batches(
    parts: Sequence[Pack], reduction: Reduction, **streams: Tensor | None
) -> list[LearnBatch]:
    """Build one train batch for each part of a rollout, with loss weights that the reduction
    computes over that part alone.

    ``streams`` are tensors [N] of the whole rollout, named as the fields of ``LearnBatch``; a train
    batch gets their values in its slots. A stream that is None stays None.
    """
    found = []
    for part, slots in parts:
        own: dict[str, Any] = {name: at(slots, stream) for name, stream in streams.items()}
        weight = reduction.weights(part).float()
        found.append(LearnBatch(part, loss_weight=weight, slots=slots, **own))
    return found


def live(learn: LearnBatch) -> LearnBatch:
    """Return the train batch without the responses whose advantages are all 0. Their loss is always
    0 if the objective has no term, such as a KL, apart from the advantages.

    The loss weights are still those of the whole batch. If no response would be left, the batch is
    returned unchanged.
    """
    batch = learn.batch
    moved = sequence_sum((learn.advantages != 0).float(), batch.is_action, batch.sample_ids) > 0
    if moved.all() or not moved.any():
        return learn
    return take_streams(learn, take(batch, moved.nonzero().squeeze(1)))


def describe_kl(name: str, logprobs: Tensor, other: Tensor, batch: PackedBatch) -> Metrics:
    """Estimate the KL of a policy to another policy from their log-probabilities [N], with the
    estimators k1 and k3. Return for each the mean over action tokens (``kl/NAME_k1``), and the sum
    per response, averaged over responses with actions (``kl/NAME_k1_response``)."""
    action = batch.is_action
    acted = sequence_lengths(action, batch.sample_ids) > 0  # a response may be excluded
    metrics = _mean_kl(name, logprobs[action], other[action])
    for estimator in (kl.k1, kl.k3):
        sums = sequence_sum(estimator(logprobs, other), action, batch.sample_ids)
        metrics[f"kl/{name}_{estimator.__name__}_response"] = sums[acted].mean().item()
    return metrics


def _mean_kl(name: str, logprobs: Tensor, other: Tensor) -> Metrics:
    return {
        f"kl/{name}_{estimator.__name__}": estimator(logprobs, other).mean().item()
        for estimator in (kl.k1, kl.k3)
    }


def mismatch(logprobs: Tensor, batch: PackedBatch, version: int) -> Metrics:
    """Return metrics: mean and maximum of the absolute difference between the learner's
    log-probabilities [N] and the sampler's, on the tokens that weights of this version sampled.
    There are no metrics if no token was sampled by this version."""
    same = batch.is_action & (batch.versions == version)
    if not same.any():
        return {}
    gap = (logprobs - batch.behavior_logprobs)[same].abs()
    return {"mismatch/logprob_mean": gap.mean().item(), "mismatch/logprob_max": gap.max().item()}


def at(slots: Tensor, stream: Tensor | None) -> Tensor | None:
    """Return the values [n, …] of a stream [N, …] in the given slots [n]; None if the stream is
    None."""
    return None if stream is None else stream[slots]
