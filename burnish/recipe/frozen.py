"""Frozen models beside the policy: their sections, and the recipes that they go with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from burnish.pieces.advantages import Teacher
from burnish.sections import Section

if TYPE_CHECKING:
    from burnish.schema.recipe import Recipe


class TeacherConfig(Section):
    """A model that scores the policy's own samples: ``objective.advantage`` "teacher"."""

    model: str = Field(description="a name, a directory, a run, or hf:ORG/NAME")


class RewardModelConfig(Section):
    """A model that `burnish reward` learned from preferences: the reward of each response."""

    name: str = Field(description="a directory of Hugging Face's layout, or hf:ORG/NAME")
    task: float = Field(0.0, allow_inf_nan=False, description="weight of the task's own reward")


def check(recipe: Recipe) -> None:
    """Raises where a frozen model is missing or can't be used."""
    is_taught = isinstance(recipe.objective.advantage, Teacher)
    if is_taught and recipe.teacher is None:
        raise ValueError("objective.advantage = 'teacher' needs a teacher; set teacher.model")
    if (is_taught or recipe.reward_model) and recipe.model.name == "sorter":
        raise ValueError(
            "the sorting model has no teacher and no reward model; use a language model"
        )
    if not is_taught and recipe.reward_model is None:
        for task in recipe.tasks.values():
            if getattr(task, "reward", None) == "none":
                raise ValueError(
                    "task.reward = 'none' leaves nothing to learn from; set reward_model.name, or "
                    "objective.advantage = 'teacher'"
                )
