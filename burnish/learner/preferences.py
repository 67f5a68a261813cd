"""The program of a reward model: its learner ranks the two responses of each group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from burnish.learner.objective import Metrics, Pass, deal
from burnish.model.reward import ends
from burnish.pieces.losses import SequenceMean
from burnish.rl.preferences import bradley_terry
from burnish.rl.sequences import to_tokens
from burnish.rollout.packing import Pack
from burnish.types import LearnBatch, Measured, PackedBatch, Scores


class Preferences:
    """Groups hold a chosen and a rejected response, in this order, and lie whole in their pack.

    The loss of a pair stands on every token of its two responses, and the weights add up to 1 / S
    for each response: the batch's loss is the mean over its pairs.
    """

    refresh: int | None = None

    def passes(self, steps: int) -> list[Pass]:
        return []

    def advantages(self, batch: PackedBatch, scores: Scores) -> Tensor:
        """Preferences need none: 0 everywhere, [N]."""
        return torch.zeros_like(batch.behavior_logprobs)

    def batches(
        self, batch: PackedBatch, advantages: Tensor, scores: Scores, parts: Sequence[Pack]
    ) -> list[LearnBatch]:
        return deal(parts, SequenceMean(), advantages=advantages)

    def token_loss(self, measured: Measured, learn: LearnBatch) -> Tensor:
        batch = learn.batch
        losses = bradley_terry(*rewards(measured.logprobs, batch)).repeat_interleave(2)
        return to_tokens(losses, batch.is_action, batch.sequence_ids)

    def metrics(self, measured: Measured, learn: LearnBatch) -> Metrics:
        return describe("train", measured.logprobs, learn.batch)


def rewards(stream: Tensor, batch: PackedBatch) -> tuple[Tensor, Tensor]:
    """[P] each: of the chosen and of the rejected responses, from a model's stream [N]."""
    found = stream[ends(batch)]
    return found[0::2], found[1::2]


def describe(stage: str, stream: Tensor, batch: PackedBatch) -> Metrics:
    """How often the chosen response has the higher reward, and by how much on average."""
    chosen, rejected = rewards(stream, batch)
    return {
        f"{stage}/accuracy": (chosen > rejected).float().mean().item(),
        f"{stage}/margin": (chosen - rejected).mean().item(),
    }
