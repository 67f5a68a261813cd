"""Evaluation: held-out prompts, sampling of their own, and draws that every evaluation shares.

Prompts are answered some at a time, and always the same ones together, since a batch decides the
last bits of its logits. What an evaluation of its own has answered is a row of results.jsonl; one
that was killed answers the rest, and comes to what it would have come to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from burnish.config import Recipe
from burnish.draws import Stream
from burnish.engine.protocol import Engine
from burnish.errors import RunError
from burnish.progress import Show, after, begin, silent
from burnish.rollout.rollout import grade, sample, sampling
from burnish.runs import responses, statistics
from burnish.runs.directory import lock, replace_file
from burnish.runs.metrics import Metrics, iterate_rows
from burnish.runs.statistics import Outcome, is_right
from burnish.tasks.task import Task
from burnish.types import ENDINGS, Group, IntArray, Status

Decode = Callable[[IntArray], list[str]]
TOGETHER = 512
"""Responses that are sampled together at least."""


def evaluate(
    recipe: Recipe,
    task: Task,
    engine: Engine,
    decode: Decode,
    *,
    show: Show = silent,
    when: str = "",
) -> tuple[list[Group], Metrics]:
    """The graded responses to the validation prompts, and their figures as ``validation/…``.

    Empty where the task holds nothing out. ``when`` is shown, such as "after step 10".
    """
    parts = answered(recipe, task, engine, show=show, when=when)
    groups = [group for part in parts for group in part]
    return groups, figures(to_rows(task, groups, decode))


def evaluate_into(
    directory: Path,
    settings: Mapping[str, Any],
    recipe: Recipe,
    task: Task,
    engine: Engine,
    decode: Decode,
    *,
    show: Show = silent,
) -> Metrics:
    """The same figures, with every response in a directory; one begun before goes on there.

    ``settings`` are all that the results depend on.
    """
    with lock(directory):
        _same_settings(directory / "settings.json", settings)
        file = directory / "results.jsonl"
        rows = _done(file, recipe, len(task.validation))
        done = len(rows) // recipe.validation.samples
        for part in answered(recipe, task, engine, start=done, show=show):
            fresh = to_rows(task, part, decode)
            with file.open("a", encoding="utf-8") as out:
                out.writelines(json.dumps(row) + "\n" for row in fresh)
            rows += fresh
        measured = figures(rows)
        replace_file(directory / "figures.json", json.dumps(measured, indent=2) + "\n")
    return measured


def answered(
    recipe: Recipe,
    task: Task,
    engine: Engine,
    *,
    start: int = 0,
    show: Show = silent,
    when: str = "",
) -> Iterator[list[Group]]:
    """Graded responses from prompt ``start`` on, some prompts at a time."""
    config, prompts, size = recipe.validation, task.validation, together(recipe)
    params = replace(
        sampling(recipe),
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_tokens=config.max_tokens or recipe.rollout.max_tokens,
        stop=recipe.validation_stop,
    )
    doing, samples = f"evaluating {len(prompts)} prompts {when}".rstrip(), config.samples
    report = begin(show, "evaluate", doing, total=samples * len(prompts), unit="responses")
    tokens = 0
    for first in range(start, len(prompts), size):
        some = prompts[first : first + size]
        responses = sample(
            engine,
            some,
            first_group=first,
            samples=samples,
            params=params,
            stream=Stream.EVALUATION,
            report=after(report, samples * first, tokens),
        )
        tokens += sum(len(c.token_ids) for completions in responses for c in completions)
        yield grade(task, some, responses, first)


def together(recipe: Recipe) -> int:
    """Prompts that are sampled together."""
    return max(1, max(TOGETHER, recipe.engine.max_running) // recipe.validation.samples)


def to_rows(task: Task, groups: Sequence[Group], decode: Decode) -> list[dict[str, Any]]:
    """Every response as a row of rollouts, with the answer that it votes for, its grader's message,
    and the part of a mixture that it belongs to."""
    grades = [(group.prompt, grade.message) for group in groups for grade in group.grades]
    rows = responses.rows(0, groups, decode=decode)
    return [
        {
            **row,
            "answer": task.answer(prompt, row["response"]),
            "message": message,
            **({} if prompt.part is None else {"part": prompt.part}),
        }
        for row, (prompt, message) in zip(rows, grades, strict=True)
    ]


def figures(rows: Sequence[Mapping[str, Any]]) -> Metrics:
    """Means over responses, and how many are right.

    One whose grader failed has no reward and is neither right nor wrong.
    """
    if not rows:
        return {}
    scored = [row for row in rows if row["status"] != Status.ERROR]
    columns: dict[str, Sequence[float]] = {"length": [len(row["tokens"]) for row in rows]}
    for name, end in ENDINGS.items():
        columns[name] = [row["finish"] == end for row in rows]
    if scored:
        columns["reward"] = [row["reward"] for row in scored]
    for label in sorted({row["part"] for row in scored if "part" in row}):
        columns[f"reward/{label}"] = [r["reward"] for r in scored if r.get("part") == label]
    for part in sorted({name for row in rows for name in row["parts"]}):
        columns[f"part_{part}"] = [r["parts"][part] for r in rows if part in r["parts"]]
    for status in Status:
        columns[f"grades_{status}"] = [row["status"] == status for row in rows]
    prompts: dict[int, list[Outcome]] = {}
    for row in scored:
        outcome = Outcome(is_right(row), row["answer"])
        prompts.setdefault(row["group"], []).append(outcome)
    found = {name: float(np.mean(values)) for name, values in columns.items()}
    found |= {"responses": float(len(rows)), **statistics.describe(list(prompts.values()))}
    return {f"validation/{name}": value for name, value in found.items()}


def _same_settings(file: Path, settings: Mapping[str, Any]) -> None:
    if not file.exists():
        replace_file(file, json.dumps(settings, indent=2) + "\n")
    before = json.loads(file.read_text(encoding="utf-8"))
    changed = [key for key in {**before, **settings} if before.get(key) != settings.get(key)]
    if changed:
        what = "; ".join(f"{key}: {before.get(key)} → {settings.get(key)}" for key in changed)
        raise RunError(
            f"{file.parent} holds another evaluation ({what}); choose another --out or remove it"
        )


def _done(file: Path, recipe: Recipe, prompts: int) -> list[dict[str, Any]]:
    """What is answered already; the file is cut back to prompts that were sampled together."""
    rows, samples, size = list(iterate_rows(file)), recipe.validation.samples, together(recipe)
    count = len(rows) // samples
    kept = rows[: (count if count == prompts else count // size * size) * samples]
    replace_file(file, "".join(json.dumps(row) + "\n" for row in kept))
    return kept
