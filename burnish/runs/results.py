"""Results of evaluations: accuracy with its confidence interval, categories of responses, and a
page that shows one evaluation or compares several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from math import comb, sqrt
from pathlib import Path
from typing import Any, NamedTuple

from burnish.runs import pages
from burnish.runs.directory import load_json, replace_file
from burnish.runs.metrics import iterate_rows
from burnish.runs.responses import ResponseRow
from burnish.types import ENDINGS, Status

Z = 1.959963984540054
"""Two-sided 95% quantile of the standard normal distribution."""


def is_correct(row: ResponseRow) -> bool:
    """Return whether the task counts the response as correct.

    Rows of older runs have no such field. Their responses are correct if they sorted the numbers,
    or if their reward before the length penalty was 1.
    """
    if "correct" in row:
        return row["correct"] is True
    parts = row["parts"]
    return bool(parts.get("sorted", (row["reward"] or 0.0) - parts.get("length", 0.0)) > 1 - 1e-6)


def has_format(row: ResponseRow) -> bool:
    """Return whether a response has the format of answers: its part "format" or, without this part,
    whether it could be parsed."""
    return bool(row["parts"].get("format", row["status"] != Status.UNPARSED))


def is_wrong(row: ResponseRow) -> bool:
    """Return whether a response was graded and is not correct."""
    return not is_correct(row) and row["status"] != Status.ERROR


CATEGORIES: dict[str, Callable[[ResponseRow], bool]] = {
    "format and answer right": is_correct,
    "format right, answer wrong": lambda row: is_wrong(row) and has_format(row),
    "format wrong": lambda row: is_wrong(row) and not has_format(row),
    "unparsed": lambda row: row["status"] == Status.UNPARSED,
    "truncated": lambda row: row["finish"] == ENDINGS["truncated"],
    "timed out": lambda row: row["status"] == Status.TIMEOUT,
    "grader failed": lambda row: row["status"] == Status.ERROR,
}
"""Categories of responses by name, each with the function that decides whether a row belongs to it.
Every response is in exactly one of the first three and the last; the others overlap with them."""


class Evaluation(NamedTuple):
    """Results of a model on held-out prompts."""

    name: str
    settings: dict[str, Any]
    """All settings and inputs that the results depend on."""
    figures: dict[str, float]
    rows: list[ResponseRow]
    """One row per response."""
    path: Path
    """Directory of the evaluation."""

    def __repr__(self) -> str:
        figures = ", ".join(f"{name} {value:.4g}" for name, value in self.figures.items())
        return f"Evaluation of {self.name}: {figures}"


def read_evaluation(directory: Path) -> Evaluation:
    """Read settings.json, figures.json and results.jsonl of an evaluation's directory."""
    settings, figures = (load_json(directory / f"{name}.json") for name in ("settings", "figures"))
    rows = list(iterate_rows(directory / "results.jsonl"))
    # The directories of evaluations of several models are numbered: use the models' names.
    name = settings["model.name"] if directory.name.isdecimal() else directory.name
    return Evaluation(name, settings, figures, rows, directory)


def write_evaluation(directories: Sequence[Path], page: Path) -> Path:
    """Write a page with the metrics, categories and examples of the evaluations in these
    directories; return its path. If there are several, settings that are the same in all of them
    are left out."""
    given = [read_evaluation(directory) for directory in directories]
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
    """Return the ends of the 95% score interval of the proportion successes / trials (Wilson 1927).
    The arguments need not be integers; ``trials`` is not 0."""
    share, spread = successes / trials, Z * Z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def interval(shares: Sequence[float], samples: int) -> tuple[float, float]:
    """Return the 95% confidence interval of the mean of ``shares``, the share of correct samples of
    each prompt; ``samples`` is the number of samples per prompt.

    This is Wilson's interval with the effective number of trials that matches the variance between
    prompts. That number is the number of prompts if all samples of a prompt agree (always true for
    one sample per prompt), and at most prompts × samples, if all samples are independent.
    """
    count, mean = len(shares), sum(shares) / len(shares)
    variance = sum((share - mean) ** 2 for share in shares) / count
    ratio = mean * (1 - mean) / variance if variance else samples * (mean not in (0, 1))
    trials = count * min(max(ratio, 1), samples)
    return wilson(mean * trials, trials)


def estimate_pass_at_k(right: int, samples: int, k: int) -> float:
    """Return the unbiased estimate of pass@k (https://arxiv.org/abs/2107.03374) for a prompt with
    n = ``samples`` responses, of which c = ``right`` are correct.

    1 − C(n − c, k) / C(n, k): the share of subsets of k samples that contain a correct one.
    """
    return 1 - comb(samples - right, k) / comb(samples, k)


def majority(rows: Sequence[ResponseRow]) -> bool:
    """Return whether the most frequent answer to a prompt is correct. ``rows`` are the responses to
    the prompt, each with its "answer" or None.

    Of equally frequent answers, the first one counts. If no response has an answer, return False.
    """
    votes = Counter(row["answer"] for row in rows if row["answer"] is not None)
    if not votes:
        return False
    ((winner, _),) = votes.most_common(1)
    return next(is_correct(row) for row in rows if row["answer"] == winner)


def accuracy(prompts: Sequence[Sequence[ResponseRow]]) -> dict[str, float]:
    """Return accuracy, its confidence interval (accuracy_low, accuracy_high), and pass_at_k and
    majority_at_k for k = 2, 4, … and all samples.

    ``prompts`` has the responses to each prompt, at least one per prompt; the smallest number
    counts as "all". Majority@k uses the first k samples. Without prompts, the result is empty.
    """
    if not prompts:
        return {}
    right = [sum(map(is_correct, rows)) for rows in prompts]
    shares = [count / len(rows) for count, rows in zip(right, prompts, strict=True)]
    samples = min(map(len, prompts))
    low, high = interval(shares, samples)
    figures = {"accuracy": sum(shares) / len(shares), "accuracy_low": low, "accuracy_high": high}
    for k in sorted({*(2**i for i in range(1, samples.bit_length())), samples} - {1}):
        passes = (
            estimate_pass_at_k(c, len(rows), k) for c, rows in zip(right, prompts, strict=True)
        )
        figures[f"pass_at_{k}"] = sum(passes) / len(prompts)
        figures[f"majority_at_{k}"] = sum(majority(rows[:k]) for rows in prompts) / len(prompts)
    return figures
