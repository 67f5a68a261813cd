"""Rollouts that are filled: groups that teach nothing leave, and other prompts are asked.

All randomness and every choice hang on the numbers of groups and on the engine's steps, never on
the time that grading takes, so a rollout repeats bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
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
from burnish.strategy import FreeLoop
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


def is_lost(group: Group, recipe: Recipe, is_dead: Judge) -> bool:
    """Whether another prompt is asked in the place of a graded group: it is dead, or too few of its
    samples are left."""
    whole, _ = drop_errors([group], recipe.rollout.overlong)
    return not whole or is_dead(whole[0])


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


def taking(spare: Asked) -> Callable[[int], Asked]:
    """A function that gives so many of these prompts, in their order, or as many as are left."""
    left = iter(spare)
    return lambda count: list(islice(left, count))


class Replacing:
    """Active sampling (OLMo 3, https://arxiv.org/abs/2512.13961) of a rollout, or of a generator's
    share of it: for each group that is found dead while others decode, another prompt is asked."""

    def __init__(self, recipe: Recipe, asked: Asked, take: Callable[[int], Asked]) -> None:
        """``take`` gives so many further prompts, or fewer if there are no more."""
        self._recipe, self._take, self._is_dead = recipe, take, judge_of(recipe)
        self._bound = recipe.prompts_per_rollout * recipe.selection.max_asked
        self.prompts = dict(asked)
        """All that were asked, by the numbers of their groups."""
        self.groups: list[Group] = []

    def replace(self, graded: Sequence[Group]) -> Asked:
        """The prompts that are asked in the place of dead ones among the groups graded now."""
        recipe = self._recipe
        self.groups += graded
        responses = len(self.prompts) * recipe.rollout.group_size
        check_errors(self.groups, limit=recipe.rollout.max_errors, asked=responses)
        lost = sum(is_lost(group, recipe, self._is_dead) for group in graded)
        further = self._take(min(lost, self._bound - len(self.prompts)))
        self.prompts.update(further)
        return further

    @property
    def is_done(self) -> bool:
        return len(self.groups) == len(self.prompts)


def replacer_of(recipe: Recipe) -> Callable[[Asked, Asked], Replacing] | None:
    """A function that begins to replace the dead groups of prompts by spare ones; None if the
    recipe does not replace them at once, or has no rollouts of whole batches."""
    if recipe.selection.dead_groups != "active" or isinstance(recipe.loop, FreeLoop):
        return None
    return lambda asked, spare: Replacing(recipe, asked, taking(spare))


def sample_actively(
    recipe: Recipe,
    engine: Server,
    task: Task,
    asked: Asked,
    take: Callable[[int], Asked],
    report: Report = unheard,
) -> list[Group]:
    """The groups of a rollout whose dead groups are replaced at once: groups are graded as they are
    completed, and for each dead one another prompt is submitted while the others decode.

    ``take`` gives further prompts. Differs from the paper in that the engine waits for grades, so
    that the step at which a prompt is submitted does not depend on the time they take.
    """
    size, params = recipe.rollout.group_size, sampling(recipe)
    own = Replacing(recipe, asked, take)

    def replace(done: Answered) -> list[Request]:
        prompts = [(request.group, own.prompts[request.group]) for request, _ in done]
        found = grade(task, prompts, [completions for _, completions in done], shaping(recipe))
        return requests_of(own.replace(found), size, params, Stream.TRAIN)

    requests = requests_of(asked, size, params, Stream.TRAIN)
    complete(engine, requests, report=report, further=replace)
    return sorted(own.groups, key=lambda group: group.index)
