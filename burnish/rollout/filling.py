"""Rollouts that are filled: groups without variance leave, and other prompts are asked.

All randomness and every choice hang on the numbers of groups and on the engine's steps, never on
the time that grading takes, so a rollout repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from burnish.draws import Stream
from burnish.engine.protocol import Request, Server
from burnish.errors import DataError
from burnish.progress import Report, unheard
from burnish.rollout.length import shaping
from burnish.rollout.rollout import (
    Answered,
    Asked,
    check_errors,
    complete,
    drop_errors,
    grade,
    requests_of,
    sampling,
)
from burnish.schema.recipe import Recipe
from burnish.tasks.task import Task
from burnish.types import Group


class Filled(NamedTuple):
    sampled: list[Group]
    """All groups that were asked, by their numbers."""
    groups: list[Group]
    """The groups to learn from."""
    dropped: dict[int, str]
    """The numbers of the other groups, each with the reason: error, overlong or dead."""
    figures: dict[str, float]


def with_variance(groups: Sequence[Group]) -> list[Group]:
    """The groups whose rewards are not all equal."""
    return [group for group in groups if np.ptp(group.rewards) > 0]


def fill(recipe: Recipe, sampled: list[Group], ask: Callable[[int], list[Group]]) -> Filled:
    """Drops groups and, if the recipe says so, asks for others until the rollout is full.

    ``ask`` gives so many further groups. A round asks for as many as are missing; DAPO
    (https://arxiv.org/abs/2503.14476) asks for a whole batch each time and drops the surplus.
    """
    chosen, wanted = recipe.selection, recipe.prompts_per_rollout
    while True:
        check_errors(sampled, limit=recipe.rollout.max_errors)
        whole, figures = drop_errors(sampled, recipe.rollout.overlong)
        groups = whole if chosen.dead_groups == "keep" else with_variance(whole)
        left = wanted * chosen.max_asked - len(sampled)
        if not chosen.fills or len(groups) >= wanted or left <= 0:
            break
        sampled = sampled + ask(min(wanted - len(groups), left))
    if chosen.fills and chosen.on_bound == "stop" and len(groups) < wanted:
        raise DataError(
            f"{len(groups)} of {len(sampled)} groups had unequal rewards; a step needs {wanted} "
            f"and selection.max_asked = {chosen.max_asked} allows no more. The prompts are too "
            "easy or too hard for the model: choose others, or resume with a higher "
            "selection.max_asked or with selection.on_bound = 'learn'"
        )
    if groups:
        figures["rollout/asked_per_used"] = len(sampled) / len(groups)
    used, intact = ({group.index for group in own} for own in (groups, whole))
    lost = [group for group in sampled if group.index not in used]
    dropped = {g.index: "dead" if g.index in intact else _loss(g) for g in lost}
    return Filled(sampled, groups, dropped, figures)


def _loss(group: Group) -> str:
    """Why too few samples of a group are left."""
    return "error" if any(grade.is_error for grade in group.grades) else "overlong"


def sample_actively(
    recipe: Recipe,
    engine: Server,
    task: Task,
    asked: Asked,
    take: Callable[[int], Asked],
    report: Report = unheard,
) -> list[Group]:
    """Active sampling (OLMo 3, https://arxiv.org/abs/2512.13961): groups are graded as they are
    completed, and for each dead one another prompt is submitted while the others decode.

    ``take`` gives further prompts. Differs from the paper in that the engine waits for grades, so
    that the step at which a prompt is submitted does not depend on the time they take.
    """
    size, params = recipe.rollout.group_size, sampling(recipe)
    bound = recipe.prompts_per_rollout * recipe.selection.max_asked
    prompts, groups = dict(asked), list[Group]()

    def replace(done: Answered) -> list[Request]:
        own = [(request.group, prompts[request.group]) for request, _ in done]
        found = grade(task, own, [completions for _, completions in done], shaping(recipe))
        groups.extend(found)
        check_errors(groups, limit=recipe.rollout.max_errors, asked=len(prompts) * size)
        whole, _ = drop_errors(found, recipe.rollout.overlong)
        lost = len(found) - len(with_variance(whole))
        further = take(min(lost, bound - len(prompts)))
        prompts.update(further)
        return requests_of(further, size, params, Stream.TRAIN)

    requests = requests_of(asked, size, params, Stream.TRAIN)
    complete(engine, requests, report=report, further=replace)
    return sorted(groups, key=lambda group: group.index)
