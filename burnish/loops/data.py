"""Keyword data that a model writes: prompts with answers that do what was asked."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from burnish.errors import DataError
from burnish.tasks.keywords import Keywords
from burnish.types import Completion, Prompt

Sampler = Callable[[Sequence[Prompt], int], Sequence[Sequence[Completion]]]
"""(prompts, running number of the first) → some completions of each."""


def write_keywords(
    task: Keywords, sample: Sampler, directory: Path, *, rows: int, batch: int = 64
) -> dict[str, float]:
    """Writes train.jsonl and validation.jsonl, 80/20, with fields prompt, answer and keywords.

    Of each prompt's answers the first that earns the task's reward is kept; prompts go on until
    there are enough rows. Returns what was asked, what was kept, and the share that earned it.
    """
    if rows < 2:
        raise DataError(f"rows must be at least 2, one of them for validation, got {rows}")
    held_out = max(1, round(0.2 * rows))
    train, asked = _collect(task.prompt, task, sample, rows - held_out, batch, 0)
    validation, more = _collect(task.validation_prompt, task, sample, held_out, batch, asked)
    directory.mkdir(parents=True, exist_ok=True)
    for name, kept in (("train", train), ("validation", validation)):
        _write(directory / f"{name}.jsonl", kept)
    prompts = float(asked + more)
    return {"data/prompts": prompts, "data/rows": float(rows), "data/share_kept": rows / prompts}


def _collect(
    prompt: Callable[[int], Prompt],
    task: Keywords,
    sample: Sampler,
    rows: int,
    batch: int,
    first: int,
    *,
    patience: int = 200,
) -> tuple[list[dict[str, object]], int]:
    """That many rows, and how many prompts they took; patience: prompts per row, on average."""
    kept: list[dict[str, object]] = []
    asked = 0
    while len(kept) < rows:
        if asked >= patience * rows:
            raise DataError(
                f"only {len(kept)} of {rows} rows after {asked} prompts: the model hardly ever "
                "includes the keywords; sample more answers per prompt, or ask a better model"
            )
        prompts = [prompt(asked + i) for i in range(batch)]
        answers = sample(prompts, first + asked)
        for asked_for, completions in zip(prompts, answers, strict=True):
            asked += 1
            grades = task.grade_all([(asked_for, c) for c in completions])
            good = [c.text.strip() for c, g in zip(completions, grades, strict=True) if g.reward]
            if good:
                row = asked_for.reference
                kept.append({"prompt": row["prompt"], "answer": good[0]} | _words(row))
            if len(kept) == rows:
                break
    return kept, asked


def _words(row: dict[str, object]) -> dict[str, object]:
    return {key: row[key] for key in ("keywords", "match")}


def _write(path: Path, rows: Sequence[dict[str, object]]) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
