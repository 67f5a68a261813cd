"""Ratios between policies: policy over proximal policy, and proximal over behavior policy.

A ratio is always exp(log π − log π'). One published lecture writes log_probs / old_log_probs
instead. This quotient of logarithms has the wrong value, and its gradient has the wrong sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from burnish.rl.sequences import finite_gradient, sequence_lengths, sequence_sum, to_tokens

Level = Literal["token", "sequence", "geometric"]


def token_ratio(logprobs: Tensor, proximal: Tensor) -> Tensor:
    """The probability of each token under the policy, relative to the proximal policy.

        ρ_t = π(token_t) / π_prox(token_t) = exp(log π − log π_prox)

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347 (PPO). Any shape.
    Differs from the paper in nothing.
    """
    log_ratio = logprobs - proximal
    return torch.exp(finite_gradient(log_ratio, torch.exp(log_ratio)))


def sequence_ratio(
    logprobs: Tensor, proximal: Tensor, mask: Tensor, *, sequence_ids: Tensor | None = None
) -> Tensor:
    """One ratio per sequence, the geometric mean of its token ratios, with per-token gradients.

        s_i = exp( (1/|y_i|) Σ_t (log π − log π_prox) )
        ρ_(i,t) = sg[s_i] · π(token_t) / sg[π(token_t)]

    Zheng et al. 2025, https://arxiv.org/abs/2507.18071 (GSPO), equations 7 and 14 (GSPO-token). The
    value is s_i for all tokens. The gradient is s_i ∇ log π(token_t), which adds up to the gradient
    of s_i under a per-sequence mean. All tensors have the shape of the mask; the ratio is 1 outside
    it.
    Differs from the paper in nothing; verl also bounds log ρ by 10.
    """
    log_ratio = logprobs - proximal
    mean = sequence_sum(log_ratio, mask, sequence_ids) / _lengths(mask, sequence_ids, log_ratio)
    own = to_tokens(mean.detach(), mask, sequence_ids)
    passing = torch.where(mask.bool(), logprobs - logprobs.detach(), torch.zeros_like(logprobs))
    return torch.exp(own + passing)


def importance_ratio(
    proximal: Tensor,
    behavior: Tensor,
    mask: Tensor,
    *,
    level: Level = "token",
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """The probability of a sampled token under the learner, relative to the sampler.

        token:     w_t = π_prox(token_t) / π_behavior(token_t)
        sequence:  w_i = Π_t w_t            (importance weight of the sequence)
        geometric: w_i = (Π_t w_t)^(1/|y_i|)

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training". It is
    a weight of the loss and has no gradient; truncate or mask it before use. All tensors have the
    shape of the mask; the weight is 1 outside it.
    Differs from the text in the levels sequence and geometric.
    """
    log_ratio = (proximal - behavior).detach()
    if level == "token":
        return torch.exp(torch.where(mask.bool(), log_ratio, torch.zeros_like(log_ratio)))
    total = sequence_sum(log_ratio, mask, sequence_ids)
    if level == "geometric":
        total = total / _lengths(mask, sequence_ids, log_ratio)
    return torch.exp(to_tokens(total, mask, sequence_ids))


def truncate(weights: Tensor, *, high: float, low: float = 0.0) -> Tensor:
    """Importance weights clipped to [low, high]: a small bias for a bounded variance.

        w ← min(max(w, low), high)

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (TIS).
    Any shape. Differs from the text in ``low``, which is 0 there.
    """
    return weights.clamp(min=low, max=high)


def keep_between(weights: Tensor, *, low: float, high: float) -> Tensor:
    """Importance weights in [low, high]; 0 for tokens on which sampler and learner disagree more.

        w ← w [low ≤ w ≤ high]

    Ling team 2025, https://arxiv.org/abs/2510.18855 (IcePop; masked importance sampling). Any
    shape.
    Differs from the paper in nothing.
    """
    inside = (weights >= low) & (weights <= high)
    return torch.where(inside, weights, torch.zeros_like(weights))


def accepted(weights: Tensor, *, low: float, high: float) -> Tensor:
    """1 for tokens whose importance weight is in [low, high], 0 for all others.

        w ← [low ≤ w ≤ high]

    The sequence mask of "seq-mask-tis" in NeMo-RL and OpenRLHF, with the geometric weights of
    sequences: it rejects sequences without weighting the others. Any shape.
    Differs from these in nothing: denominators still count the rejected tokens.
    """
    return ((weights >= low) & (weights <= high)).to(weights.dtype)


def product(weights: Sequence[Tensor]) -> Tensor:
    """The elementwise product of one or more tensors of importance weights, all of the same shape;
    0 where one weight is 0, even if another one is infinite."""
    first, *others = weights
    for other in others:
        is_zero = (first == 0) | (other == 0)
        first = torch.where(is_zero, torch.zeros_like(first), first * other)
    return first


def _lengths(mask: Tensor, sequence_ids: Tensor | None, like: Tensor) -> Tensor:
    return sequence_lengths(mask, sequence_ids).clamp(min=1).to(like.dtype)
