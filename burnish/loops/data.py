"""Data to start from: keyword prompts that a model answered as asked, sums worked term by term."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from burnish.config import Recipe
from burnish.draws import Stream
from burnish.engine.protocol import Engine
from burnish.errors import DataError
from burnish.progress import Show, begin, silent
from burnish.rollout.rollout import grade, sample, sampling
from burnish.tasks.gym import Gym
from burnish.tasks.keywords import Keywords
from burnish.types import Completion, Prompt

Row = dict[str, object]
PATIENCE = 200
"""Prompts per row, on average, before a model is given up."""


def write_keywords(
    recipe: Recipe,
    task: Keywords,
    engine: Engine,
    directory: Path,
    *,
    rows: int,
    show: Show = silent,
) -> dict[str, float]:
    """Writes train.jsonl and validation.jsonl, 80/20, with fields prompt, answer and keywords.

    Sampled as the recipe samples a rollout. Of each prompt's answers the first that earns the
    task's reward is kept; prompts go on until there are enough rows. Returns what was asked, what
    was kept, and the share that earned it.
    """
    held_out = _held_out(rows)
    files = new_files(directory)
    wanted = ((task.prompt, rows - held_out), (task.validation_prompt, held_out))
    found: list[list[Row]] = []
    asked = 0
    for prompt, count in wanted:
        kept: list[Row] = []
        first = asked
        while len(kept) < count:
            if asked - first >= PATIENCE * count:
                raise DataError(
                    f"only {len(kept)} of {count} rows after {asked - first} prompts: the model "
                    "hardly ever includes the keywords; sample more answers per prompt, or ask a "
                    "better model"
                )
            prompts = [prompt(asked - first + i) for i in range(recipe.prompts_per_rollout)]
            so_far = sum(map(len, found)) + len(kept)
            doing = f"sampling answers; {so_far} of {rows} rows are kept, {asked} prompts asked"
            total = len(prompts) * recipe.rollout.group_size
            sampled = sample(
                engine,
                prompts,
                first_group=asked,
                samples=recipe.rollout.group_size,
                report=begin(show, "generate", doing, total=total, unit="responses"),
                params=sampling(recipe),
                stream=Stream.GENERATE,
            )
            for one, answers in zip(prompts, sampled, strict=True):
                if len(kept) < count:
                    asked += 1
                    kept += _good(task, one, answers)
        found.append(kept)
    for file, kept in zip(files, found, strict=True):
        _write(file, kept)
    return {"data/prompts": float(asked), "data/rows": float(rows), "data/share_kept": rows / asked}


def write_sums(task: Gym, directory: Path, *, rows: int) -> None:
    """Writes train.jsonl and validation.jsonl, 80/20: chains of sums with worked answers.

    No question comes twice, and none that the task holds out.
    """
    if task.config.generator != "chain_sum":
        raise DataError(f"only chain_sum's answers can be worked, got {task.config.generator}")
    held_out = _held_out(rows)
    files = new_files(directory)
    found: dict[str, Row] = {}
    for index in range(PATIENCE * rows):
        question = task.prompt(index).reference["entry"]["question"]
        found[question] = {"prompt": question, "answer": worked(question)}
        if len(found) == rows:
            break
    else:
        raise DataError(
            f"only {len(found)} questions differ; ask for fewer, or widen task.settings"
        )
    every = list(found.values())
    for file, some in zip(files, (every[held_out:], every[:held_out]), strict=True):
        _write(file, some)


def worked(question: str) -> str:
    """… 14 - 29 + 32 = as "29 - 10 = 19", "19 - 4 = 15", "14 - 29 = -15", "32 - 10 = 22", …

    A line each: tens and ones one after the other, and the smaller number from the larger before
    the sign, because a small model hardly does either at once.
    """
    first, *rest = re.findall(r"([-+]?) ?([0-9]+)(?= *[-+=])", question)
    total, lines = int(first[1]), list[str]()
    for sign, term in rest:
        before, number = total, int(term)
        total += int(sign + term)
        below = (before < 0 and sign == "+") or total < 0 <= before
        if below and max(abs(before), number) > 9:
            small, large = sorted((abs(before), number))
            lines += _by_places(large, "-", small)
            lines.append(f"{before} {sign} {term} = {total}")
        else:
            lines += _by_places(before, sign, number)
    return "\n".join(lines)


def _by_places(before: int, sign: str, number: int) -> Iterator[str]:
    places = [int(digit) * 10**k for k, digit in enumerate(reversed(str(number)))]
    for part in [part for part in reversed(places) if part] or [0]:
        after = before + int(f"{sign}{part}")
        yield f"{before} {sign} {part} = {after}"
        before = after


def _held_out(rows: int) -> int:
    """How many of so many rows are for validation."""
    if rows < 2:
        raise DataError(f"rows must be at least 2, one of them for validation, got {rows}")
    return max(1, round(0.2 * rows))


def new_files(directory: Path) -> list[Path]:
    """Where the rows will go; an error where they can't, or are already."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"can't write to {directory}: {error.strerror}; choose another") from error
    files = [directory / f"{name}.jsonl" for name in ("train", "validation")]
    for file in files:
        if file.exists():
            raise DataError(f"{file} is there already; choose another directory, or remove it")
    return files


def _good(task: Keywords, prompt: Prompt, answers: Sequence[Completion]) -> list[Row]:
    """A row with the first answer that earns the reward, if there is one."""
    (group,) = grade(task, [prompt], [tuple(answers)], 0)
    graded = zip(answers, group.grades, strict=True)
    good = [answer.text.strip() for answer, given in graded if given.reward > 0]
    row = prompt.reference
    return [{"prompt": row["prompt"], "answer": text, **_words(row)} for text in good[:1]]


def _words(row: Row) -> Row:
    return {key: row[key] for key in ("keywords", "match")}


def _write(path: Path, rows: Sequence[Row]) -> None:
    """Whole or not at all."""
    partial = path.with_suffix(".partial")
    with partial.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
