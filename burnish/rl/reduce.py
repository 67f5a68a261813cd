"""Reductions as token weights, computed from the mask of the whole train batch.

    loss = Σ_t loss_weight_t · objective_t

Weights are computed once for the whole train batch. Micro-batches, packs and ranks only add up
weighted losses, so every split gives the same loss. A sequence without actions counts in no
denominator. All functions take a mask [B, T], or [N] with sequence ids, and return weights with the
shape of the mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.rl.sequences import sequence_lengths, sum_by, to_tokens


def sequence_mean(mask: Tensor, *, sequence_ids: Tensor | None = None) -> Tensor:
    """Weights for the mean over each response's tokens, then over responses, so that all responses
    have the same total weight.

        weight_(i,t) = 1 / (S |y_i|)

    GRPO, https://arxiv.org/abs/2402.03300, equation 3. Tokens of long responses weigh less.
    Differs from the paper in nothing.
    """
    lengths = sequence_lengths(mask, sequence_ids).double()
    weights = 1 / (_count(lengths) * lengths.clamp(min=1))
    return to_tokens(weights, mask, sequence_ids)


def token_mean(mask: Tensor, *, sequence_ids: Tensor | None = None) -> Tensor:
    """Weights for the mean over all tokens of the batch, so that all tokens have the same weight.

        weight_(i,t) = 1 / Σ_i |y_i|

    DAPO, https://arxiv.org/abs/2503.14476. Long responses weigh more.
    Differs from the paper's equation 12, which divides by the tokens of one prompt's group, like
    ``prompt_mean``. The paper's code (verl) and TRL divide by the tokens of the batch, as here.
    """
    lengths = sequence_lengths(mask, sequence_ids).double()
    weights = torch.full_like(lengths, 1.0) / lengths.sum().clamp(min=1)
    return to_tokens(weights, mask, sequence_ids)


def prompt_mean(mask: Tensor, *, group_ids: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """Weights for the mean over all tokens of a prompt's group, then over prompts, so that all
    prompts have the same total weight.

        weight_(i,t) = 1 / (P Σ_(j in the group of i) |y_j|)

    Khatri et al. 2025, https://arxiv.org/abs/2510.13786 (ScaleRL), "prompt average". ``group_ids``
    [S] are the groups of the responses; P is the number of prompts with actions.
    Differs from the paper in nothing.
    """
    lengths = sequence_lengths(mask, sequence_ids).double()
    names, group = torch.unique(group_ids[: len(lengths)], return_inverse=True)
    totals = sum_by(lengths, group, len(names))
    weights = 1 / (_count(totals) * totals.clamp(min=1))
    return to_tokens(weights[group], mask, sequence_ids)


def constant(mask: Tensor, *, length: float, sequence_ids: Tensor | None = None) -> Tensor:
    """Weights for the sum over each response's tokens divided by a constant, then the mean over
    responses.

        weight_(i,t) = 1 / (S · length)

    Liu et al. 2025, https://arxiv.org/abs/2503.20783 (Dr. GRPO). A token's weight does not depend
    on the length of its response. ``length`` is usually the largest response length.
    Differs from the paper in nothing.
    """
    lengths = sequence_lengths(mask, sequence_ids).double()
    weights = torch.full_like(lengths, 1.0) / (_count(lengths) * length)
    return to_tokens(weights, mask, sequence_ids)


def weighted_sum(objective: Tensor, weights: Tensor) -> Tensor:
    """The loss Σ_t weight_t · objective_t, from tensors of equal shape. Slots of weight 0 are left
    out, even if their objective is NaN or infinite."""
    kept = torch.where(weights != 0, objective, torch.zeros_like(objective))
    return (kept * weights).sum()


def _count(lengths: Tensor) -> Tensor:
    return (lengths > 0).sum().clamp(min=1)
