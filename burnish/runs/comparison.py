"""Several runs over each other: a page with their curves, and the figures of their ends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from burnish.config import flat
from burnish.errors import RunError
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
"""Columns of a comparison: the last validation, or the mean of a metric over the last steps."""
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Student's t for 1, 2, … degrees of freedom: 95% lie within it on both sides."""


class Curve(NamedTuple):
    """One line of a comparison: runs that differ in nothing but their seed."""

    label: str
    seeds: list[int]
    runs: list[Series]


def write_comparison(
    paths: Sequence[Path],
    page: Path,
    *,
    labels: Sequence[str] | None = None,
    title: str = "Runs compared",
    about: str = "",
) -> list[Curve]:
    """Writes a page with a chart for each metric, and returns the curves in it.

    Runs of one label share a line and a band. ``labels`` is None if runs that differ only in their
    seed are to share it.
    """
    curves = group_by_settings(paths) if labels is None else group(paths, labels)
    metrics = dict.fromkeys(name for curve in curves for run in curve.runs for name in run)
    data = {
        "title": title,
        "about": about,
        "labels": [curve.label for curve in curves],
        "seeds": [len(curve.seeds) for curve in curves],
        "metrics": {name: [_line(curve, name) for curve in curves] for name in metrics},
    }
    replace_file(page, pages.render("comparison", data=pages.encode(data)))
    return curves


def group_by_settings(paths: Sequence[Path]) -> list[Curve]:
    """The runs as curves, each named by the settings in which the runs differ."""
    recipes = [flat(read_recipe(path)) for path in paths]
    keys = sorted({key for recipe in recipes for key in recipe} - {"seed", "description", "name"})
    # A setting that only some runs have belongs to a piece that differs; the piece says it all.
    values = {key: {repr(recipe[key]) for recipe in recipes if key in recipe} for key in keys}
    differing = [key for key in keys if len(values[key]) > 1]
    labels = []
    for path, recipe in zip(paths, recipes, strict=True):
        parts = [f"{_short(k)} = {recipe[k]}" for k in differing if k in recipe]
        labels.append(", ".join(parts) or str(recipe.get("name", path.name)))
    return group(paths, labels)


def group(paths: Sequence[Path], labels: Sequence[str]) -> list[Curve]:
    """The runs as curves, one for each label."""
    curves: dict[str, Curve] = {}
    for path, label in zip(paths, labels, strict=True):
        run = collect(iterate_rows(path / "metrics.jsonl"))
        if "train/version" not in run:
            raise RunError(f"{path} has no finished step yet")
        curve = curves.setdefault(label, Curve(label, [], []))
        curve.seeds.append(read_recipe(path).get("seed", 0))
        curve.runs.append(run | _sums(run, collect(iterate_rows(path / "timings.jsonl"))))
    return list(curves.values())


def _sums(metrics: Series, timings: Series) -> Series:
    """What a run has cost up to each step: tokens that it sampled and that it learned from, and
    seconds, without those of its evaluations."""
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
    """A setting's name; a piece of the objective is known by its kind."""
    return key.removesuffix(".name") if key.startswith("objective.") else key


def ends(curve: Curve) -> dict[str, list[float]]:
    """The figures of ``ENDS``, a value for each run; NaN where it was not measured."""
    return {name: [_last(run, metric) for run in curve.runs] for name, metric in ENDS.items()}


def tabulate(curves: Sequence[Curve]) -> list[list[str]]:
    """Rows of a table: the figures that any run has, by seed, with mean and std of each curve.

    The std is unbiased: it divides by the number of runs − 1.
    """
    found = [(curve, ends(curve)) for curve in curves]
    shown = [name for name in ENDS if any(np.isfinite(end[name]).any() for _, end in found)]
    rows = [["", *shown]]
    for curve, end in found:
        rows.append([curve.label])
        columns = [end[name] for name in shown]
        for seed, *values in sorted(zip(curve.seeds, *columns, strict=True)):
            told = ("–" if np.isnan(value) else f"{value:z.3f}" for value in values)
            rows.append([f"  seed {seed}", *told])
        if len(curve.seeds) > 1:
            for name, over in (("mean", np.mean), ("std", partial(np.std, ddof=1))):
                rows.append([f"  {name}", *(f"{over(values):z.3f}" for values in columns)])
    return rows


def _last(run: Series, metric: str) -> float:
    values = [value for _, value in run.get(metric, ())] or [float("nan")]
    return values[-1] if metric.startswith("validation/") else end_means(values)[1]


def _line(curve: Curve, metric: str) -> dict[str, Any]:
    """Mean and interval over the runs, at the steps at which all of them measured it."""
    found = [dict(run.get(metric, ())) for run in curve.runs]
    steps = sorted(set.intersection(*map(set, found)))
    values = np.array([[run[step] for step in steps] for run in found])
    mean, spread = (
        thin(metric, list(zip(steps, over, strict=True)))
        for over in (values.mean(0).tolist(), half_width(values).tolist())
    )
    return {"points": mean, "spread": [value for _, value in spread] if found[1:] else None}


def half_width(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Half the 95% interval of the mean over the first axis, by Student's t; 0 for one value."""
    freedom = len(values) - 1
    if freedom == 0:
        return np.zeros_like(values[0])
    t = 1.96 + 2.372 / freedom + 2.823 / freedom**2  # the start of its series at infinity
    t = STUDENT[freedom - 1] if freedom <= len(STUDENT) else t
    return np.asarray(t * values.std(0, ddof=1) / np.sqrt(len(values)))
