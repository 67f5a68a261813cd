"""The entropy coefficient of a loss while it adapts towards a target."""

from __future__ import annotations

from typing import Any

from burnish.learner.protocol import Metrics
from burnish.recipe.objective.entropy import EntropyTarget


class EntropyControl:
    """The state of an adaptive entropy coefficient (`burnish.rl.losses.adapted_coefficient`). All
    ranks of a mesh compute it from the same metrics."""

    def __init__(self, target: EntropyTarget, first: float) -> None:
        """``first`` is the coefficient that the first gradient step applies."""
        self.target, self.coefficient, self.is_low = target, first, True

    @property
    def applied(self) -> float:
        """The weight of the entropy in the next gradient step: 0 if the entropy was above its
        target in the last one."""
        return self.coefficient if self.is_low else 0.0

    def update(self, metrics: Metrics) -> None:
        """Adapt the coefficient to the metrics of a gradient step that changed the policy."""
        entropy = metrics["train/entropy"]
        self.coefficient = self.target.adapted(self.coefficient, entropy)
        self.is_low = entropy <= self.target.target

    def state(self) -> dict[str, Any]:
        return {"entropy_coefficient": self.coefficient, "entropy_is_low": self.is_low}

    def load_state(self, numbers: dict[str, Any]) -> None:
        self.coefficient, self.is_low = numbers["entropy_coefficient"], numbers["entropy_is_low"]
