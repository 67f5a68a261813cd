"""Settings of a rollout: how it is sampled, graded and filtered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from burnish.recipe.length import Overlong
from burnish.recipe.selection import SelectionConfig
from burnish.types import Group, SamplingParams


@dataclass(frozen=True)
class RolloutSettings:
    """The settings of a recipe that sampling, grading and filtering a rollout need."""

    prompts: int
    """Prompts per rollout, each with one group of responses."""
    group_size: int
    """Responses per prompt."""
    params: SamplingParams
    overlong: Overlong
    """Treatment of responses that were truncated at the length limit."""
    max_errors: float
    """Largest share of responses without a grade; the run stops if it is exceeded."""
    selection: SelectionConfig
    """How dead groups are replaced."""
    is_dead: Callable[[Group], bool]
    """Returns whether a group is dead: nothing can be learned from it."""
    penalize: Callable[[Group], Group]
    """Returns a graded group with the length penalty added to its rewards."""

    @property
    def responses(self) -> int:
        """Responses per rollout."""
        return self.prompts * self.group_size
