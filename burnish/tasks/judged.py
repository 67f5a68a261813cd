"""The judged task: a judge, which is a language model, scores responses by the criteria of a
rubric. It may also propose further criteria during a run. Episodes with a judge use the same
rubrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from burnish.errors import DataError
from burnish.graders.judge import Judge
from burnish.graders.rubric import ask_criteria, read_criteria
from burnish.recipe.judge import EvolveConfig, Rubric
from burnish.recipe.tasks import EnvironmentTask, JudgedTask
from burnish.tasks.rows import DataRow, check_prompt, load_rows
from burnish.tasks.text import TextTask, make_rows_task, plain_text
from burnish.types import Group, Prompt

RUBRIC = TypeAdapter(Rubric)
GIVEN, MADE = "criterion_", "evolved_"
"""Prefixes of criterion names: given by the recipe or a row, and proposed by the judge."""


def check_judged(config: JudgedTask, row: Any, where: str) -> DataRow:
    """Check a row; return it with two more fields: "asked", the prompt as the judge sees it, and
    "rubric", the criteria by name, from the row or else from the recipe.

    Raise a DataError, which names the place ``where``, if the row is invalid or has no rubric.
    """
    found = check_prompt(row, where)
    named = named_rubric(found.get("rubric", config.rubric), where)
    return DataRow(found | {"asked": plain_text(found["prompt"]), "rubric": named}, where)


def named_rubric(given: Any, where: str) -> dict[str, tuple[str, float]]:
    """Check the rubric of a row or of the recipe, None if neither has one; return its criteria by
    name, or raise a DataError."""
    if given is None:
        raise DataError(f"{where}: no field 'rubric', and task.rubric is not set; give one of them")
    try:
        rubric = RUBRIC.validate_python(given)
    except ValidationError as error:
        message = error.errors()[0]["msg"].removeprefix("Value error, ")
        if not message.startswith("needs"):
            message = f"must be a list of [text, weight] pairs: {message}, got {str(given)[:80]}"
        raise DataError(f"{where}: rubric {message}") from None
    return {f"{GIVEN}{k}": criterion for k, criterion in enumerate(rubric, 1)}


def make_judged(config: JudgedTask, *, seed: int, **how: Any) -> TextTask:
    """Build the task of a recipe whose responses a judge scores.

    The parts of a grade are the scores of the rubric's criteria. ``how``: further arguments of
    `make_rows_task`.
    """
    rows = load_rows(config, seed=seed, check=partial(check_judged, config))
    return make_rows_task(config, rows, Judge(config.judge), seed=seed, **how)


class Evolving:
    """Rubric criteria that the judge proposes for a task during training, and their versions.

    After a step, the judge compares the best and the worst response of the group whose rewards
    differ most, and proposes criteria that tell them apart. A criterion is kept while it
    discriminates, that is, while the standard deviation of its scores within a group, averaged over
    groups, is above a bound. DR Tulu, https://arxiv.org/abs/2511.19399. Differs from the paper in
    that all prompts of the task share the criteria, and that a criterion is removed only if it does
    not discriminate.
    """

    def __init__(self, config: EvolveConfig, judge: Judge) -> None:
        self.config, self.judge = config, judge
        self.load_state({})

    def attach(self, prompt: Prompt) -> Prompt:
        """Return the prompt with the active criteria appended to its rubric."""
        row, weight = prompt.reference, self.config.weight
        proposed = {name: (text, weight) for name, text in self.active.items()}
        return replace(prompt, reference=row | {"rubric": row["rubric"] | proposed})

    def note(self, groups: Sequence[Group]) -> dict[str, float]:
        """Update the criteria after a step: remove those that do not discriminate, and let the
        judge propose new ones every ``evolve.every`` steps. Return metrics.

        Call it once per step, with the step's groups of this task.
        """
        self.steps += 1
        stds = {name: discrimination(groups, name) for name in self.active}
        measured = {name: std for name, std in stds.items() if std is not None}
        low = {name for name, std in measured.items() if std <= self.config.min_std}
        kept = {name: text for name, text in self.active.items() if name not in low}
        metrics = {"rubric/std": float(np.mean([*measured.values()]))} if measured else {}
        if len(kept) < self.config.most and self.steps % self.config.every == 0:
            metrics |= self._propose(groups, kept)
        if kept != self.active:
            row = {"step": self.steps, "version": len(self.versions) + 1, "criteria": kept}
            self.versions.append(row | {"std": measured})
        return metrics | {
            "rubric/version": float(len(self.versions)),
            "rubric/active": float(len(self.active)),
        }

    def _propose(self, groups: Sequence[Group], kept: dict[str, str]) -> dict[str, float]:
        """Ask the judge for new criteria and add them to ``kept`` in place; return metrics with the
        cost of the judge's calls."""
        chosen = contrast(groups)
        if chosen is None:
            return {}
        prompt, better, worse = chosen
        given = {n: c for n, c in prompt.reference["rubric"].items() if n.startswith(GIVEN)}
        known = given | {name: (text, self.config.weight) for name, text in kept.items()}
        count = self.config.most - len(kept)
        messages = ask_criteria(known, prompt.reference["asked"], better, worse, count)
        reply = self.judge.ask(messages, partial(read_criteria, count=count))
        before = {name: text for row in self.versions for name, text in row["criteria"].items()}
        seen = [*before.values(), *(text for text, _ in given.values())]
        new = [text for text in reply.answer or () if text not in seen]
        kept |= {f"{MADE}{number}": text for number, text in enumerate(new, len(before) + 1)}
        failed = {"rubric/failed": float(reply.answer is None)}
        return failed | {f"rubric/{name}": value for name, value in reply.cost.items()}

    @property
    def active(self) -> dict[str, str]:
        """Texts of the active criteria, by name: those of the newest version."""
        return self.versions[-1]["criteria"] if self.versions else {}

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: the number of steps, and all versions of the
        criteria."""
        return {"steps": self.steps, "versions": list(self.versions)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore a saved state; an empty state is the state before the first step."""
        self.steps: int = state.get("steps", 0)
        self.versions: list[dict[str, Any]] = list(state.get("versions", ()))


