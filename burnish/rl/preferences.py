"""Losses for reward models that learn from preferences."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import softplus


def bradley_terry(chosen: Tensor, rejected: Tensor) -> Tensor:
    """The negative log-likelihood that the chosen response of a pair is preferred.

        L = −log σ(r_chosen − r_rejected),   ∂L/∂r_chosen = −σ(r_rejected − r_chosen)

    Bradley & Terry 1952; for rewards of responses Ouyang et al. 2022,
    https://arxiv.org/abs/2203.02155, equation 1. Both [P], one reward per pair -> [P].
    Differs from the paper in the data: a prompt has one pair instead of all pairs of K responses.
    """
    return softplus(rejected - chosen)
