"""The sections of frozen models beside the policy: a teacher and a reward model."""

from __future__ import annotations

from pydantic import Field

from burnish.recipe.base import Section


class TeacherConfig(Section):
    """A model that scores the policy's samples, for ``objective.advantage`` = "teacher"."""

    model: str = Field(description="a name, a directory, a run, or hf:ORG/NAME")


class RewardModelConfig(Section):
    """A model trained on preferences by `burnish reward`, which gives each response its reward."""

    name: str = Field(description="a directory in Hugging Face's layout, or hf:ORG/NAME")
    task: float = Field(
        0.0, allow_inf_nan=False, description="weight of the task's reward in the sum"
    )
