"""Rollouts that are filled: groups that teach nothing leave, and other prompts are asked.

All randomness and every choice hang on the numbers of groups and on the engine's steps, never on
the time that grading takes, so a rollout repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from burnish.draws import Stream
from burnish.engine.protocol import Request, Server
from burnish.errors import DataError
from burnish.progress import Report, unheard
from burnish.rollout.length import shaping
from burnish.rollout.packing import pack
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


Judge = Callable[[Group], bool]
"""Whether a group is dead: nothing can be learned from it."""


def judge_of(recipe: Recipe) -> Judge:
    """The judge of ``selection.dead_by``.

    advantage: all advantages of the group are 0 by the recipe's own estimator. correct: none or all
    of its responses are correct by the task's grade, whatever a length penalty made of the reward.
    """
    if recipe.selection.dead_by == "correct":
        return _is_uniform
    if not recipe.objective.judges_groups:
        return lambda group: False
    advantage = recipe.objective.advantage
    return lambda group: advantage.is_dead(pack([group], advantage.graded))


def _is_uniform(group: Group) -> bool:
    if all(grade.correct is None for grade in group.grades):
        raise DataError(
            "selection.dead_by = 'correct' needs grades that say whether a response is correct, "
            f"and those of {group.prompt.prompt_id} don't; return 'correct' from the reward, or "
            "use selection.dead_by = 'advantage'"
        )
    return bool(group.correct.all()) or not group.correct.any()


def fill(recipe: Recipe, sampled: list[Group], ask: Callable[[int], list[Group]]) -> Filled:
    """Drops groups and, if the recipe says so, asks for others until the rollout is full.

    ``ask`` gives so many further groups. A round asks for as many as are missing; DAPO
    (https://arxiv.org/abs/2503.14476) asks for a whole batch each time and drops the surplus.
    """
    chosen, wanted, is_dead = recipe.selection, recipe.prompts_per_rollout, judge_of(recipe)
    dead: dict[int, bool] = {}
    while True:
        check_errors(sampled, limit=recipe.rollout.max_errors)
        whole, figures = drop_errors(sampled, recipe.rollout.overlong)
        dead |= {group.index: is_dead(group) for group in whole if group.index not in dead}
        alive = [group for group in whole if not dead[group.index]]
        groups = whole if chosen.dead_groups == "keep" else alive
        left = wanted * chosen.max_asked - len(sampled)
        if not chosen.fills or len(groups) >= wanted or left <= 0:
            break
        sampled = sampled + ask(min(wanted - len(groups), left))
    if chosen.fills and chosen.on_bound == "stop" and len(groups) < wanted:
        raise DataError(
            f"{len(groups)} of {len(sampled)} groups teach something; a step needs {wanted} "
            f"and selection.max_asked = {chosen.max_asked} allows no more. The prompts are too "
            "easy or too hard for the model: choose others, or resume with a higher "
            "selection.max_asked or with selection.on_bound = 'learn'"
        )
    if whole:
        figures["rollout/dead_groups"] = 1 - len(alive) / len(whole)
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
    size, params, is_dead = recipe.rollout.group_size, sampling(recipe), judge_of(recipe)
    bound = recipe.prompts_per_rollout * recipe.selection.max_asked
    prompts, groups = dict(asked), list[Group]()

    def replace(done: Answered) -> list[Request]:
        own = [(request.group, prompts[request.group]) for request, _ in done]
        found = grade(task, own, [completions for _, completions in done], shaping(recipe))
        groups.extend(found)
        check_errors(groups, limit=recipe.rollout.max_errors, asked=len(prompts) * size)
        whole, _ = drop_errors(found, recipe.rollout.overlong)
        lost = len(found) - sum(not is_dead(group) for group in whole)
        further = take(min(lost, bound - len(prompts)))
        prompts.update(further)
        return requests_of(further, size, params, Stream.TRAIN)

    requests = requests_of(asked, size, params, Stream.TRAIN)
    complete(engine, requests, report=report, further=replace)
    return sorted(groups, key=lambda group: group.index)
