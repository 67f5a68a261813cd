"""Reductions as weights: from a mask of the whole optimizer batch to ``loss_weight``.

    loss = Σ_t loss_weight_t · objective_t

Weights are made once, over the whole train batch; micro-batches, packs and ranks then only add up,
so that any split gives the batch's loss by construction. A sequence without actions leaves every
denominator. All take a mask [B, T], or [N] with sequence ids, and return weights shaped like it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.rl.sequences import sequence_lengths, sum_by, to_tokens


def sequence_mean(mask: Tensor, *, sequence_ids: Tensor | None = None) -> Tensor:
    """Every response counts the same: its tokens' mean, then the mean over responses.

        weight_(i,t) = 1 / (S |y_i|)

    GRPO, https://arxiv.org/abs/2402.03300, equation 3. A long response's tokens count less.
    Differs from the paper in nothing.
    """
    lengths = sequence_lengths(mask, sequence_ids).double()
    weights = 1 / (_count(lengths) * lengths.clamp(min=1))
    return to_tokens(weights, mask, sequence_ids)


def token_mean(mask: Tensor, *, sequence_ids: Tensor | None = None) -> Tensor:
    """Every token counts the same: one mean over the batch.

        weight_(i,t) = 1 / Σ_i |y_i|

    DAPO, https://arxiv.org/abs/2503.14476. A long response counts more.
    Differs from the paper's equation 12, which divides by the tokens of one prompt's group and so
    reads as ``prompt_mean``; its code (verl) and TRL divide by the tokens of the batch, as here.
    """
    lengths = sequence_lengths(mask, sequence_ids).double()
    weights = torch.full_like(lengths, 1.0) / lengths.sum().clamp(min=1)
    return to_tokens(weights, mask, sequence_ids)


def prompt_mean(mask: Tensor, *, group_ids: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """Every prompt counts the same: the mean over its group's tokens, then the mean over prompts.

        weight_(i,t) = 1 / (P Σ_(j in the group of i) |y_j|)

    Khatri et al. 2025, https://arxiv.org/abs/2510.13786 (ScaleRL), "prompt average". ``group_ids``
    [S] say whose prompt a response answers; P counts the prompts that have actions.
    Differs from the paper in nothing.
    """
    lengths = sequence_lengths(mask, sequence_ids).double()
    names, group = torch.unique(group_ids[: len(lengths)], return_inverse=True)
    totals = sum_by(lengths, group, len(names))
    weights = 1 / (_count(totals) * totals.clamp(min=1))
    return to_tokens(weights[group], mask, sequence_ids)


def constant(mask: Tensor, *, length: float, sequence_ids: Tensor | None = None) -> Tensor:
    """Every token counts the same whatever the lengths: sums over a constant, mean over responses.

        weight_(i,t) = 1 / (S · length)

    Liu et al. 2025, https://arxiv.org/abs/2503.20783 (Dr. GRPO); ``length`` is usually the largest
    response length. With length = 1 it is the mean over responses of their sums.
    Differs from the paper in nothing.
    """
    lengths = sequence_lengths(mask, sequence_ids).double()
    weights = torch.full_like(lengths, 1.0) / (_count(lengths) * length)
    return to_tokens(weights, mask, sequence_ids)


def weighted_sum(objective: Tensor, weights: Tensor) -> Tensor:
    """The loss: Σ weight · objective. Slots of weight 0 are left out, whatever they hold."""
    kept = torch.where(weights != 0, objective, torch.zeros_like(objective))
    return (kept * weights).sum()


def _count(lengths: Tensor) -> Tensor:
    return (lengths > 0).sum().clamp(min=1)
