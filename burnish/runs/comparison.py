"""Several runs over each other: a page with their curves, and the figures of their ends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

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


class Curve(NamedTuple):
    """One line of a comparison: runs that differ in nothing but their seed."""

    label: str
    seeds: list[int]
    runs: list[Series]


def write_comparison(paths: Sequence[Path], page: Path) -> list[Curve]:
    """Writes a page with a chart for each metric, and returns the curves in it.

    Runs that differ only in their seed share a line and a band.
    """
    curves = group_by_settings(paths)
    metrics = dict.fromkeys(name for curve in curves for run in curve.runs for name in run)
    data = {
        "labels": [
            curve.label + (f" ({len(curve.seeds)} seeds)" if curve.seeds[1:] else "")
            for curve in curves
        ],
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
    curves: dict[str, Curve] = {}
    for path, recipe in zip(paths, recipes, strict=True):
        run = collect(iterate_rows(path / "metrics.jsonl"))
        if "train/version" not in run:
            raise RunError(f"{path} has no finished step yet")
        parts = [f"{_short(k)} = {recipe[k]}" for k in differing if k in recipe]
        label = ", ".join(parts) or str(recipe.get("name", path.name))
        curve = curves.setdefault(label, Curve(label, [], []))
        curve.seeds.append(recipe.get("seed", 0))
        curve.runs.append(run)
    return list(curves.values())


def _short(key: str) -> str:
    """A setting's name; a piece of the objective is known by its kind."""
    return key.removesuffix(".name") if key.startswith("objective.") else key


def ends(curve: Curve) -> dict[str, list[float]]:
    """The figures of ``ENDS``, a value for each run; NaN where it was not measured."""
    return {name: [_last(run, metric) for run in curve.runs] for name, metric in ENDS.items()}


def _last(run: Series, metric: str) -> float:
    values = [value for _, value in run.get(metric, ())] or [float("nan")]
    return values[-1] if metric.startswith("validation/") else end_means(values)[1]


def _line(curve: Curve, metric: str) -> dict[str, Any]:
    """Mean and standard deviation over the runs, at the steps at which all of them measured it."""
    found = [dict(run.get(metric, ())) for run in curve.runs]
    steps = sorted(set.intersection(*map(set, found)))
    values = np.array([[run[step] for step in steps] for run in found])
    mean, spread = (
        thin(metric, list(zip(steps, over, strict=True)))
        for over in (values.mean(0).tolist(), values.std(0).tolist())
    )
    return {"points": mean, "spread": [value for _, value in spread] if found[1:] else None}
