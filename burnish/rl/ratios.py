"""Ratios between policies: policy over proximal, and proximal over behavior.

A ratio is always exp(log π − log π'). One published lecture writes log_probs / old_log_probs
instead; that is a quotient of logarithms, has the wrong value and the wrong sign of gradient, and
is not here.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.rl.sequences import finite_gradient, sequence_lengths, sequence_sum, to_tokens

Level = Literal["token", "sequence", "geometric"]


def token_ratio(logprobs: Tensor, proximal: Tensor) -> Tensor:
    """How much likelier the policy makes each token than the policy the batch began with.

        ρ_t = π(token_t) / π_prox(token_t) = exp(log π − log π_prox)

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347 (PPO). Any shape.
    """
    log_ratio = logprobs - proximal
    return torch.exp(finite_gradient(log_ratio, torch.exp(log_ratio)))


def sequence_ratio(
    logprobs: Tensor, proximal: Tensor, mask: Tensor, *, sequence_ids: Tensor | None = None
) -> Tensor:
    """One ratio per sequence, the geometric mean of its tokens', with each token's own gradient.

        s_i = exp( (1/|y_i|) Σ_t (log π − log π_prox) )
        ρ_(i,t) = sg[s_i] · π(token_t) / sg[π(token_t)]

    Zheng et al. 2025, https://arxiv.org/abs/2507.18071 (GSPO), equations 7 and 14 (GSPO-token): its
    value is s_i everywhere, its gradient is s_i ∇ log π(token_t), which under a per-sequence mean
    adds up to the gradient of s_i itself. Shaped like the mask; 1 outside it.
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
    """How likely a sampled token is to the learner, against how likely it was to the sampler.

        token:     w_t = π_prox(token_t) / π_behavior(token_t)
        sequence:  w_i = Π_t w_t            (the sequence's own importance weight)
        geometric: w_i = (Π_t w_t)^(1/|y_i|)

    Carries no gradient: it weighs the loss, it is not learned from. Truncate or mask it before use.
    Shaped like the mask; 1 outside it.
    """
    log_ratio = (proximal - behavior).detach()
    if level == "token":
        return torch.exp(torch.where(mask.bool(), log_ratio, torch.zeros_like(log_ratio)))
    total = sequence_sum(log_ratio, mask, sequence_ids)
    if level == "geometric":
        total = total / _lengths(mask, sequence_ids, log_ratio)
    return torch.exp(to_tokens(total, mask, sequence_ids))


def truncate(weights: Tensor, *, high: float, low: float = 0.0) -> Tensor:
    """Importance weights cut off at ``high`` (and raised to ``low``): small bias, bounded variance.

        w ← min(max(w, low), high)

    Yao et al. 2025, "Your efficient RL framework secretly brings you off-policy RL training" (TIS).
    Any shape. Differs from the text in ``low``, which is 0 there.
    """
    return weights.clamp(min=low, max=high)


def keep_between(weights: Tensor, *, low: float, high: float) -> Tensor:
    """Importance weights where sampler and learner agree; 0, so no say, where they do not.

        w ← w [low ≤ w ≤ high]

    Ling team 2025, https://arxiv.org/abs/2510.18855 (IcePop; masked importance sampling). Any
    shape. Differs from the paper in nothing.
    """
    inside = (weights >= low) & (weights <= high)
    return torch.where(inside, weights, torch.zeros_like(weights))


def _lengths(mask: Tensor, sequence_ids: Tensor | None, like: Tensor) -> Tensor:
    return sequence_lengths(mask, sequence_ids).clamp(min=1).to(like.dtype)
