"""Evaluations and their page, one or several side by side: how often a model was right, and how it
was wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from burnish.runs import pages
from burnish.runs.directory import read_json, replace_file
from burnish.runs.metrics import iterate_rows
from burnish.runs.responses import ResponseRow
from burnish.runs.statistics import is_right
from burnish.types import ENDINGS, Status


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
    settings, figures = (read_json(directory / f"{name}.json") for name in ("settings", "figures"))
    rows = list(iterate_rows(directory / "results.jsonl"))
    # Evaluations of several models, which are numbered, go by the models' names.
    name = settings["model.name"] if directory.name.isdecimal() else directory.name
    return Evaluation(name, settings, figures, rows, directory)


def write_evaluation(directories: Sequence[Path], page: Path) -> Path:
    """Writes a page with the figures, categories and examples of each evaluation, and the prompts
    that they answered differently."""
    given = [read(directory) for directory in directories]
    settings = {
        key: [str(e.settings.get(key, "–")) for e in given] for e in given for key in e.settings
    }
    categories = {
        name: [[row for row in e.rows if holds(row)] for e in given]
        for name, holds in CATEGORIES.items()
    }
    text = pages.render(
        "results",
        given=given,
        figures=dict.fromkeys(name for e in given for name in e.figures),
        categories=categories,
        differences=[pairs for other in given[1:] for pairs in _differences(given[0], other)],
        settings={k: v for k, v in settings.items() if len(given) == 1 or len(set(v)) > 1},
    )
    replace_file(page, text)
    return page


def _differences(one: Evaluation, other: Evaluation) -> list[tuple[str, list[Any]]]:
    """Pairs of responses to the same prompt's same sample of which one is right, with a title."""
    theirs = {(row["prompt_id"], row["sample"]): row for row in other.rows}
    pairs = [(row, theirs.get((row["prompt_id"], row["sample"]))) for row in one.rows]
    found = []
    for winner, first in ((one.name, True), (other.name, False)):
        chosen = [
            (a, b) for a, b in pairs if b and is_right(a) is first and is_right(b) is not first
        ]
        found.append((f"only {winner} is right: {len(chosen):,} of {len(pairs):,}", chosen))
    return found
