"""Evaluation: held-out prompts, with settings of their own and the same draws every time.

Prompts are answered some at a time, and always the same ones together, since a batch decides the
last bits of its logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from burnish.draws import Stream
from burnish.engine.protocol import Server
from burnish.errors import RunError
from burnish.progress import after, begin, tell
from burnish.rollout.rollout import averages, costs, grade, is_aborted, sample, sampling
from burnish.runs import responses, results
from burnish.runs.directory import lock, read_json, replace_file, to_jsonl
from burnish.runs.metrics import Metrics
from burnish.runs.resuming import differences
from burnish.schema.recipe import Recipe
from burnish.tasks.task import Task
from burnish.types import Group, IntArray, Status

FIGURES = "figures.json"
DRIFT = 128
"""Held-out prompts on whose responses the KL to the initial model is measured."""
TOGETHER = 512
"""Responses that are sampled together at least."""
Decode = Callable[[IntArray], list[str]]
"""Turns token ids into one text each."""
Drift = Callable[[list[Group]], Metrics]
"""Measures the KL to the initial model on responses."""
Row = dict[str, Any]
"""A response as results.jsonl has it."""


@dataclass(frozen=True)
class Evaluator:
    """Measures the engine's model on a task's held-out prompts."""

    recipe: Recipe
    task: Task
    engine: Server
    decode: Decode

    def answered(self, when: str = "") -> list[Group]:
        """Graded responses to all prompts; ``when`` is shown, such as "after step 10"."""
        config, samples = self.recipe.validation, self.recipe.validation.samples
        params = replace(
            sampling(self.recipe),
            temperature=config.temperature,
            top_p=1.0,
            top_k=None,
            max_tokens=config.max_tokens or self.recipe.rollout.max_tokens,
        )
        prompts = list(enumerate(self.task.validation))
        doing = f"evaluating {len(prompts)} prompts {when}".rstrip()
        report = begin("evaluate", doing, total=samples * len(prompts), unit="responses")
        together = max(1, max(TOGETHER, self.recipe.engine.max_running) // samples)
        groups: list[Group] = []
        for first in range(0, len(prompts), together):
            asked = prompts[first : first + together]
            tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
            further = after(report, samples * first, tokens)
            completions = sample(self.engine, asked, samples, params, Stream.EVALUATION, further)
            groups += grade(self.task, asked, completions)
        return groups

    def rows(self, groups: Sequence[Group]) -> list[Row]:
        """Every response as a row of rollouts, with the answer that it votes for, its grader's
        message, and the part of a mixture that it belongs to."""
        grades = [(group.prompt, grade.message) for group in groups for grade in group.grades]
        rows = responses.rows(0, groups, decode=self.decode)
        return [
            {
                **row,
                "answer": self.task.answer(prompt, row["response"]),
                "message": message,
                **({} if prompt.part is None else {"part": prompt.part}),
            }
            for row, (prompt, message) in zip(rows, grades, strict=True)
        ]

    def validate(self, drift: Drift, when: str) -> tuple[list[Group], Metrics]:
        """Graded responses to all prompts, and the figures of a policy in training."""
        recipe, groups = self.recipe, self.answered(when)
        found = figures(self.rows(groups))
        found |= {f"validation/{name}": value for name, value in costs(groups).items()}
        whole = [g for g in groups[:DRIFT] if not any(map(is_aborted, g.completions))]
        if whole and recipe.train.log_kl and recipe.validation.temperature:  # greedy has no KL
            tell("evaluate", f"measuring the KL {when}")
            found |= drift(whole)
        return groups, found

    def evaluate_into(self, directory: Path, settings: Mapping[str, Any]) -> None:
        """Keeps every response, and the figures, in a directory, unless it has them already.

        ``settings`` are all that the results depend on.
        """
        with lock(directory):
            _check_settings(directory / "settings.json", settings)
            if not (directory / FIGURES).exists():
                rows = self.rows(self.answered())
                replace_file(directory / "results.jsonl", to_jsonl(rows))
                replace_file(directory / FIGURES, json.dumps(figures(rows), indent=2) + "\n")


def figures(rows: Sequence[Row]) -> Metrics:
    """Means over responses, and how many are right, as ``validation/…``; empty without rows.

    A response whose grader failed is neither right nor wrong.
    """
    if not rows:
        return {}
    prompts: dict[int, list[Row]] = {}
    for row in rows:
        if row["status"] != Status.ERROR:
            prompts.setdefault(row["group"], []).append(row)
    found = averages(rows) | results.accuracy(list(prompts.values()))
    return {f"validation/{name}": value for name, value in found.items()}


def _check_settings(file: Path, settings: Mapping[str, Any]) -> None:
    """Writes the settings of a new evaluation; raises if the directory holds another one."""
    if not file.exists():
        replace_file(file, json.dumps(settings, indent=2) + "\n")
    if told := differences(read_json(file), settings):
        raise RunError(
            f"{file.parent} holds another evaluation ({told}); choose another --out or remove it"
        )
