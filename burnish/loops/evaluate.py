"""Validation: held-out prompts, sampling of their own, and draws that every evaluation shares."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from burnish.config import Recipe
from burnish.draws import Stream
from burnish.loops.sync import sampling
from burnish.rollout.rollout import Generator, Task, describe, grade
from burnish.runs.metrics import Row
from burnish.types import Group, Prompt


class Validated(Task, Protocol):
    """A task that holds prompts out."""

    @property
    def validation(self) -> list[Prompt]: ...

    def close(self) -> None:
        """Ends what the task started."""


def evaluate(recipe: Recipe, task: Validated, generator: Generator) -> tuple[list[Group], Row]:
    """The graded responses to the validation prompts, and their figures as ``validation/…``.

    Empty where the task holds nothing out.
    """
    prompts = task.validation
    if not prompts:
        return [], {}
    config = recipe.validation
    params = replace(
        sampling(recipe),
        temperature=config.temperature,
        top_p=1.0,
        top_k=None,
        max_tokens=config.max_tokens or recipe.rollout.max_tokens,
    )
    responses = generator.generate(
        prompts, first_group=0, samples=config.samples, params=params, stream=Stream.EVALUATION
    )
    groups = grade(task, prompts, responses, 0)
    left_out = ("reward_std", "reward_min", "reward_max", "dead_groups")
    figures = {key.removeprefix("rollout/"): value for key, value in describe(groups).items()}
    kept = {f"validation/{k}": v for k, v in figures.items() if k not in left_out}
    return groups, kept
