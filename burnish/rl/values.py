"""Metrics of a critic's values."""

from __future__ import annotations

from torch import Tensor


def explained_variance(values: Tensor, returns: Tensor) -> Tensor | None:
    """The share of the variance of returns that the values explain; None if all returns are equal.

        EV = 1 − Var(R − V) / Var(R)

    A perfect critic has 1, a constant has 0, and a negative number is worse than a constant. As in
    PPO's implementations (Huang et al. 2022, "The 37 implementation details of PPO"). Both [M], of
    actions -> a scalar. If λ < 1, the returns contain values, which makes the result too high.
    Differs from the usual implementations in nothing.
    """
    spread = returns.var(correction=0)
    return 1 - (returns - values).var(correction=0) / spread if spread > 0 else None


def is_value_clipped(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Whether the clipped value determines a token's loss in ``losses.value_loss``, so that the
    critic has no gradient there."""
    bounded = values.clamp(old_values - clip, old_values + clip)
    return (bounded - returns).abs() > (values - returns).abs()
