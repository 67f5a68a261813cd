"""One rollout: prompts of the task, responses of the generator, grades: groups."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Protocol, runtime_checkable

import numpy as np

from burnish.config import Recipe
from burnish.errors import DataError
from burnish.progress import Report, unheard
from burnish.types import Completion, Finish, Grade, Group, Prompt, SamplingParams, Status, Weights


class Task(Protocol):
    """Where prompts come from and what their responses are worth."""

    def prompt(self, index: int) -> Prompt:
        """The prompt of the run's group number ``index``."""

    def grade(self, prompt: Prompt, completion: Completion) -> Grade: ...


@runtime_checkable
class GradesTogether(Protocol):
    """A task whose grader is faster, or only works well, on many responses at once."""

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        """The grades in the pairs' order."""


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
        report: Report = unheard,
    ) -> list[tuple[Completion, ...]]:
        """``samples`` completions of each prompt; prompt k is the run's group first_group + k.

        ``report`` is told the completions that are done and the tokens that were sampled.
        """

    def load(self, weights: Weights) -> None:
        """Takes over new weights; what is sampled from now on carries their version."""


def sampling(recipe: Recipe) -> SamplingParams:
    """How training samples; the sorting model reads the temperature and the seed alone."""
    rollout = recipe.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=rollout.max_tokens,
        min_tokens=rollout.min_tokens,
        stop=recipe.stop,
        seed=recipe.seed,
    )


def grade(
    task: Task, prompts: Sequence[Prompt], responses: Sequence[tuple[Completion, ...]], first: int
) -> list[Group]:
    """The groups with indices first, first + 1, …"""
    groups = list(zip(prompts, responses, strict=True))
    pairs = [(prompt, c) for prompt, completions in groups for c in completions]
    if isinstance(task, GradesTogether):
        grades = task.grade_all(pairs)
    else:
        grades = [task.grade(*pair) for pair in pairs]
    if len(grades) != len(pairs):
        raise DataError(f"the task gave {len(grades)} grades for {len(pairs)} responses")
    given = iter(grades)
    return [
        Group(first + k, prompt, completions, tuple(islice(given, len(completions))))
        for k, (prompt, completions) in enumerate(groups)
    ]


def describe(groups: Sequence[Group]) -> dict[str, float]:
    """What a rollout's groups look like, before anything is learned from them.

    Rewards are those of grades that are not errors; without any there are no reward metrics.
    """
    grades = [grade for group in groups for grade in group.grades]
    by_group = [
        np.array([g.reward for g in group.grades if g.status is not Status.ERROR])
        for group in groups
    ]
    rewards = np.concatenate(by_group)
    lengths = [len(c.token_ids) for group in groups for c in group.completions]
    ends = [c.finish for group in groups for c in group.completions]
    metrics = {
        "rollout/length": float(np.mean(lengths)),
        "rollout/ended": ends.count(Finish.STOP) / len(ends),
        "rollout/truncated": ends.count(Finish.LENGTH) / len(ends),
        "rollout/responses": float(len(grades)),
    }
    skipped = sum(group.prompt.meta.get("skipped", 0) for group in groups)
    if skipped:
        metrics["rollout/skipped_prompts"] = float(skipped)
    if rewards.size:
        dead = [np.ptp(scored) == 0 for scored in by_group if scored.size]
        metrics |= {
            "rollout/reward": float(rewards.mean()),
            "rollout/reward_std": float(rewards.std()),
            "rollout/reward_min": float(rewards.min()),
            "rollout/reward_max": float(rewards.max()),
            "rollout/dead_groups": float(np.mean(dead)),
        }
    for part in sorted({name for grade in grades for name in grade.parts}):
        values = [grade.parts[part] for grade in grades if part in grade.parts]
        metrics[f"rollout/part_{part}"] = float(np.mean(values))
    for part in sorted({g.prompt.meta["part"] for g in groups if "part" in g.prompt.meta}):
        own = [
            r for g, r in zip(groups, by_group, strict=True) if g.prompt.meta.get("part") == part
        ]
        if any(scored.size for scored in own):
            metrics[f"rollout/reward/{part}"] = float(np.concatenate(own).mean())
    for status in Status:
        count = sum(grade.status == status for grade in grades)
        metrics[f"rollout/grades_{status}"] = count / len(grades)
    return metrics
