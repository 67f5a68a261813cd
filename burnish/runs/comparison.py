"""Comparison of runs: a page with their curves, and a table of their final metrics."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from burnish.console.text import counted
from burnish.errors import RunError
from burnish.recipe.load import flatten
from burnish.runs import pages
from burnish.runs.directory import read_recipe, replace_file
from burnish.runs.metrics import Series, collect, end_means, iterate_rows
from burnish.runs.report import thin

ENDS = {
    "reward": "rollout/reward",
    "held out": "validation/reward",
    "inclusion": "validation/part_inclusion",
    "ended": "validation/ended",
    "KL k1": "kl/initial_k1",
    "KL k3": "kl/initial_k3",
}
"""Columns of the table and their metrics. A cell is the last value of a validation metric, or the
mean of another metric over the last steps."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95% quantile of Student's t distribution for 1, 2, … degrees of freedom."""


NUMBERLESS = (
    *("seed", "name", "description", "log", "checkpoint", "validation.every"),
    *("train.mismatch_mean", "train.mismatch_max", "rollout.max_errors", "task.workers"),
    *("engine.python", "engine.url", "engine.key", "engine.deadline"),
    *("runtime.address", "runtime.deadline", "runtime.transport"),
)
"""Settings and sections that change no number of a curve except by the seed: names, records,
intervals, stop conditions, and the places where components run."""
BAND = 4
"""Number of seeds from which a line has a confidence band. Fewer seeds have a thin line each,
because an interval of two or three values says little."""


class Curve(NamedTuple):
    """One line of a chart: runs that differ only in their seed."""

    label: str
    seeds: list[int]
    runs: list[Series]
    paths: list[Path]
    """The directories of the runs."""


def write_comparison(
    paths: Sequence[Path],
    page: Path,
    *,
    labels: Sequence[str] | None = None,
    title: str = "Runs compared",
    about: str = "",
) -> list[Curve]:
    """Write a page that compares runs, with a chart for each metric; return its curves.

    ``paths`` are the runs' directories. Runs with the same label share a line, with a confidence
    band or a thin line for each seed. ``labels`` has one label per run; if it is None, runs that
    differ only in their seed share a line. ``about`` is a text below the title. Each run is named
    and linked to its report.html, relative to the page. Raise a RunError if a run has no finished
    step.
    """
    curves = group_by_settings(paths) if labels is None else group(paths, labels)
    metrics = dict.fromkeys(name for curve in curves for run in curve.runs for name in run)
    data = {
        "title": title,
        "about": ". ".join(filter(None, [about, *describe_lengths(curves)])),
        "labels": [curve.label for curve in curves],
        "seeds": [len(curve.seeds) for curve in curves],
        "runs": [_links(curve, page) for curve in curves],
        "metrics": {name: [_line(curve, name) for curve in curves] for name in metrics},
    }
    replace_file(page, pages.render("comparison", data=pages.to_script_json(data)))
    return curves


def describe_lengths(curves: Sequence[Curve]) -> list[str]:
    """Return a note for each run that has not finished, and for each run that has fewer steps than
    the longest one: its final metrics are those of another step."""
    steps = {
        path: int(run["train/version"][-1][0])
        for curve in curves
        for path, run in zip(curve.paths, curve.runs, strict=True)
    }
    most, notes = max(steps.values(), default=0), []
    for path, done in steps.items():
        planned = flatten(read_recipe(path)).get("train.steps")
        of = f" of {planned}" if isinstance(planned, int) and planned >= done else ""
        fewer = f"; the longest run has {most}" if done < most else ""
        count = f"{done}{of} steps" if of else counted(done, "step")
        if not (path / "summary.json").exists():
            notes.append(f"note: {path.resolve().name} did not finish: it has {count}{fewer}")
        elif fewer:
            notes.append(f"note: {path.resolve().name} has {count}{fewer}")
    return notes


def group_by_settings(paths: Sequence[Path]) -> list[Curve]:
    """Read the metrics of runs; return one curve for the runs whose settings are the same, except
    for the seed and other settings in ``NUMBERLESS``. It is labelled with the settings in which the
    given runs differ.

    Raise a RunError if a run has no finished step.
    """
    recipes = [flatten(read_recipe(path)) for path in paths]
    keys = sorted({key for recipe in recipes for key in recipe if not _is_numberless(key)})
    # A setting that only some runs have belongs to a section whose name differs as well.
    values = {key: {repr(recipe[key]) for recipe in recipes if key in recipe} for key in keys}
    differing = [key for key in keys if len(values[key]) > 1]
    same = str(recipes[0].get("name", paths[0].name)) if recipes else ""
    labels = []
    for recipe in recipes:
        parts = [f"{_short(k)} = {recipe[k]}" for k in differing if k in recipe]
        labels.append(", ".join(parts) or same)
    return group(paths, labels)


def _is_numberless(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in NUMBERLESS)


def _links(curve: Curve, page: Path) -> list[dict[str, Any]]:
    """Return the name, the seed and the link to the report of each run of a curve; the link is
    relative to the page, or None if there is no report."""
    rows = []
    for path, seed in zip(curve.paths, curve.seeds, strict=True):
        report = path.resolve() / "report.html"
        target = os.path.relpath(report, page.resolve().parent)
        href = quote(target, errors="surrogateescape") if report.exists() else None
        rows.append({"name": path.resolve().name, "seed": seed, "href": href})
    return rows


