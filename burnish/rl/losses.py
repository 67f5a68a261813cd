"""Per-token objectives, as losses to be minimised. Elementwise: any shape, no mask, no mean.

``advantages`` broadcast against the tokens. The denominator is a weight that ``reduce.py`` makes.
A slot of weight 0 has no gradient, whatever it holds.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.rl.sequences import finite_gradient


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The plain policy gradient.

        L_t = −A_t log π(token_t)

    Williams 1992. Its value means nothing, only its gradient does.
    """
    return -advantages * finite_gradient(logprobs, advantages)


def unclipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    """The policy gradient corrected for the policy having moved since the batch was scored.

    L_t = −A_t ρ_t
    """
    return -advantages * finite_gradient(ratio, advantages)


def clipped(
    ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None
) -> Tensor:
    """No gain from moving a ratio past [1 − low, 1 + high] in the direction of its advantage.

        L_t = −min(ρ_t A_t, clip(ρ_t, 1 − low, 1 + high) A_t)
        with dual clip c, where A_t < 0:   L_t ← min(L_t, −c A_t)

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347 (PPO), equation 7; low ≠ high is
    clip-higher of Yu et al. 2025, https://arxiv.org/abs/2503.14476 (DAPO), equation 10; the dual
    clip bounds the loss of a bad token that became likelier, Ye et al. 2020,
    https://arxiv.org/abs/1912.09729. ``low`` and ``high`` are distances from 1 and may
    be infinite, which takes that side away.
    """
    ratio = finite_gradient(ratio, advantages)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)


def is_clipped(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """Bool: the clip took this token's gradient away (the dual clip aside)."""
    too_high = (advantages > 0) & (ratio > 1 + high)
    too_low = (advantages < 0) & (ratio < 1 - low)
    return too_high | too_low


def is_dual_clipped(ratio: Tensor, advantages: Tensor, *, dual: float) -> Tensor:
    """Bool: the dual clip took this token's gradient away."""
    return (advantages < 0) & (ratio > dual)


def cispo(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, cap: float, floor: float = 0.0
) -> Tensor:
    """REINFORCE weighted by the clipped ratio, so that no token ever loses its gradient.

        L_t = −sg[ min(max(ρ_t, floor), cap) ] A_t log π(token_t)

    MiniMax 2025, https://arxiv.org/abs/2506.13585 (CISPO), equations 4 and 5. Bounds are ratios,
    not distances: the paper's 1 + ε_high is ``cap``, 1 − ε_low is ``floor``; a floor of 0 caps from
    above only (as in ScaleRL, https://arxiv.org/abs/2510.13786, and TRL).
    """
    weight = -ratio.detach().clamp(floor, cap) * advantages
    return weight * finite_gradient(logprobs, weight)


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Half the squared error of the critic, the worse of it with and without its step bounded.

        L_t = ½ max( (V_t − R_t)², (clip(V_t, V_old − c, V_old + c) − R_t)² )

    The value clip of PPO's implementations (Huang et al. 2022, "The 37 implementation details of
    PPO", detail 9). ``clip`` may be infinite: then plain squared error.
    """
    values = finite_gradient(values, old_values, returns)
    bounded = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)


def entropy(logits: Tensor) -> Tensor:
    """The entropy of the next-token distribution in nats: [..., V] → [...].

        H = −Σ_v p_v log p_v

    A token of probability 0 (a logit of −inf) adds nothing.
    """
    logits = finite_gradient(logits, logits.amax(dim=-1, keepdim=True))
    logprobs = torch.log_softmax(logits, dim=-1)
    terms = logprobs.exp() * torch.where(logprobs.isinf(), torch.zeros_like(logprobs), logprobs)
    return -terms.sum(dim=-1)
