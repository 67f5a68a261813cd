"""Estimators of KL(π ‖ π_ref) from tokens that π sampled. They are elementwise and take the
log-probabilities of these tokens under π and π_ref, in any shape.

With x = log π − log π_ref of a sampled token, E[x] is the KL. The value and the gradient of an
estimator have separate uses: in a loss, the expected *gradient* must be the gradient of the KL.
Schulman 2020, "Approximating KL divergence"; Tang & Munos 2025, https://arxiv.org/abs/2506.09477.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from burnish.rl.sequences import finite_gradient


def k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """The log-ratio: unbiased, with high variance, possibly negative; for metrics and rewards.

        k1 = x,   ∇k1 = ∇ log π

    Schulman 2020. As a loss it has no effect, because its gradient has mean 0. Any shape.
    Differs from the text in nothing.
    """
    return logprobs - reference


def k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Half the squared log-ratio: biased and never negative, with an unbiased gradient of the KL.

        k2 = ½ x²,   ∇k2 = x ∇ log π

    Schulman 2020; for the gradient Tang & Munos 2025. Any shape.
    Differs from the texts in nothing.
    """
    return 0.5 * finite_gradient(logprobs - reference) ** 2


def k3(logprobs: Tensor, reference: Tensor, *, cap: float = math.inf) -> Tensor:
    """The usual KL term of GRPO's loss: unbiased, with low variance, never negative.

        k3 = exp(−x) + x − 1,   ∇k3 = (1 − exp(−x)) ∇ log π

    GRPO, https://arxiv.org/abs/2402.03300, equation 4. Its gradient is that of the reverse KL,
    KL(π_ref ‖ π), and not of the KL that it estimates: the pull is bounded where π is above π_ref,
    and strong where π is below. ``cap`` bounds the value. verl has a cap of 10; there is none by
    default, because a token beyond it has no gradient although the policy has moved furthest there.
    Any shape.
    Differs from the paper in nothing.
    """
    x = logprobs - reference
    x = finite_gradient(x, torch.exp(-x))
    return (torch.exp(-x) + x - 1).clamp(max=cap)


def penalised_rewards(rewards: Tensor, kl: Tensor, mask: Tensor, *, coefficient: float) -> Tensor:
    """Per-token rewards minus a KL penalty on every action, for estimators over time.

        r_t ← r_t − β · kl_t

    Ouyang et al. 2022, https://arxiv.org/abs/2203.02155, equation 2, where the reward of a response
    is on its last action (``sequences.on_last_action``). ``kl`` has the shape of the mask and is
    detached. Takes and returns the shape of the mask; slots outside it do not change.
    Differs from the paper in allowing rewards on other actions and other estimators of the KL than
    k1.
    """
    return torch.where(mask.bool(), rewards - coefficient * kl.detach(), rewards)
