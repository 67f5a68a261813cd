"""One rollout: prompts of the task, responses of the generator, grades: groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from burnish.types import Completion, Grade, Group, Prompt, SamplingParams, Status, Weights


class Task(Protocol):
    """Where prompts come from and what their responses are worth."""

    def prompt(self, index: int) -> Prompt:
        """The prompt of the run's group number ``index``."""

    def grade(self, prompt: Prompt, completion: Completion) -> Grade: ...


class Generator(Protocol):
    """What samples responses: the sorting model, an engine, an actor."""

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        first_group: int,
        samples: int,
        params: SamplingParams,
        stream: int,
    ) -> list[tuple[Completion, ...]]:
        """``samples`` completions of each prompt; prompt k is the run's group first_group + k."""

    def load(self, weights: Weights) -> None:
        """Takes over new weights; what is sampled from now on carries their version."""


def grade(
    task: Task, prompts: Sequence[Prompt], responses: Sequence[tuple[Completion, ...]], first: int
) -> list[Group]:
    """The groups with indices first, first + 1, …"""
    return [
        Group(first + k, prompt, completions, tuple(task.grade(prompt, c) for c in completions))
        for k, (prompt, completions) in enumerate(zip(prompts, responses, strict=True))
    ]


def describe(groups: Sequence[Group]) -> dict[str, float]:
    """What a rollout's groups look like, before anything is learned from them."""
    rewards = np.concatenate([group.rewards for group in groups]).astype(np.float64)
    grades = [grade for group in groups for grade in group.grades]
    lengths = [len(c.token_ids) for group in groups for c in group.completions]
    metrics = {
        "rollout/reward": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std()),
        "rollout/reward_min": float(rewards.min()),
        "rollout/reward_max": float(rewards.max()),
        "rollout/dead_groups": float(np.mean([np.ptp(group.rewards) == 0 for group in groups])),
        "rollout/length": float(np.mean(lengths)),
        "rollout/responses": float(len(rewards)),
    }
    for part in sorted({name for grade in grades for name in grade.parts}):
        values = [grade.parts[part] for grade in grades if part in grade.parts]
        metrics[f"rollout/part_{part}"] = float(np.mean(values))
    for status in Status:
        count = sum(grade.status == status for grade in grades)
        metrics[f"rollout/grades_{status}"] = count / len(grades)
    return metrics
