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


def check(recipe: Recipe) -> None:
    """Raises where a frozen model is missing or can't be used."""
    if not isinstance(recipe.objective.advantage, Teacher):
        return
    if recipe.teacher is None:
        raise ValueError("objective.advantage = 'teacher' needs a teacher; set teacher.model")
    if recipe.model.name == "sorter":
        raise ValueError("the sorting model has no teacher; use another objective.advantage")
