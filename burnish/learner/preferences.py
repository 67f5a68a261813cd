"""The program of a reward model, which learns to rank the two responses of each group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from burnish.learner.program import make_learn_batches
from burnish.learner.protocol import Metrics, Pass
from burnish.model.reward import last_slots
from burnish.recipe.critic import CriticConfig
from burnish.recipe.objective.losses import SequenceMean
from burnish.rl.preferences import bradley_terry
from burnish.rl.sequences import to_tokens
from burnish.rollout.packing import Pack
from burnish.types import LearnBatch, PackedBatch, ResponseRewards, Scores


class PreferenceProgram:
    """Defines the Bradley-Terry loss that trains a reward model on pairs of responses (see
    `burnish.learner.protocol.LossProgram`).

    Each group holds a chosen and a rejected response, in this order, and lies in one pack. The loss
    of a pair is assigned to every token of its two responses. The loss weights of each of the S
    responses add up to 1 / S, so the loss of a batch is the mean over its pairs.
    """

    refresh: int | None = None
    ema: float | None = None
    critic: CriticConfig | None = None
    graded: tuple[str, ...] = ()

    def passes(self, steps: int) -> list[Pass]:
        return []

    def advantages(self, batch: PackedBatch, scores: Scores) -> Tensor:
        """Return zeros [N], because preferences have no advantages."""
        return torch.zeros_like(batch.behavior_logprobs)

    def batches(
        self, batch: PackedBatch, advantages: Tensor, scores: Scores, parts: Sequence[Pack]
    ) -> list[LearnBatch]:
        return make_learn_batches(parts, SequenceMean(), advantages=advantages)

    def token_loss(self, measured: ResponseRewards, learn: LearnBatch) -> Tensor:
        batch = learn.batch
        losses = bradley_terry(*split_pairs(measured, batch)).repeat_interleave(2)
        return to_tokens(losses, batch.is_action, batch.sample_ids)

    def metrics(self, measured: ResponseRewards, learn: LearnBatch) -> Metrics:
        return preference_metrics("train", measured, learn.batch)

    def adapt(self, metrics: Metrics) -> None:
        """Do nothing: the loss has no coefficients."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, numbers: dict[str, Any]) -> None:
        """Do nothing: there is no state."""

    def held_out_metrics(self, measured: ResponseRewards, batch: PackedBatch) -> Metrics:
        """The mean loss over all pairs, and the metrics of `preference_metrics`, as
        ``validation/…``."""
        loss = bradley_terry(*split_pairs(measured, batch)).double().mean().item()
        return {"validation/loss": loss} | preference_metrics("validation", measured, batch)

    def policy_logprobs(self, measured: ResponseRewards) -> None:
        return None


def split_pairs(measured: ResponseRewards, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """Return the rewards of the chosen and of the rejected responses, [P] each, for a batch of P
    pairs: groups of a chosen and a rejected response, in this order."""
    rewards = measured.rewards[last_slots(batch)]
    return rewards[0::2], rewards[1::2]


def preference_metrics(stage: str, measured: ResponseRewards, batch: PackedBatch) -> Metrics:
    """Return two metrics: the share of pairs whose chosen response has the higher reward
    (``STAGE/accuracy``), and the mean of chosen minus rejected reward (``STAGE/margin``)."""
    chosen, rejected = split_pairs(measured, batch)
    return {
        f"{stage}/accuracy": (chosen > rejected).float().mean().item(),
        f"{stage}/margin": (chosen - rejected).mean().item(),
    }
