"""Per-token losses. They are elementwise, without a mask or a mean, and take any shape.

``advantages`` are broadcast against the tokens. ``reduce.py`` provides the weight of each token. A
slot of weight 0 has no gradient, whatever its value.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from burnish.rl.ratios import sequence_ratio
from burnish.rl.sequences import finite_gradient

Divergence = Literal["tv", "kl"]


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """The loss of the plain policy gradient: REINFORCE.

        L_t = −A_t log π(token_t)

    Williams 1992. Only its gradient has a meaning, not its value. Any shape.
    Differs from the paper in nothing.
    """
    return -advantages * finite_gradient(logprobs, advantages)


def unclipped(ratio: Tensor, advantages: Tensor) -> Tensor:
    """The policy gradient's loss with the ratio of policy to proximal policy, which corrects for
    the change of the policy since the batch was scored.

        L_t = −A_t ρ_t

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347, equation 6. Any shape.
    Differs from the paper in nothing.
    """
    return -advantages * finite_gradient(ratio, advantages)


def clipped(
    ratio: Tensor, advantages: Tensor, *, low: float, high: float, dual: float | None = None
) -> Tensor:
    """PPO's clipped loss: no gain from moving a ratio beyond [1 − low, 1 + high] in the direction
    of its advantage.

        L_t = −min(ρ_t A_t, clip(ρ_t, 1 − low, 1 + high) A_t)
        with dual clip c, where A_t < 0:   L_t ← min(L_t, −c A_t)

    Schulman et al. 2017, https://arxiv.org/abs/1707.06347 (PPO), equation 7. low ≠ high is the
    clip-higher of Yu et al. 2025, https://arxiv.org/abs/2503.14476 (DAPO), equation 10. The dual
    clip bounds the loss of a token with a negative advantage whose probability has increased, Ye et
    al. 2020, https://arxiv.org/abs/1912.09729. ``low`` and ``high`` are distances from 1; an
    infinite distance removes the bound on that side. Any shape.
    Differs from the papers in nothing.
    """
    ratio = finite_gradient(ratio, advantages)
    loss = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high))
    if dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)


def is_clipped(ratio: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """Whether the clip of ``clipped`` has removed a token's gradient, as a bool per token. The dual
    clip does not count; see ``is_dual_clipped``."""
    too_high = (advantages > 0) & (ratio > 1 + high)
    too_low = (advantages < 0) & (ratio < 1 - low)
    return too_high | too_low


def is_dual_clipped(ratio: Tensor, advantages: Tensor, *, dual: float) -> Tensor:
    """Whether the dual clip of ``clipped`` has removed a token's gradient."""
    return (advantages < 0) & (ratio > dual)


def cispo(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, *, cap: float, floor: float = 0.0
) -> Tensor:
    """REINFORCE weighted by the clipped ratio, so that every token keeps its gradient.

        L_t = −sg[ min(max(ρ_t, floor), cap) ] A_t log π(token_t)

    MiniMax 2025, https://arxiv.org/abs/2506.13585 (CISPO), equations 4 and 5. The bounds are ratios
    and not distances: ``cap`` is the paper's 1 + ε_high, and ``floor`` is 1 − ε_low. With a floor
    of 0 there is only an upper bound, as in ScaleRL, https://arxiv.org/abs/2510.13786, and TRL. Any
    shape.
    Differs from the paper in nothing.
    """
    weight = -ratio.detach().clamp(floor, cap) * advantages
    return weight * finite_gradient(logprobs, weight)


def sapo(ratio: Tensor, advantages: Tensor, *, positive: float, negative: float) -> Tensor:
    """A loss whose gradient fades smoothly as the ratio moves away from 1, instead of a clip.

        L_t = −A_t (4 / τ) σ(τ (ρ_t − 1)),   τ = τ_positive if A_t > 0, else τ_negative

    Gao et al. 2025, https://arxiv.org/abs/2511.20347 (SAPO). At ratio 1 its gradient is that of
    −A_t ρ_t; it decreases as sech²(τ (ρ_t − 1) / 2). With τ_negative > τ_positive the gate closes
    faster for tokens with negative advantages. The paper reduces by the per-sequence mean. Any
    shape.
    Differs from the paper in nothing.
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
    """A loss with one ratio per response, the geometric mean of its token ratios, whose logarithms
    are clipped.

        x_t = log π − log π_prox,   x̄_t = min(x_t, high) if A_t > 0, max(x_t, −low) if A_t < 0
        L_(i,t) = −A_(i,t) exp( (1/|y_i|) Σ_t x̄_t ),   token t has the gradient of x̄_t

    Zhao et al. 2025, https://arxiv.org/abs/2507.20673 (GMPO), whose range of ratios is (e^−0.4,
    e^0.4). As with ``ratios.sequence_ratio``, value and gradient add up to the paper's under the
    per-sequence mean. The bounds are logarithms, as in TRL and verl. All tensors have the shape of
    the mask.
    Differs from the paper in nothing under the per-sequence mean; under other reductions, long
    responses weigh more. If advantages differ within a response, each token has its own; verl uses
    their mean.
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
    """The loss of the policy gradient, without tokens whose probability has moved too far in the
    direction of their advantage.

        L_t = −M_t sg[min(ρ_t, cap)] A_t log π(token_t) + β x_t²,   x_t = log ρ_t
        M_t = 0 if A_t > 0 and D_t > high, or A_t < 0 and D_t < −low, else 1

    D_t is ``signed_divergence``. Qi et al. 2026, https://arxiv.org/abs/2602.04879 (DPPO, binary
    approximations). The squared log-ratio, twice ``kl.k2``, pulls the policy back to the proximal
    policy, also for masked tokens, as in prime-rl (with a coefficient of 1e-3). The paper's π_prox
    is the sampler: set proximal = "behavior". The paper's bounds are 0.15 for tv and 0.05 for kl;
    prime-rl has 0.2 for tv and no cap. Any shape.
    Differs from the paper in writing ρ as sg[ρ] log π, which has the same gradient, and in the cap
    of 20, both as in verl and TRL.
    """
    x = logprobs - proximal
    moved = signed_divergence(logprobs, proximal, divergence=divergence)
    kept = ~is_beyond(moved, advantages, low=low, high=high)
    weight = -x.detach().exp().clamp(max=cap) * advantages * kept
    return weight * finite_gradient(logprobs, weight) + kl * finite_gradient(x) ** 2


