"""Rows whose responses a judge scores by a rubric, and criteria that it proposes during a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from burnish.errors import DataError
from burnish.graders.judge import Judge
from burnish.graders.rubric import ask_criteria, read_criteria
from burnish.schema.judged import EvolveConfig, Rubric
from burnish.schema.recipe import Recipe
from burnish.schema.tasks import JudgedTask
from burnish.tasks.rows import DataRow, check_prompt, rows_of
from burnish.tasks.text import TextTask, ask_rows, shown
from burnish.types import Group, Prompt

RUBRIC = TypeAdapter(Rubric)
GIVEN, MADE = "criterion_", "evolved_"
"""How the names of criteria begin that the recipe or a row gives, and that the judge proposed."""


def check_judged(config: JudgedTask, row: Any, where: str) -> DataRow:
    """The row with "asked", the prompt as the judge sees it, and "rubric", criteria by name."""
    found = check_prompt(row, where)
    given = found.get("rubric", config.rubric)
    if given is None:
        raise DataError(f"{where}: no field 'rubric', and task.rubric is not set; give one of them")
    try:
        rubric = RUBRIC.validate_python(given)
    except ValidationError as error:
        told = error.errors()[0]["msg"].removeprefix("Value error, ")
        if not told.startswith("needs"):
            told = f"is a list of [text, weight] pairs: {told}, got {str(given)[:80]}"
        raise DataError(f"{where}: rubric {told}") from None
    named = {f"{GIVEN}{k}": criterion for k, criterion in enumerate(rubric, 1)}
    return DataRow(found | {"asked": shown(found["prompt"]), "rubric": named}, where)


def make_judged(config: JudgedTask, *, seed: int, **how: Any) -> TextTask:
    """The task of a recipe's section. The parts of a grade are the scores of its criteria."""
    rows = rows_of(config, seed=seed, check=partial(check_judged, config))
    return ask_rows(config, rows, Judge(config.judge), seed=seed, **how)


class Evolving:
    """Criteria that the judge proposes for a task while it is trained.

    After each step the judge sees the best and the worst response of the group whose rewards
    differ most, and names what sets them apart. A criterion stays while it discriminates: while
    the standard deviation of its scores over a group, the mean over groups, is above a bound. DR
    Tulu (https://arxiv.org/abs/2511.19399). Differs from the paper in that all prompts of the task
    share the criteria, and in that a criterion leaves only if it does not discriminate.
    """

    def __init__(self, config: EvolveConfig, judge: Judge) -> None:
        self.config, self.judge = config, judge
        self.load_state({})

    def attach(self, prompt: Prompt) -> Prompt:
        """The prompt with the criteria of the newest version behind its own."""
        row, weight = prompt.reference, self.config.weight
        own = {name: (text, weight) for name, text in self.active.items()}
        return replace(prompt, reference=row | {"rubric": row["rubric"] | own})

    def note(self, groups: Sequence[Group]) -> dict[str, float]:
        """Drops and adds criteria after a step -> metrics."""
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
        """Puts new criteria into ``kept`` -> the cost."""
        chosen = contrast(groups)
        if chosen is None:
            return {}
        prompt, better, worse = chosen
        given = {n: c for n, c in prompt.reference["rubric"].items() if n.startswith(GIVEN)}
        known = given | {name: (text, self.config.weight) for name, text in kept.items()}
        room, asked = self.config.most - len(kept), prompt.reference["asked"]
        messages = ask_criteria(known, asked, better, worse, room)
        reply = self.judge.ask(messages, partial(read_criteria, count=room))
        before = {name: text for row in self.versions for name, text in row["criteria"].items()}
        seen = [*before.values(), *(text for text, _ in given.values())]
        new = [text for text in reply.answer or () if text not in seen]
        kept |= {f"{MADE}{number}": text for number, text in enumerate(new, len(before) + 1)}
        failed = {"rubric/failed": float(reply.answer is None)}
        return failed | {f"rubric/{name}": value for name, value in reply.cost.items()}

    @property
    def active(self) -> dict[str, str]:
        """The texts of the newest version by name."""
        return self.versions[-1]["criteria"] if self.versions else {}

    def state(self) -> dict[str, Any]:
        return {"steps": self.steps, "versions": list(self.versions)}

    def load_state(self, state: dict[str, Any]) -> None:
        """An empty state is the state before the first step."""
        self.steps: int = state.get("steps", 0)
        self.versions: list[dict[str, Any]] = list(state.get("versions", ()))


def discrimination(groups: Sequence[Group], name: str) -> float | None:
    """The unbiased standard deviation of a criterion's scores over a group, the mean over the
    groups that have at least two scores; None if no group has."""
    scores = [[g.parts[name] for g in group.grades if name in g.parts] for group in groups]
    stds = [float(np.std(own, ddof=1)) for own in scores if len(own) > 1]
    return float(np.mean(stds)) if stds else None


def contrast(groups: Sequence[Group]) -> tuple[Prompt, str, str] | None:
    """The prompt whose responses' rewards differ most, its best response and its worst; None if
    the responses of each prompt have equal rewards."""
    ranked = []
    for group in groups:
        good = [(grade.reward, c.text) for c, grade in group.graded if not grade.is_error]
        if good:
            best, worst = max(good, key=itemgetter(0)), min(good, key=itemgetter(0))
            ranked.append((best[0] - worst[0], group.prompt, best[1], worst[1]))
    found = max(ranked, key=itemgetter(0), default=None)
    return found[1:] if found and found[0] > 0 else None


def evolving(recipe: Recipe) -> dict[str, Evolving]:
    """Evolving criteria by the part of a mixture whose prompts take them; "" without a mixture."""
    return {
        part: Evolving(one.evolve, Judge(one.judge))
        for part, one in recipe.parts.items()
        if isinstance(one, JudgedTask) and one.evolve is not None
    }