def group(paths: Sequence[Path], labels: Sequence[str]) -> list[Curve]:
    """Read the metrics of the runs in the directories ``paths``; return one curve per label.

    ``labels`` has one label per run. Raise a RunError if a run has no finished step.
    """
    curves: dict[str, Curve] = {}
    for path, label in zip(paths, labels, strict=True):
        run = collect(iterate_rows(path / "metrics.jsonl"))
        if "train/version" not in run:
            raise RunError(f"{path} has no finished step yet")
        curve = curves.setdefault(label, Curve(label, [], [], []))
        curve.paths.append(path)
        curve.seeds.append(read_recipe(path).get("seed", 0))
        curve.runs.append(run | _sums(run, collect(iterate_rows(path / "timings.jsonl"))))
    return list(curves.values())


def _sums(metrics: Series, timings: Series) -> Series:
    """Return the cumulative cost of a run at each step: sampled tokens, trained tokens, and seconds
    without evaluations."""
    evaluated = dict(timings.get("time/evaluate", ()))
    seconds = [(step, s - evaluated.get(step, 0.0)) for step, s in timings.get("time/step", ())]
    costs = {
        "sum/sampled": metrics.get("rollout/tokens_sampled", []),
        "sum/tokens": metrics.get("train/tokens", []),
        "sum/seconds": seconds,
    }
    return {
        name: list(zip((s for s, _ in rows), accumulate(v for _, v in rows), strict=True))
        for name, rows in costs.items()
        if rows
    }


def _short(key: str) -> str:
    """Return a setting's name, without ".name" for a component of the objective."""
    return key.removesuffix(".name") if key.startswith("objective.") else key


def ends(curve: Curve) -> dict[str, list[float]]:
    """Return a curve's final metrics: for each column of ``ENDS`` one value per run; NaN where a
    metric was not measured."""
    return {name: [_last(run, metric) for run in curve.runs] for name, metric in ENDS.items()}


def describe_columns(curves: Sequence[Curve]) -> list[str]:
    """Return a note that says which steps the KL in the table of the curves is from, if it has
    one."""
    if not any(
        ENDS[name] in run for name in ENDS if "KL" in name for c in curves for run in c.runs
    ):
        return []
    return [
        "note: KL is in nats per token; reward and KL are means over the last steps of each run"
    ]


def tabulate(curves: Sequence[Curve]) -> list[list[str]]:
    """Return the rows of a table of the curves' final metrics: a heading, and for each curve its
    label, one row per run with its name and seed, and their mean and std. Columns without any value
    are left out.

    The std divides by the number of runs − 1.
    """
    found = [(curve, ends(curve)) for curve in curves]
    shown = [name for name in ENDS if any(np.isfinite(end[name]).any() for _, end in found)]
    rows = [["", *shown]]
    for curve, end in found:
        rows.append([curve.label])
        columns = [end[name] for name in shown]
        names = [path.resolve().name for path in curve.paths]
        for seed, run, *values in sorted(zip(curve.seeds, names, *columns, strict=True)):
            cells = ("–" if np.isnan(value) else f"{value:z.3f}" for value in values)
            rows.append([f"  {run}, seed {seed}", *cells])
        if len(curve.seeds) > 1:
            for name, over in (("mean", np.mean), ("std", partial(np.std, ddof=1))):
                rows.append([f"  {name}", *(f"{over(values):z.3f}" for values in columns)])
    return rows


def _last(run: Series, metric: str) -> float:
    values = [value for _, value in run.get(metric, ())] or [float("nan")]
    return values[-1] if metric.startswith("validation/") else end_means(values)[1]


def _line(curve: Curve, metric: str) -> dict[str, Any]:
    """Return a line for the chart of a metric: its mean over the curve's runs at the steps that all
    runs measured; half the width of the confidence interval, None for a single run; and the line of
    each run, None if there is one run or the line has a band."""
    found = [dict(run.get(metric, ())) for run in curve.runs]
    steps = sorted(set.intersection(*map(set, found)))
    values = np.array([[run[step] for step in steps] for run in found])
    mean, spread = (
        thin(metric, list(zip(steps, over, strict=True)))
        for over in (values.mean(0).tolist(), half_width(values).tolist())
    )
    each = None
    if 1 < len(found) < BAND:
        each = [thin(metric, [(step, run[step]) for step in sorted(run)]) for run in found]
    half = [value for _, value in spread] if found[1:] else None
    return {"points": mean, "spread": half, "each": each}


def half_width(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return half the width of the 95% confidence interval of the mean over the first axis of
    ``values``, by Student's t; 0 if that axis has only one entry."""
    freedom = len(values) - 1
    if freedom == 0:
        return np.zeros_like(values[0])
    t = 1.96 + 2.372 / freedom + 2.823 / freedom**2  # asymptotic expansion for many degrees
    t = STUDENT[freedom - 1] if freedom <= len(STUDENT) else t
    return np.asarray(t * values.std(0, ddof=1) / np.sqrt(len(values)))
