"""Estimators of KL(π ‖ π_ref) from tokens that π sampled. Elementwise: any shape.

With x = log π − log π_ref on a sampled token, E[x] is the KL itself. The value of an estimator and
its gradient are two things: used in a loss, what matters is whether the *gradient's* mean is that
of the KL. Schulman 2020, "Approximating KL divergence"; Tang & Munos 2025,
https://arxiv.org/abs/2506.09477.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from burnish.rl.sequences import Rows, on_last_action, sequence_lengths, sequence_sum, sum_by


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
    return 0.5 * (logprobs - reference) ** 2


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
    return (torch.exp(-x) + x - 1).clamp(max=cap)


def full(logits: Tensor, reference: Tensor) -> Tensor:
    """The KL itself, over the whole vocabulary [..., V] -> [...]; nothing is sampled for it.

        KL = Σ_v π(v) (log π(v) − log π_ref(v)),   ∂/∂logit_v = π(v) (log π(v) − log π_ref(v) − KL)

    As a loss, its gradient is what k2's is in the mean over tokens, without that sampling's noise.
    It needs the reference's logits; where a vocabulary is large, ``model/logprobs.py`` computes the
    same in chunks.
    """
    ours, theirs = torch.log_softmax(logits, -1), torch.log_softmax(reference, -1)
    return (ours.exp() * (ours - theirs)).sum(-1)


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


def ahead(
    kl: Tensor, mask: Tensor, group_ids: Tensor, *, sequence_ids: Tensor | None = None
) -> Tensor:
    """The KL of the tokens after each one, above the group's mean per token.

        ahead_t = Σ_(s>t) (kl_s − mean_g(kl))

    A KL in the loss pulls at each token where it stands; but a token also chooses what is said
    after it, at what KL. The gradient of Σ_t KL_t has both parts, and the second is
    Σ_t ∇ log π_t · Σ_(s>t) KL_s: this, taken from the token's advantage. Measured from the group's
    mean it is the gradient of the KL per token, and centred, so that longer is neither better nor
    worse as such. ``kl`` (k1 is unbiased) and the result are shaped like the mask; no gradient.
    """
    kl, rows = kl.detach(), Rows(mask, sequence_ids)
    groups = int(group_ids.max()) + 1
    sums, lengths = sequence_sum(kl, mask, sequence_ids), sequence_lengths(mask, sequence_ids)
    actions = sum_by(lengths.to(kl.dtype), group_ids, groups).clamp(min=1)
    mean = (sum_by(sums, group_ids, groups) / actions)[group_ids]
    inside = torch.arange(rows.width, device=kl.device) < lengths[:, None]
    above = torch.where(inside, rows.pack(kl) - mean[:, None], 0)
    return rows.unpack(above.flip(1).cumsum(1).flip(1) - above)
