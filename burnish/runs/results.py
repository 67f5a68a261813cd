"""Evaluations and their page, one or several side by side: how often a model was right, and how it
was wrong."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from burnish.errors import RunError
from burnish.runs import pages, responses, statistics
from burnish.runs.directory import replace_file
from burnish.runs.responses import ResponseRow
from burnish.types import ENDINGS, Status

Pair = tuple[ResponseRow, ResponseRow]
EXAMPLES = 12
"""Of each category, and of each way in which two evaluations differ."""
CHARACTERS = 4000
"""Of a response."""
LONG = 600
"""Characters past which a prompt is shown whole only when it is opened."""


def is_right(row: ResponseRow) -> bool:
    return statistics.is_right(row["reward"] or 0, row["parts"])


def has_format(row: ResponseRow) -> bool:
    return bool(row["parts"].get("format", row["status"] != Status.UNPARSED))


def is_wrong(row: ResponseRow) -> bool:
    return not is_right(row) and row["status"] != Status.ERROR


CATEGORIES: dict[str, Callable[[ResponseRow], bool]] = {
    "format and answer right": is_right,
    "format right, answer wrong": lambda row: is_wrong(row) and has_format(row),
    "format wrong": lambda row: is_wrong(row) and not has_format(row),
    "unparsed": lambda row: row["status"] == Status.UNPARSED,
    "truncated": lambda row: row["finish"] == ENDINGS["truncated"],
    "timed out": lambda row: row["status"] == Status.TIMEOUT,
    "grader failed": lambda row: row["status"] == Status.ERROR,
}
"""Every response is in one of the first three or in the last; the others say more of some."""


class Evaluation(NamedTuple):
    """A model measured on held-out prompts."""

    name: str
    settings: dict[str, Any]
    """All that the results depend on."""
    figures: dict[str, float]
    rows: list[ResponseRow]
    """A row for each response."""
    path: Path
    """The directory with all of it."""

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        return f"Evaluation of {self.name}: {figures}"


def read(directory: Path) -> Evaluation:
    try:
        settings, figures = (
            json.loads((directory / name).read_text(encoding="utf-8"))
            for name in ("settings.json", "figures.json")
        )
    except (OSError, ValueError) as error:
        raise RunError(f"{directory} holds no finished evaluation: {error}") from error
    rows = list(responses.read(directory / "results.jsonl"))
    return Evaluation(directory.name, settings, figures, rows, directory)


def write_evaluation(directories: Sequence[Path], page: Path) -> Path:
    """Writes a page with the figures, categories and examples of each evaluation, and the prompts
    that they answered differently."""
    given = _named_by_model([read(directory) for directory in directories])
    settings = {
        key: [str(e.settings.get(key, "–")) for e in given] for e in given for key in e.settings
    }
    names = dict.fromkeys(name for e in given for name in e.figures)
    found = {
        name: [[row for row in e.rows if holds(row)] for e in given]
        for name, holds in CATEGORIES.items()
    }
    examples = {name: [rows[:EXAMPLES] for rows in columns] for name, columns in found.items()}
    text = pages.render(
        "results",
        given=given,
        figures={name: [_number(e.figures.get(name)) for e in given] for name in names},
        counts={
            name: [_share(len(r), len(e.rows)) for r, e in zip(columns, given, strict=True)]
            for name, columns in found.items()
        },
        examples=examples,
        differences=[pairs for other in given[1:] for pairs in _differences(given[0], other)],
        settings={k: v for k, v in settings.items() if len(given) == 1 or len(set(v)) > 1},
        characters=CHARACTERS,
        long=LONG,
    )
    replace_file(page, text)
    return page


def _named_by_model(given: list[Evaluation]) -> list[Evaluation]:
    """Evaluations of several models, which are numbered, get the models' names."""
    models = [str(e.settings.get("model.name", "")) for e in given]
    numbered = len(given) > 1 and all(e.name.isdecimal() for e in given)
    if not numbered or len(set(models)) < len(given):
        return given
    return [e._replace(name=model) for e, model in zip(given, models, strict=True)]


def _differences(one: Evaluation, other: Evaluation) -> list[tuple[str, list[Pair]]]:
    """Pairs of responses to the same prompt's same sample of which one is right, with a title."""
    theirs = {(row["prompt_id"], row["sample"]): row for row in other.rows}
    keyed = [(row, theirs.get((row["prompt_id"], row["sample"]))) for row in one.rows]
    pairs = [(a, b) for a, b in keyed if b is not None and is_right(a) != is_right(b)]
    found = []
    for winner, first in ((one.name, True), (other.name, False)):
        chosen = [pair for pair in pairs if is_right(pair[0]) == first]
        title = f"only {winner} is right: {len(chosen):,} of {len(keyed):,}"
        found.append((title, chosen[:EXAMPLES]))
    return found


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:z.4f}"


def _share(count: int, total: int) -> str:
    return f"{count:,} ({count / max(1, total):.1%})"
