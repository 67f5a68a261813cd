"""A recipe's objective as a ``Program`` that the learner runs without knowing its pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from burnish.errors import ConfigError
from burnish.pieces.advantages import CRITIC, Gae
from burnish.pieces.losses import Reduction, Streams
from burnish.pieces.objective import ObjectiveConfig
from burnish.pieces.terms import KL, Importance
from burnish.rl import kl, losses, ratios
from burnish.rl.reduce import weighted_sum
from burnish.rl.sequences import finite_gradient, sequence_lengths, sequence_sum
from burnish.rl.values import explained_variance, is_value_clipped
from burnish.rollout.packing import Pack, take, take_streams
from burnish.schema.critic import CriticConfig
from burnish.types import LearnBatch, Measured, PackedBatch, Scores

Metrics = dict[str, float]
Pass = Literal["proximal", "reference", "teacher", "values"]
"""A forward pass without gradient over a rollout; its name is a field of ``Scores``."""


def compile(objective: ObjectiveConfig, critic: CriticConfig | None = None) -> Program:
    """The program of an objective, whose own functions must be here and not only their names.

    ``critic`` is None if the objective reads no critic's values.
    """
    if (critic is not None) != objective.advantage.reads_critic:
        raise ConfigError(
            "a critic goes with objective.advantage = 'gae' and its values = 'critic', and these "
            "need a critic"
        )
    for piece in (objective.advantage, objective.loss):
        for name in (piece.settings.get(key) for key in ("function", "values")):
            if isinstance(name, str) and name != CRITIC:
                raise ConfigError(
                    f"the objective has the function {name} of a script, and a run does not keep "
                    "functions, so it can't be resumed; begin a new run from Python"
                )
    return Program(objective, critic)


@dataclass(frozen=True)
class Program:
    """The computations before, in and after a gradient step. The loop calls ``advantages`` and
    ``batches``, the learner calls the rest."""

    objective: ObjectiveConfig
    critic: CriticConfig | None = None
    """None if the objective reads no critic's values."""

    @property
    def _kl(self) -> KL | None:
        return self.objective.kl if isinstance(self.objective.kl, KL) else None

    def passes(self, steps: int) -> list[Pass]:
        """The forward passes that are needed before the first of so many gradient steps.

        A single step's own forward pass is the proximal policy's, so that another one is made only
        for a piece that reads it earlier.
        """
        needed: list[Pass] = ["reference"] if self._kl else []
        is_read = steps > 1 or self.objective.reads_proximal_first
        if is_read and self.objective.proximal == "recompute":
            needed.insert(0, "proximal")
        needed += ["values"] if self.critic else []
        return [*needed, *(name for name in self.objective.advantage.reads if name != "proximal")]

    def moves_policy(self, number: int) -> bool:
        """Whether the policy learns from rollout ``number``, counted from 0, or a critic alone."""
        return self.critic is None or number >= self.critic.warmup_rollouts

    @property
    def graded(self) -> tuple[str, ...]:
        """Names of the grade's parts that a packed batch must carry."""
        return self.objective.advantage.graded

    @property
    def refresh(self) -> int | None:
        """The policy becomes the reference every so many rollouts; None if it never does."""
        return self.objective.kl.refresh

    def advantages(self, batch: PackedBatch, scores: Scores) -> Tensor:
        """The advantage of every action, [N]; a KL term in the reward is a part of it."""
        return self._estimate(batch, scores)[0]

    def _estimate(self, batch: PackedBatch, scores: Scores) -> tuple[Tensor, Tensor | None]:
        """Advantages, and the returns that a critic learns, [N]; None if there is no critic."""
        estimator, rewards = self.objective.advantage, batch.rewards
        mask, ids = batch.is_action, batch.sequence_ids
        coefficient, penalty = 0.0, torch.zeros_like(batch.behavior_logprobs)
        if self._kl and self._kl.where == "reward":
            proximal, reference = self._proximal(batch, scores), scores.reference
            assert proximal is not None, "it is in passes"
            assert reference is not None, "it is in passes"
            coefficient, penalty = self._kl.coefficient, self._kl.per_token(proximal, reference)
        if estimator.over_time:
            rewards = kl.penalised_rewards(
                rewards, penalty, mask, coefficient=coefficient, sequence_ids=ids
            )
        else:
            rewards = rewards - coefficient * sequence_sum(penalty, mask, ids)
        if isinstance(estimator, Gae) and scores.values is not None:
            return estimator.estimate(rewards, batch, scores.values)
        scores = scores._replace(proximal=self._proximal(batch, scores))
        return estimator.from_scores(rewards, batch, scores), None

    def batches(
        self, batch: PackedBatch, advantages: Tensor, scores: Scores, parts: Sequence[Pack]
    ) -> list[LearnBatch]:
        """A batch to learn from for each part of a rollout, weighed by its own denominator.

        If there are several parts, responses that teach nothing are left out of them.
        """
        proximal = self._proximal(batch, scores)
        correction = None
        if isinstance(self.objective.importance, Importance):
            assert proximal is not None, "it is in passes"
            correction = self.objective.importance.weights(proximal, batch)
        returns = None if self.critic is None else self._estimate(batch, scores)[1]
        batches = deal(
            parts,
            self.objective.reduction,
            advantages=advantages,
            proximal_logprobs=proximal,
            reference_logprobs=scores.reference,
            importance=correction,
            returns=returns,
            old_values=scores.values,
        )
        has_term = self._kl or self.objective.entropy_coefficient or self.objective.loss.has_term
        is_whole = has_term or self.critic or len(batches) == 1
        return batches if is_whole else [live(learn) for learn in batches]

    def token_loss(self, measured: Measured, learn: LearnBatch) -> Tensor:
        """The loss of every slot before its weight, [N]."""
        logprobs = measured.logprobs
        loss = self.objective.loss.per_token(self._streams(logprobs, learn))
        if learn.importance is not None:
            loss = learn.importance * finite_gradient(loss, learn.importance)
        if self._kl and self._kl.where == "loss":
            assert learn.reference_logprobs is not None, "it is in passes"
            term = self._kl.per_token(logprobs, learn.reference_logprobs)
            loss = loss + self._kl.coefficient * term
        if self.objective.entropy_coefficient:
            loss = loss - self.objective.entropy_coefficient * measured.entropy
        return loss

    def value_loss(self, values: Tensor, learn: LearnBatch) -> Tensor:
        """The loss of every value before its weight, [N]. A critic that shares the policy's body
        has a coefficient, and its loss is added to the policy's."""
        assert self.critic is not None
        assert learn.old_values is not None, "it is in passes"
        assert learn.returns is not None, "it is in passes"
        loss = losses.value_loss(values, learn.old_values, learn.returns, clip=self.critic.clip)
        return self.critic.coefficient * loss if self.critic.shared else loss

    def value_metrics(self, values: Tensor, learn: LearnBatch) -> Metrics:
        """Figures of a critic's ``values`` [N] in a train batch, without gradient."""
        assert self.critic is not None
        action, streams = learn.batch.is_action, (values, learn.old_values, learn.returns)
        now, old, returns = (x[action] for x in streams if x is not None)
        clipped = is_value_clipped(now, old, returns, clip=self.critic.clip)
        metrics = {
            "train/value_loss": weighted_sum(
                self.value_loss(values, learn), learn.loss_weight
            ).item(),
            "train/value_clip_fraction": clipped.float().mean().item(),
        }
        explained = explained_variance(old, returns)
        return metrics | (
            {} if explained is None else {"train/explained_variance": explained.item()}
        )

    def metrics(self, measured: Measured, learn: LearnBatch) -> Metrics:
        """Figures of a train batch; ``measured`` carries no gradient."""
        logprobs, entropy = measured.logprobs, measured.entropy
        action = learn.batch.is_action
        streams = self._streams(logprobs, learn)
        ratio, advantage = streams["ratio"][action], learn.advantages[action]
        metrics = {
            "train/entropy": entropy[action].mean().item(),
            "train/ratio_min": ratio.min().item(),
            "train/ratio_max": ratio.max().item(),
            "train/advantage_std": advantage.std(correction=int(len(advantage) > 1)).item(),
        }
        clipped = self.objective.loss.is_clipped(streams)
        if clipped is not None:
            metrics["train/clip_fraction"] = clipped[action].float().mean().item()
        if learn.importance is not None:
            metrics["train/importance"] = learn.importance[action].mean().item()
        if learn.reference_logprobs is not None:
            metrics |= _mean_kl("reference", logprobs[action], learn.reference_logprobs[action])
        return metrics

    def _proximal(self, batch: PackedBatch, scores: Scores) -> Tensor | None:
        """[N]; None if the proximal policy is the policy itself."""
        is_sampler = self.objective.proximal == "behavior"
        return batch.behavior_logprobs if is_sampler else scores.proximal

    def _streams(self, logprobs: Tensor, learn: LearnBatch) -> Streams:
        """The streams that a loss may read, [N] each."""
        proximal = learn.proximal_logprobs
        if proximal is None:  # the policy is where it was: the ratio is 1, its gradient is not 0
            proximal = logprobs.detach()
        mask, ids = learn.batch.is_action, learn.batch.sequence_ids
        if self.objective.ratio == "token":
            ratio = ratios.token_ratio(logprobs, proximal)
        else:
            ratio = ratios.sequence_ratio(logprobs, proximal, mask, sequence_ids=ids)
        streams = {"logprobs": logprobs, "proximal": proximal, "ratio": ratio}
        return streams | {"advantages": learn.advantages, "mask": mask, "sequence_ids": ids}