def discrimination(groups: Sequence[Group], name: str) -> float | None:
    """Return the standard deviation (with n − 1) of a criterion's scores within a group, averaged
    over the groups with at least two scores; None if there is no such group."""
    by_group = [[g.parts[name] for g in group.grades if name in g.parts] for group in groups]
    stds = [float(np.std(scores, ddof=1)) for scores in by_group if len(scores) > 1]
    return float(np.mean(stds)) if stds else None


def contrast(groups: Sequence[Group]) -> tuple[Prompt, str, str] | None:
    """Return the prompt of the group whose rewards differ most, and the texts of its best and its
    worst response, as the judge graded them: of an episode, the text of its last turn. Responses
    whose grading failed are ignored.

    Return None if the rewards are equal within each group.
    """
    ranked = []
    for group in groups:
        good = [
            (grade.reward, c.turns[-1].text if c.turns else c.text)
            for c, grade in group.graded
            if not grade.is_error
        ]
        if good:
            best, worst = max(good, key=itemgetter(0)), min(good, key=itemgetter(0))
            ranked.append((best[0] - worst[0], group.prompt, best[1], worst[1]))
    found = max(ranked, key=itemgetter(0), default=None)
    return found[1:] if found and found[0] > 0 else None


def evolving(tasks: Mapping[str, Any]) -> dict[str, Evolving]:
    """Create ``Evolving`` for each judged task whose recipe lets the judge propose criteria; return
    them by the task's name in the mixture ("" without a mixture)."""
    return {
        part: Evolving(one.evolve, Judge(one.judge))
        for part, one in tasks.items()
        if isinstance(one, JudgedTask | EnvironmentTask) and one.evolve and one.judge
    }
