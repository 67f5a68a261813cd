"""Evaluation on held-out prompts, with separate sampling settings and the same random draws every
time.

Prompts are sampled in fixed batches, because the last bits of the logits depend on the batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from burnish.console.progress import after, begin, tell
from burnish.console.text import counted
from burnish.engine.protocol import Sampler
from burnish.errors import RunError
from burnish.graders.tally import limiting_errors
from burnish.randomness import Stream
from burnish.rollout.rollout import averages, check_errors, costs, grade, is_aborted, sample
from burnish.runs import responses, results
from burnish.runs.directory import load_json, lock, replace_file, to_jsonl
from burnish.runs.metrics import Metrics
from burnish.runs.resuming import differences
from burnish.tasks.task import Task
from burnish.types import Group, IntArray, SamplingParams, Status

FIGURES = "figures.json"
"""File with the metrics of an evaluation."""
DRIFT = 128
"""Number of held-out prompts on whose responses the KL to the initial model is measured."""
TOGETHER = 512
"""Number of responses that are sampled in one batch; ``max_running`` if that is larger."""
Decode = Callable[[IntArray], list[str]]
"""Converts token ids to one text per token."""
Drift = Callable[[list[Group]], Metrics]
"""Measures the policy's KL to the initial model on responses; returns metrics."""
Row = dict[str, Any]
"""A response as a row of results.jsonl."""


@dataclass(frozen=True)
class Evaluator:
    """Samples and grades responses of an engine's model to the held-out prompts of a task, and
    computes metrics."""

    params: SamplingParams
    samples: int
    """Responses per prompt."""
    task: Task
    engine: Sampler
    decode: Decode
    max_running: int
    """Maximum number of samples that the engine decodes at the same time."""
    logs_kl: bool
    """Whether `validate` measures the KL to the initial model."""

    def answered(self, when: str = "", max_errors: float | None = None) -> list[Group]:
        """Sample and grade ``samples`` responses to each held-out prompt; return one group per
        prompt. ``when`` is displayed, such as "after step 10".

        ``max_errors`` is the largest accepted share, from 0 to 1, of grades that are errors; None
        accepts any number. A GraderError is raised as soon as it is certain to be exceeded.
        """
        params, samples = self.params, self.samples
        prompts = list(enumerate(self.task.validation))
        if not prompts:
            return []
        doing = f"evaluating {counted(len(prompts), 'prompt')} {when}".rstrip()
        report = begin("evaluate", doing, total=samples * len(prompts), unit="responses")
        together = max(1, max(TOGETHER, self.max_running) // samples)
        groups: list[Group] = []
        limit, total = math.inf if max_errors is None else max_errors, samples * len(prompts)
        with limiting_errors(limit, total):
            for first in range(0, len(prompts), together):
                numbered = prompts[first : first + together]
                tokens = sum(len(c.token_ids) for group in groups for c in group.completions)
                further = after(report, samples * first, tokens)
                responses = sample(
                    self.engine, numbered, samples, params, Stream.EVALUATION, further
                )
                groups += grade(self.task, numbered, responses)
                check_errors(groups, limit=limit, requested=total)
        return groups

    def rows(self, groups: Sequence[Group]) -> list[Row]:
        """Convert each response to a row of results.jsonl: the fields of rollouts.jsonl, the final
        answer (for majority votes; None if the task finds none; of an episode, its last turn), the
        grader's message and, if the prompt has a category (`Prompt.part`), its name."""
        grades = [(group.prompt, grade.message) for group in groups for grade in group.grades]
        rows = responses.rows(0, groups, decode=self.decode)
        return [
            {
                **row,
                "answer": self.task.answer(prompt, responses.final_text(row)),
                "message": message,
                **({} if prompt.part is None else {"part": prompt.part}),
            }
            for row, (prompt, message) in zip(rows, grades, strict=True)
        ]

    def validate(
        self, drift: Drift, when: str, max_errors: float | None = None
    ) -> tuple[list[Group], Metrics]:
        """Evaluate a policy in training; return the graded responses, one group per held-out
        prompt, and the validation metrics. ``when`` and ``max_errors``: see `answered`.

        If ``logs_kl`` is set and sampling is not greedy, the metrics include the KL metrics that
        ``drift`` measures on the first `DRIFT` groups, without groups that have an aborted sample.
        """
        groups = self.answered(when, max_errors)
        found = validation_metrics(self.rows(groups))
        found |= {f"validation/{name}": value for name, value in costs(groups).items()}
        whole = [g for g in groups[:DRIFT] if not any(map(is_aborted, g.completions))]
        if whole and self.logs_kl and self.params.temperature:  # greedy has no KL
            tell("evaluate", f"measuring the KL {when}")
            found |= drift(whole)
        return groups, found

    def evaluate_into(self, directory: Path, settings: Mapping[str, Any]) -> None:
        """Evaluate the model, and write the responses to results.jsonl and the metrics to `FIGURES`
        in ``directory``. Do nothing if the directory already has the metrics; an incomplete
        evaluation starts again from the beginning.

        ``settings`` are all settings that the results depend on; they are stored in the directory.
        Raise a RunError if the directory holds an evaluation, complete or not, with other settings.
        """
        with lock(directory):
            _check_settings(directory / "settings.json", settings)
            if not (directory / FIGURES).exists():
                rows = self.rows(self.answered())
                found = validation_metrics(rows)
                replace_file(directory / "results.jsonl", to_jsonl(rows))
                replace_file(directory / FIGURES, json.dumps(found, indent=2) + "\n")


def validation_metrics(rows: Sequence[Row]) -> Metrics:
    """Compute means over responses (length, reward, …) and accuracies over prompts, named
    ``validation/…``. Without rows, return an empty dict.

    A response whose grader failed counts as neither correct nor incorrect.
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
    """Write the settings to ``file`` if it does not exist; otherwise raise a RunError if they
    differ from the stored ones."""
    if not file.exists():
        replace_file(file, json.dumps(settings, indent=2) + "\n")
    if changed := differences(load_json(file), settings):
        raise RunError(
            f"{file.parent} holds a different evaluation ({changed}); choose another --out, or "
            "remove it"
        )
