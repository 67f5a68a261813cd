"""Per-token objectives, as losses to be minimised. Elementwise: any shape, no mask, no mean.

``advantages`` broadcast against the tokens. The denominator is a weight that ``reduce.py`` makes.
A slot of weight 0 has no gradient, whatever it holds.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.rl.ratios import sequence_ratio
from burnish.rl.sequences import finite_gradient

Divergence = Literal["tv", "kl"]


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
    Differs from the papers in nothing.
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
    Differs from the paper in nothing.
    """
    weight = -ratio.detach().clamp(floor, cap) * advantages
    return weight * finite_gradient(logprobs, weight)


def sapo(ratio: Tensor, advantages: Tensor, *, positive: float, negative: float) -> Tensor:
    """A gate that closes softly on both sides of ratio 1 takes the place of the clip.

        L_t = −A_t (4 / τ) σ(τ (ρ_t − 1)),   τ = τ_positive if A_t > 0, else τ_negative

    Gao et al. 2025, https://arxiv.org/abs/2511.20347 (SAPO). Its gradient is that of −A_t ρ_t
    at ratio 1, and falls off by sech²(τ (ρ_t − 1) / 2); τ_negative > τ_positive closes faster on
    bad tokens. Any shape.
    Differs from the paper in nothing (it reduces by the per-sequence mean).
    """
    tau = torch.full_like(ratio, negative).masked_fill(advantages > 0, positive)
    ratio = finite_gradient(ratio, advantages)
    return -advantages * 4 / tau * torch.sigmoid(tau * (ratio - 1))


def gmpo(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    low: float,
    high: float,
    sequence_ids: Tensor | None = None,
) -> Tensor:
    """The geometric mean of a response's token ratios, each of them clipped in its logarithm.

        x_t = log π − log π_prox,   x̄_t = min(x_t, high) if A_t > 0, max(x_t, −low) if A_t < 0
        L_(i,t) = −A_(i,t) exp( (1/|y_i|) Σ_t x̄_t ),   the gradient of x̄_t on token t

    Zhao et al. 2025, https://arxiv.org/abs/2507.20673 (GMPO), whose range of ratios is (e^−0.4,
    e^0.4). As in ``ratios.sequence_ratio``, under a per-sequence mean value and gradient add up to
    the paper's. Shaped like the mask.
    Differs from the paper in nothing under the per-sequence mean; under another reduction a
    response counts by its length. Bounds are logarithms, as in TRL and verl. Where advantages
    differ within a response, each token has its own; verl takes their mean.
    """
    x = logprobs - proximal
    x = torch.where(advantages > 0, x.clamp(max=high), x.clamp(min=-low))
    nothing = torch.zeros_like(x)
    return -advantages * sequence_ratio(x, nothing, mask, sequence_ids=sequence_ids)


def dppo(
    logprobs: Tensor,
    proximal: Tensor,
    advantages: Tensor,
    *,
    low: float,
    high: float,
    divergence: Divergence = "tv",
    cap: float = 20.0,
    kl: float = 0.0,
) -> Tensor:
    """The policy gradient, without tokens whose distribution has moved too far their way.

        L_t = −M_t sg[min(ρ_t, cap)] A_t log π(token_t) + β x_t²,   x_t = log ρ_t
        M_t = 0 if A_t > 0 and D_t > high, or A_t < 0 and D_t < −low, else 1

    D_t is ``signed_divergence``. Qi et al. 2026, https://arxiv.org/abs/2602.04879 (DPPO, binary
    approximations); the squared log-ratio pulls the policy back to the proximal policy, on masked
    tokens too, as in prime-rl (its coefficient there is 1e-3; it is twice ``kl.k2``). Any shape.
    Differs from the paper in writing ρ as sg[ρ] log π, which has the same gradient, and in the
    cap of 20, both as in verl and TRL. The paper's π_prox is the sampler: proximal = "behavior".
    Its bounds are 0.15 for tv and 0.05 for kl; prime-rl has 0.2 for tv, and no cap.
    """
    x = logprobs - proximal
    moved = signed_divergence(logprobs, proximal, divergence=divergence)
    kept = ~is_beyond(moved, advantages, low=low, high=high)
    weight = -x.detach().exp().clamp(max=cap) * advantages * kept
    return weight * finite_gradient(logprobs, weight) + kl * finite_gradient(x) ** 2


def signed_divergence(logprobs: Tensor, proximal: Tensor, *, divergence: Divergence) -> Tensor:
    """How far the policy has moved on a token, as if its vocabulary were this token and the rest.

        tv:  D = π − μ,   μ = π_prox
        kl:  D = sign(π − μ) ( μ log(μ / π) + (1 − μ) log((1 − μ) / (1 − π)) )

    Carries no gradient. Any shape. 1 − π and 1 − μ are at least 1e-7 (verl adds 1e-8 to both).
    """
    logprobs, proximal = logprobs.detach(), proximal.detach()
    p, q = logprobs.exp(), proximal.exp()
    if divergence == "tv":
        return p - q
    rest_p, rest_q = (torch.log1p(-x.clamp(max=1 - 1e-7)) for x in (p, q))
    return torch.sign(p - q) * (q * (proximal - logprobs) + (1 - q) * (rest_q - rest_p))


def is_beyond(distance: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """Bool: the policy has moved past a bound in the direction of the advantage."""
    return ((advantages > 0) & (distance > high)) | ((advantages < 0) & (distance < -low))


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
