"""How good a critic's values are."""

from __future__ import annotations

from torch import Tensor


def explained_variance(values: Tensor, returns: Tensor) -> Tensor | None:
    """The share of the variance of returns that the values explain; None if returns are all equal.

        EV = 1 − Var(R − V) / Var(R)

    1 is a perfect critic, 0 is as good as a constant, and below 0 is worse than a constant. As in
    PPO's implementations (Huang et al. 2022, "The 37 implementation details of PPO"). [M] and [M],
    of actions alone -> a scalar.
    Differs from the usual implementations in nothing; if λ < 1, the returns hold values themselves,
    which flatters the critic.
    """
    spread = returns.var(correction=0)
    return 1 - (returns - values).var(correction=0) / spread if spread > 0 else None


def is_value_clipped(values: Tensor, old_values: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """Bool: the value clip took this token's gradient away (see ``losses.value_loss``)."""
    bounded = values.clamp(old_values - clip, old_values + clip)
    return (bounded - returns).abs() > (values - returns).abs()
