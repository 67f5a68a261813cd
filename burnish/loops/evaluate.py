"""Evaluation: held-out prompts, sampling of their own, and draws that every evaluation shares.

Prompts are answered some at a time, and always the same ones together, since a batch decides the
last bits of its logits. An evaluation in a directory of its own appends each answer to
results.jsonl. If it is killed, the next one answers the rest, and its figures are the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from burnish.draws import Stream
from burnish.engine.protocol import Engine
from burnish.errors import RunError
from burnish.progress import Show, after, begin, silent
from burnish.rollout.rollout import averages, grade, sample, sampling
from burnish.runs import responses, results
from burnish.runs.directory import lock, replace_file
from burnish.runs.metrics import Metrics, iterate_rows
from burnish.schema import Recipe
from burnish.tasks.task import Task
from burnish.types import Group, IntArray, Status

TOGETHER = 512
"""Responses that are sampled together at least."""
Decode = Callable[[IntArray], list[str]]
"""Turns token ids into one text each."""
Row = dict[str, Any]
"""A response as results.jsonl has it."""


@dataclass(frozen=True)
class Evaluator:
    """Measures the engine's model on a task's held-out prompts."""

    recipe: Recipe
    task: Task
    engine: Engine
    decode: Decode

    def answered(
        self, start: int = 0, *, show: Show = silent, when: str = ""
    ) -> Iterator[list[Group]]:
        """Graded responses from prompt ``start`` on, some prompts at a time.

        ``when`` is shown, such as "after step 10".
        """
        config, samples, tokens = self.recipe.validation, self.recipe.validation.samples, 0
        params = replace(
            sampling(self.recipe),
            temperature=config.temperature,
            max_tokens=config.max_tokens or self.recipe.rollout.max_tokens,
            stop=self.recipe.stop,
        )
        prompts = list(enumerate(self.task.validation))
        doing = f"evaluating {len(prompts)} prompts {when}".rstrip()
        report = begin(show, "evaluate", doing, total=samples * len(prompts), unit="responses")
        for first in range(start, len(prompts), self.together):
            asked = prompts[first : first + self.together]
            further = after(report, samples * first, tokens)
            completions = sample(self.engine, asked, samples, params, Stream.EVALUATION, further)
            tokens += sum(len(c.token_ids) for group in completions for c in group)
            yield grade(self.task, asked, completions)

    @property
    def together(self) -> int:
        """Prompts that are sampled together."""
        config = self.recipe.validation
        return max(1, max(TOGETHER, self.recipe.engine.max_running) // config.samples)

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

    def evaluate_into(
        self, directory: Path, settings: Mapping[str, Any], *, show: Show = silent
    ) -> None:
        """Keeps every response, and the figures, in a directory; an evaluation that was begun
        there goes on.

        ``settings`` are all that the results depend on.
        """
        with lock(directory):
            _check_settings(directory / "settings.json", settings)
            file = directory / "results.jsonl"
            rows = self._kept(list(iterate_rows(file)))
            replace_file(file, _jsonl(rows))
            done = len(rows) // self.recipe.validation.samples
            for groups in self.answered(done, show=show):
                fresh = self.rows(groups)
                with file.open("a", encoding="utf-8") as out:
                    out.write(_jsonl(fresh))
                rows += fresh
            replace_file(directory / "figures.json", json.dumps(figures(rows), indent=2) + "\n")

    def _kept(self, rows: list[Row]) -> list[Row]:
        """The rows of prompts that were sampled together and are all there."""
        samples, size = self.recipe.validation.samples, self.together
        count = len(rows) // samples
        is_whole = count == len(self.task.validation)
        return rows[: (count if is_whole else count // size * size) * samples]


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
    before = json.loads(file.read_text(encoding="utf-8"))
    changed = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
    if changed:
        told = "; ".join(f"{key}: {before.get(key)} → {settings.get(key)}" for key in changed)
        raise RunError(
            f"{file.parent} holds another evaluation ({told}); choose another --out or remove it"
        )


def _jsonl(rows: Sequence[Row]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)