def deal(parts: Sequence[Pack], reduction: Reduction, **streams: Tensor | None) -> list[LearnBatch]:
    """A batch to learn from for each part: its slots of the streams [N], and its own weights."""
    found = []
    for part, slots in parts:
        own: dict[str, Any] = {name: at(slots, stream) for name, stream in streams.items()}
        weight = reduction.weights(part).float()
        found.append(LearnBatch(part, loss_weight=weight, slots=slots, **own))
    return found


def live(learn: LearnBatch) -> LearnBatch:
    """Without the responses whose advantages are all 0: their loss is 0 whatever the policy.

    The denominator still counts the whole batch. A batch in which nothing is left stays as it is.
    """
    batch = learn.batch
    moved = sequence_sum((learn.advantages != 0).float(), batch.is_action, batch.sequence_ids) > 0
    if moved.all() or not moved.any():
        return learn
    return take_streams(learn, take(batch, moved.nonzero().squeeze(1)))


def describe_kl(name: str, logprobs: Tensor, other: Tensor, batch: PackedBatch) -> Metrics:
    """KL to another policy, k1 and k3: the mean over tokens, and the mean over responses of each
    response's sum."""
    action = batch.is_action
    acted = sequence_lengths(action, batch.sequence_ids) > 0  # a response may be out of the loss
    metrics = _mean_kl(name, logprobs[action], other[action])
    for estimator in (kl.k1, kl.k3):
        sums = sequence_sum(estimator(logprobs, other), action, batch.sequence_ids)
        metrics[f"kl/{name}_{estimator.__name__}_response"] = sums[acted].mean().item()
    return metrics


def _mean_kl(name: str, logprobs: Tensor, other: Tensor) -> Metrics:
    return {
        f"kl/{name}_{estimator.__name__}": estimator(logprobs, other).mean().item()
        for estimator in (kl.k1, kl.k3)
    }


def mismatch(logprobs: Tensor, batch: PackedBatch, version: int) -> Metrics:
    """The gap between sampler and learner, on tokens that this very version sampled."""
    same = batch.is_action & (batch.versions == version)
    if not same.any():
        return {}
    gap = (logprobs - batch.behavior_logprobs)[same].abs()
    return {"mismatch/logprob_mean": gap.mean().item(), "mismatch/logprob_max": gap.max().item()}


def at(slots: Tensor, stream: Tensor | None) -> Tensor | None:
    return None if stream is None else stream[slots]
