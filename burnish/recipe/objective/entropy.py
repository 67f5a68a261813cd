"""A target for the policy's entropy, towards which the coefficient of the entropy term adapts."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from burnish.recipe.base import Section
from burnish.recipe.objective.piece import arxiv


class EntropyTarget(Section):
    """Adapts the coefficient of the entropy term after each gradient step.

    ``objective.entropy_coefficient`` is the first coefficient.
    """

    ordered: ClassVar[tuple[str, str] | None] = ("low", "high")
    paper: ClassVar[str] = f"Skywork-OR1, {arxiv('2505.22312')}"
    target: float = Field(
        gt=0, allow_inf_nan=False, description="mean entropy per action to keep, in nats"
    )
    delta: float = Field(
        0.005, gt=0, allow_inf_nan=False, description="change of the coefficient per gradient step"
    )
    low: float = Field(0.0, ge=0, allow_inf_nan=False, description="the smallest coefficient")
    high: float = Field(1.0, gt=0, allow_inf_nan=False, description="the largest coefficient")

    def formula(self) -> str:
        return f"η = c if H ≤ {self.target:g}, else 0,  H = mean H_t of the gradient step before"

    def change(self) -> str:
        """Return the rule of the coefficient c as a formula."""
        return (
            f"c ← c + {self.delta:g} if H ≤ {self.target:g}, else c − {self.delta:g},  "
            f"from {self.low:g} to {self.high:g}"
        )

    def adapted(self, coefficient: float, entropy: float) -> float:
        """Return the coefficient after a gradient step with this mean entropy."""
        from burnish.rl.losses import adapted_coefficient

        return adapted_coefficient(coefficient, entropy, **dict(self))
