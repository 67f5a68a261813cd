"""Dead groups, from which nothing can be learned, are dropped or replaced by groups of other
prompts.

All random draws and decisions depend on group numbers and engine steps, never on the time that
grading takes, so that a rollout is reproducible bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import NamedTuple

from burnish.console.progress import Report, unheard
from burnish.engine.protocol import Request, Sampler
from burnish.errors import DataError, RunError
from burnish.randomness import Stream
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.rollout.packing import pack
from burnish.rollout.rollout import (
    Answered,
    NumberedPrompts,
    check_errors,
    complete,
    drop_errors,
    grade,
    requests_of,
)
from burnish.rollout.settings import RolloutSettings
from burnish.tasks.task import Task
from burnish.types import Group


class Filled(NamedTuple):
    """A rollout after dead groups were dropped or replaced."""

    sampled: list[Group]
    """All groups of the rollout, including those that were dropped."""
    groups: list[Group]
    """The groups to learn from."""
    dropped: dict[int, str]
    """The reason why each other group was dropped, by group number: error, overlong or dead."""
    figures: dict[str, float]
    """Metrics of the dropped samples and groups."""


def find_judge(dead_by: str, objective: ObjectiveConfig) -> Callable[[Group], bool]:
    """Return the function that decides whether a group is dead, by ``selection.dead_by``.

    "advantage": a group is dead if the objective's estimator gives all of its responses an
    advantage of 0; no group is dead if advantages depend on more than the group. "correct": a group
    is dead if none or all of its responses are correct, independent of length penalties.
    """
    if dead_by == "correct":
        return _is_uniform
    if not objective.judges_groups:
        return lambda group: False
    advantage = objective.advantage
    return lambda group: advantage.is_dead(pack([group], advantage.graded))


def _is_uniform(group: Group) -> bool:
    if all(grade.correct is None for grade in group.grades):
        raise DataError(
            "selection.dead_by = 'correct' needs grades that say whether a response is correct, "
            f"and those of {group.prompt.prompt_id} don't; return 'correct' from the reward, or "
            "use selection.dead_by = 'advantage'"
        )
    return bool(group.correct.all()) or not group.correct.any()


def is_lost(group: Group, settings: RolloutSettings) -> bool:
    """Return whether a graded group has to be replaced by another prompt: because it is dead, or
    because too few of its samples are left after `drop_errors`."""
    whole, _ = drop_errors([group], settings.overlong)
    return not whole or settings.is_dead(whole[0])


def fill(
    settings: RolloutSettings, sampled: list[Group], ask: Callable[[int], list[Group]]
) -> Filled:
    """Drop samples with errors from the graded groups ``sampled`` and, unless the selection keeps
    them, dead groups. If the selection fills rollouts, call ``ask``, which samples and grades the
    given number of further groups, until the rollout has ``settings.prompts`` groups, or until
    ``selection.max_asked`` times as many were sampled. Return the groups to learn from, with
    metrics.

    A round samples as many groups as are missing; DAPO (https://arxiv.org/abs/2503.14476) samples a
    whole batch each time and drops the surplus. Raises a RunError if the rollout is not full and
    ``on_bound`` is "stop", and a GraderError if too many grades are errors.
    """
    chosen, wanted = settings.selection, settings.prompts
    dead: dict[int, bool] = {}
    while True:
        check_errors(sampled, limit=settings.max_errors)
        whole, figures = drop_errors(sampled, settings.overlong)
        dead |= {group.index: settings.is_dead(group) for group in whole if group.index not in dead}
        alive = [group for group in whole if not dead[group.index]]
        groups = whole if chosen.dead_groups == "keep" else alive
        left = wanted * chosen.max_asked - len(sampled)
        if not chosen.fills or len(groups) >= wanted or left <= 0:
            break
        sampled = sampled + ask(min(wanted - len(groups), left))
    if chosen.fills and chosen.on_bound == "stop" and len(groups) < wanted:
        raise RunError(
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
    """Return why too few samples of a group are left: "error" or "overlong"."""
    return "error" if any(grade.is_error for grade in group.grades) else "overlong"


def taking(spare: NumberedPrompts) -> Callable[[int], NumberedPrompts]:
    """Return a function that returns the next prompts of ``spare`` at each call: as many as its
    argument says, or fewer if fewer are left."""
    left = iter(spare)
    return lambda count: list(islice(left, count))


class Replacing:
    """Keeps track of active sampling (OLMo 3, https://arxiv.org/abs/2512.13961), in which each dead
    group is replaced by another prompt while other groups are still being sampled: it collects the
    graded groups of a rollout, or of a generator's share of it, and chooses the replacements."""

    def __init__(
        self,
        settings: RolloutSettings,
        numbered: NumberedPrompts,
        take: Callable[[int], NumberedPrompts],
    ) -> None:
        """``numbered`` are the first prompts. ``take`` returns the given number of further prompts,
        or fewer if there are no more."""
        self._settings, self._take = settings, take
        self._bound = settings.prompts * settings.selection.max_asked
        self.prompts = dict(numbered)
        """All prompts so far, including replacements, by group number."""
        self.groups: list[Group] = []
        """The groups that have been graded so far."""

    def replace(self, graded: Sequence[Group]) -> NumberedPrompts:
        """Add newly graded groups, and return the prompts to sample in place of the dead groups
        among them: one per dead group, or fewer if the limit ``selection.max_asked`` is reached or
        ``take`` has no more. Raise a GraderError if too many grades are errors."""
        settings = self._settings
        self.groups += graded
        responses = len(self.prompts) * settings.group_size
        check_errors(self.groups, limit=settings.max_errors, requested=responses)
        lost = sum(is_lost(group, settings) for group in graded)
        further = self._take(min(lost, self._bound - len(self.prompts)))
        self.prompts.update(further)
        return further

    @property
    def is_done(self) -> bool:
        """Whether the groups of all prompts have been graded."""
        return len(self.groups) == len(self.prompts)


def make_replacer(
    settings: RolloutSettings,
) -> Callable[[NumberedPrompts, NumberedPrompts], Replacing] | None:
    """Return a function that creates a `Replacing` from a rollout's first prompts and its reserve
    prompts; None unless ``selection.dead_groups`` is "active", which replaces dead groups while the
    other groups of the rollout are still being sampled."""
    if settings.selection.dead_groups != "active":
        return None
    return lambda numbered, spare: Replacing(settings, numbered, taking(spare))


def sample_actively(
    settings: RolloutSettings,
    engine: Sampler,
    task: Task,
    numbered: NumberedPrompts,
    take: Callable[[int], NumberedPrompts],
    report: Report = unheard,
) -> list[Group]:
    """Sample and grade a rollout with active sampling (see `Replacing`): each group is graded when
    it is complete, and if it is dead, another prompt is submitted while the others are still being
    sampled. Return all groups sorted by number, including dead ones.

    ``take`` returns the given number of further prompts. Differs from the paper in that the engine
    waits for grades, so that the engine step at which a prompt is submitted does not depend on the
    time that grading takes.
    """
    size, params = settings.group_size, settings.params
    own = Replacing(settings, numbered, take)

    def replace(done: Answered) -> list[Request]:
        prompts = [(request.group, own.prompts[request.group]) for request, _ in done]
        found = grade(task, prompts, [completions for _, completions in done], settings.penalize)
        return requests_of(own.replace(found), size, params, Stream.TRAIN)

    requests = requests_of(numbered, size, params, Stream.TRAIN)
    complete(engine, requests, report=report, further=replace)
    return sorted(own.groups, key=lambda group: group.index)