def signed_divergence(logprobs: Tensor, proximal: Tensor, *, divergence: Divergence) -> Tensor:
    """The signed divergence of policy and proximal policy on a sampled token, positive if its
    probability has increased; all other tokens count as one.

        tv:  D = π − μ,   μ = π_prox
        kl:  D = sign(π − μ) ( μ log(μ / π) + (1 − μ) log((1 − μ) / (1 − π)) )

    Qi et al. 2026, https://arxiv.org/abs/2602.04879 (DPPO). The result has no gradient. Any shape.
    Differs from the paper in bounding 1 − π and 1 − μ below by 1e-7 (verl adds 1e-8 to both).
    """
    logprobs, proximal = logprobs.detach(), proximal.detach()
    p, q = logprobs.exp(), proximal.exp()
    if divergence == "tv":
        return p - q
    rest_p, rest_q = (torch.log1p(-x.clamp(max=1 - 1e-7)) for x in (p, q))
    return torch.sign(p - q) * (q * (proximal - logprobs) + (1 - q) * (rest_q - rest_p))


def is_beyond(distance: Tensor, advantages: Tensor, *, low: float, high: float) -> Tensor:
    """Whether a signed distance is beyond its bound in the direction of the advantage: above
    ``high`` if the advantage is positive, below −``low`` if it is negative."""
    return ((advantages > 0) & (distance > high)) | ((advantages < 0) & (distance < -low))


def value_loss(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """The critic's loss: half the squared error of its value or of the clipped value, whichever is
    larger.

        L_t = ½ max( (V_t − R_t)², (clip(V_t, V_old − c, V_old + c) − R_t)² )

    The value clip of PPO's implementations (Huang et al. 2022, "The 37 implementation details of
    PPO", detail 9). An infinite ``clip`` gives half the squared error. Any shape.
    Differs from the usual implementations in nothing.
    """
    values = finite_gradient(values, old_values, returns)
    bounded = torch.minimum(torch.maximum(values, old_values - clip), old_values + clip)
    return 0.5 * torch.maximum((values - returns) ** 2, (bounded - returns) ** 2)


def adapted_coefficient(
    coefficient: float, entropy: float, *, target: float, delta: float, low: float, high: float
) -> float:
    """The entropy coefficient after a gradient step: it rises while the entropy is at or below its
    target, and falls while it is above.

        c ← min(c + Δ, high) if H ≤ target, else max(c − Δ, low)
        L_t ← L_t − η H_t,   η = c if the entropy of the step before was ≤ target, else 0

    He et al. 2025, https://arxiv.org/abs/2505.22312 (Skywork-OR1, adaptive entropy control).
    ``entropy`` is the mean over the actions of a train batch. Numbers, not tensors.
    Differs from the paper in η, which depends on the entropy of the step before instead of the
    current one, because the loss is computed pack by pack; and in the bounds [low, high]. TRL has
    both.
    """
    if entropy <= target:
        return min(coefficient + delta, high)
    return max(coefficient - delta, low)


def entropy(logits: Tensor) -> Tensor:
    """The entropy of the next-token distribution in nats.

        H = −Σ_v p_v log p_v

    Mnih et al. 2016, https://arxiv.org/abs/1602.01783 (A3C), as a bonus. [..., V] -> [...]. A token
    of probability 0 (a logit of −inf) contributes 0.
    Differs from the paper in nothing.
    """
    logits = finite_gradient(logits, logits.amax(dim=-1, keepdim=True))
    logprobs = torch.log_softmax(logits, dim=-1)
    terms = logprobs.exp() * torch.where(logprobs.isinf(), torch.zeros_like(logprobs), logprobs)
    return -terms.sum(dim=-1)
