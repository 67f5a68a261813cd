"""Estimators of KL(π ‖ π_ref) from tokens that π sampled. Elementwise: any shape.

With x = log π − log π_ref on a sampled token, E[x] is the KL itself. The value of an estimator and
its gradient are two things: in a loss, the mean of its *gradient* must be the gradient of the KL.
Schulman 2020, "Approximating KL divergence"; Tang & Munos 2025, https://arxiv.org/abs/2506.09477.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from burnish.rl.sequences import finite_gradient, on_last_action


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Unbiased, high variance, may be negative; for logs and for rewards.

        k1 = x,   ∇k1 = ∇ log π

    As a loss it does nothing: its gradient has mean 0.
    """
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Biased in value, never negative; its gradient is the unbiased one of the KL.

    k2 = ½ x²,   ∇k2 = x ∇ log π
    """
    return 0.5 * finite_gradient(logprobs - reference) ** 2


def k3(logprobs: Tensor, reference: Tensor, *, cap: float = math.inf) -> Tensor:
    """Unbiased in value, low variance, never negative; the customary KL term of GRPO's loss.

        k3 = exp(−x) + x − 1,   ∇k3 = (1 − exp(−x)) ∇ log π

    GRPO, https://arxiv.org/abs/2402.03300, equation 4. Its gradient is that of the reverse
    direction, KL(π_ref ‖ π), not of the KL it estimates: bounded pull where π is above π_ref,
    strong where below.
    ``cap`` bounds the value, as verl does at 10; a token past it loses its gradient, just where the
    policy has strayed furthest, so the default has none.
    """
    x = logprobs - reference
    x = finite_gradient(x, torch.exp(-x))
    return (torch.exp(-x) + x - 1).clamp(max=cap)


def penalised_rewards(
    rewards: Tensor,
    kl: Tensor,
    mask: Tensor,
    *,
    coefficient: float,
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """KL in the reward instead of the loss: per-token rewards for GAE and REINFORCE++.

        r_t = [t is the last action] · r − β · kl_t

    ``rewards`` [S]; ``kl`` shaped like the mask and taken without gradient; 0 outside the mask.
    """
    placed = on_last_action(rewards, mask, sequence_ids)
    return torch.where(mask.bool(), placed - coefficient * kl.detach(), torch.zeros_like(placed))
