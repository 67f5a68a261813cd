"""Evaluations and their page, one or several side by side: how often a model was right, how sure
that figure is, and how the model was wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import comb, sqrt
from pathlib import Path
from typing import Any, NamedTuple

from burnish.runs import pages
from burnish.runs.directory import read_json, replace_file
from burnish.runs.metrics import iterate_rows
from burnish.runs.responses import ResponseRow
from burnish.types import ENDINGS, Status

Z = 1.959963984540054
"""95% of a normal distribution lie within so many standard deviations."""


def is_right(row: ResponseRow) -> bool:
    """Whether the task counts the response as correct. Rows of older runs have no such field: there
    a response is correct that sorted, or earned 1 before its length penalty."""
    if "correct" in row:
        return row["correct"] is True
    parts = row["parts"]
    return bool(parts.get("sorted", (row["reward"] or 0.0) - parts.get("length", 0.0)) > 1 - 1e-6)


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
    """Writes a page with the figures, categories and examples of each evaluation."""
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
        settings={k: v for k, v in settings.items() if len(given) == 1 or len(set(v)) > 1},
    )
    replace_file(page, text)
    return page


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """The 95% score interval of a share (Wilson 1927)."""
    share, spread = successes / trials, Z * Z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def interval(shares: Sequence[float], samples: int) -> tuple[float, float]:
    """The 95% interval of the mean over prompts, each of which has its share of right samples.

    Wilson's, for as many trials as would leave the mean as uncertain as the prompts' own spread
    does: the number of prompts where a prompt's samples all agree (always, with one each), up to
    the number of samples where they are independent.
    """
    count, mean = len(shares), sum(shares) / len(shares)
    variance = sum((share - mean) ** 2 for share in shares) / count
    ratio = mean * (1 - mean) / variance if variance else samples * (mean not in (0, 1))
    trials = count * min(max(ratio, 1), samples)
    return wilson(mean * trials, trials)


def pass_at_k(right: int, samples: int, k: int) -> float:
    """The chance that one of k samples is right, without bias (https://arxiv.org/abs/2107.03374).

    1 − C(n − c, k) / C(n, k): the share of choices of k samples that hold a right one.
    """
    return 1 - comb(samples - right, k) / comb(samples, k)


def majority(rows: Sequence[ResponseRow]) -> bool:
    """Whether the answer that most samples give is right; of equals, the one given first."""
    votes = Counter(row["answer"] for row in rows if row["answer"] is not None)
    if not votes:
        return False
    ((winner, _),) = votes.most_common(1)
    return next(is_right(row) for row in rows if row["answer"] == winner)


def accuracy(prompts: Sequence[Sequence[ResponseRow]]) -> dict[str, float]:
    """Accuracy with its interval; pass@k and majority@k for k = 2, 4, … and all samples.

    ``prompts`` has the responses to each prompt, at least one. Majority@k takes the first k
    samples. The figures are empty without a prompt.
    """
    if not prompts:
        return {}
    right = [sum(map(is_right, rows)) for rows in prompts]
    shares = [count / len(rows) for count, rows in zip(right, prompts, strict=True)]
    samples = min(map(len, prompts))
    low, high = interval(shares, samples)
    figures = {"accuracy": sum(shares) / len(shares), "accuracy_low": low, "accuracy_high": high}
    for k in sorted({*(2**i for i in range(1, samples.bit_length())), samples} - {1}):
        passes = (pass_at_k(c, len(rows), k) for c, rows in zip(right, prompts, strict=True))
        figures[f"pass_at_{k}"] = sum(passes) / len(prompts)
        figures[f"majority_at_{k}"] = sum(majority(rows[:k]) for rows in prompts) / len(prompts)
    return figures
