"""The validation metric that selects a run's best checkpoint, and ends the run early when it no
longer improves.

Both follow from the rows of metrics.jsonl, so a resumed run continues as if it had never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from burnish.errors import ConfigError, RunError


class Target(NamedTuple):
    """A metric of validations, and how long a run continues without an improvement of it."""

    metric: str
    is_lower_better: bool
    patience: int | None = None
    """Number of consecutive validations without an improvement after which the run ends; None if it
    never ends early."""
    min_delta: float = 0.0
    """An improvement is a change of more than this."""
    is_required: bool = False
    """Whether the recipe sets the metric or the patience, so that a run without this metric is an
    error."""

    def score(self, metrics: Mapping[str, float]) -> float | None:
        """Return the metric's value, or the negative value if lower values are better.

        Return None if the metric is missing, because no response was graded, or is not finite.
        """
        value = metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return None
        return -value if self.is_lower_better else value

    def check(self, metrics: Mapping[str, float]) -> None:
        """Raise an error if the metric is required and missing from ``metrics``, the metrics of the
        first validation: a ``RunError`` if the run can continue with another metric, otherwise a
        ``ConfigError``."""
        if self.metric in metrics or not self.is_required:
            return
        if not metrics:
            raise ConfigError(
                f"the validation metric {self.metric} can't be measured: the run has no held-out "
                "prompts; remove validation.metric and validation.patience, or give the task "
                "held-out prompts"
            )
        known = ", ".join(sorted(name for name in metrics if name.startswith("validation/")))
        raise RunError(
            f"validation.metric = '{self.metric}' is not a metric of this run's validations; "
            f"use one of {known}, as --set validation.metric=NAME of `burnish resume`"
        )

    def stall(self, rows: Iterable[Mapping[str, Any]]) -> Stall | None:
        """Return a record if the last validations brought no improvement and the run should end,
        otherwise None. ``rows`` are all rows of metrics.jsonl; a validation without a score
        counts as one without an improvement."""
        best, best_step, waited = -math.inf, 0, 0
        for row in rows:
            if not any(name.startswith("validation/") for name in row):
                continue
            score = self.score(row)
            if score is not None and score > best + self.min_delta:
                best, best_step, waited = score, row["step"], 0
            else:
                waited += 1
        if self.patience is None or waited < self.patience:
            return None
        return Stall(self.metric, best_step, waited)


class Stall(NamedTuple):
    """Why a run ends early."""

    metric: str
    best_step: int
    """Step with the best validation."""
    validations: int
    """Number of validations since then."""

    def __str__(self) -> str:
        times = "one validation" if self.validations == 1 else f"{self.validations} validations"
        return f"{self.metric} has not improved in {times} since step {self.best_step}"
