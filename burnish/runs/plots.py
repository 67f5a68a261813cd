"""Pictures of runs, made from their directories."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from burnish.config import flat
from burnish.errors import RunError
from burnish.runs.directory import read_recipe
from burnish.runs.metrics import end_means, read_rows
from burnish.sections import nearest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS = (("rollout/reward", "reward"), ("train/loss", "loss"))
SMOOTHING = 5
ENDS = {
    "reward": ("rollout/reward", True),
    "held out": ("validation/reward", False),
    "inclusion": ("validation/part_inclusion", False),
    "ended": ("validation/ended", False),
    "KL k1": ("kl/initial_k1", True),
    "KL k3": ("kl/initial_k3", True),
}
"""Columns of a comparison: a metric, and whether the mean over the run's last steps is taken."""
COLOURS = ("#3465a4", "#cc7a00", "#2e8b57", "#a33b5c", "#6b4fa0", "#5c6b73", "#8c6d1f", "#17808a")


LETTERS = 50
"""Letters of a legend that stand side by side under one panel."""


class Curve(NamedTuple):
    """One line of a comparison: runs that differ in nothing but their seed."""

    label: str
    seeds: list[int]
    rows: list[list[dict[str, Any]]]


def draw_run(path: Path) -> Path:
    """Loss and reward of one run, as ``curves.png`` in its directory."""
    recipe = read_recipe(path)
    curve = Curve("", [recipe.get("seed", 0)], [read_rows(path / "metrics.jsonl")])
    title = f"{recipe.get('name', path.name)}, seed {curve.seeds[0]}"
    return _draw([curve], path / "curves.png", title=title)


def draw_comparison(paths: Sequence[Path], out: Path, metrics: Sequence[str] = ()) -> list[Curve]:
    """Several runs in one picture; runs that differ only in their seed share a line and a band.

    A panel for each metric, or reward and loss (KL, where all measured it).
    """
    curves = group_by_settings(paths)
    known = sorted({key for curve in curves for run in curve.rows for row in run for key in row})
    for metric in metrics:
        if not all(any(metric in row for row in run) for curve in curves for run in curve.rows):
            why = "not every run measured" if metric in known else "no run measured"
            raise RunError(f"{why} {metric!r}{nearest(metric, [k for k in known if k != metric])}")
    _draw(curves, out, metrics)
    return curves


def group_by_settings(paths: Sequence[Path]) -> list[Curve]:
    """The runs as curves, each named by the settings in which the runs differ."""
    recipes = [flat(read_recipe(path)) for path in paths]
    rows = [read_rows(path / "metrics.jsonl") for path in paths]
    ignored = {"seed", "description", "name"}
    keys = sorted({key for recipe in recipes for key in recipe} - ignored)
    # A setting that only some runs have belongs to a piece that differs; the piece says it all.
    values = {key: {repr(recipe[key]) for recipe in recipes if key in recipe} for key in keys}
    differing = [key for key in keys if len(values[key]) > 1]
    curves: dict[str, Curve] = {}
    for path, recipe, run in zip(paths, recipes, rows, strict=True):
        if not all(any(metric in row for row in run) for metric, _ in PANELS):
            raise RunError(f"{path} has no finished step yet")
        parts = [f"{_short(k)} = {recipe[k]}" for k in differing if k in recipe]
        label = ", ".join(parts) or str(recipe.get("name", path.name))
        curve = curves.setdefault(label, Curve(label, [], []))
        curve.seeds.append(recipe.get("seed", 0))
        curve.rows.append(run)
    return list(curves.values())


def _short(key: str) -> str:
    """A setting's name; a piece of the objective is known by its kind."""
    return key.removesuffix(".name") if key.startswith("objective.") else key


def ends(curve: Curve) -> dict[str, list[float]]:
    """The figures of ``ENDS``, a value for each run; NaN where it was not measured."""

    def last(run: list[dict[str, Any]], metric: str, averaged: bool) -> float:
        values = [row[metric] for row in run if metric in row]
        if not values:
            return float("nan")
        return float(end_means(values)[1] if averaged else values[-1])

    return {name: [last(run, *what) for run in curve.rows] for name, what in ENDS.items()}


def _draw(
    curves: Sequence[Curve], out: Path, metrics: Sequence[str] = (), title: str | None = None
) -> Path:
    # Imported here: the rest of the package does not need it, and it takes half a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = [(metric, metric) for metric in metrics] or PANELS
    shape = ((len(panels) + 1) // 2, min(2, len(panels)))
    figure = Figure(figsize=(5.0 * shape[1], 3.8 * shape[0]), layout="constrained")
    places = list(figure.subplots(*shape, squeeze=False).flat)
    drifts = len(curves) > 1 and all(np.isfinite(ends(c)["KL k1"]).all() for c in curves)
    for axes, (metric, name) in zip(places, panels, strict=False):
        if drifts and (metric, name) == PANELS[1]:
            _draw_frontier(axes, curves)
        else:
            _draw_steps(axes, curves, metric, name)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in places[len(panels) :]:
        axes.remove()
    if len(curves) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        room = LETTERS * shape[1]
        columns = 2 if max(map(len, labels)) < room // 2 else 1
        # A line may break between settings, not within one.
        labels = [fill(label.replace(" = ", "\u00a0=\u00a0"), room) for label in labels]
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    if title:
        figure.suptitle(title, fontsize=10)
    temporary = out.with_name(f".{out.name}.new")
    FigureCanvasAgg(figure).print_png(str(temporary))  # type: ignore[no-untyped-call]
    temporary.replace(out)
    return out


def _draw_steps(axes: Axes, curves: Sequence[Curve], metric: str, name: str) -> None:
    """A metric at the steps at which all runs of a curve measured it; of every step, smoothed."""
    for curve, colour in zip(curves, _colours(len(curves)), strict=True):
        found = [{row["step"]: row[metric] for row in run if metric in row} for run in curve.rows]
        steps = sorted(set.intersection(*map(set, found)))
        values = np.array([[run[step] for step in steps] for run in found])
        every = len(steps) == steps[-1] - steps[0] + 1 if steps else False
        smooth = np.apply_along_axis(_smooth, 1, values) if every else values
        mean, spread = smooth.mean(0), smooth.std(0)
        if len(curve.rows) == 1 and every:
            axes.plot(steps, values[0], color=colour, alpha=0.25, linewidth=0.8)
        low, high = mean - spread, mean + spread
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        line = "-" if every else "o-"
        axes.plot(steps, mean, line, color=colour, lw=1.8, ms=4, label=_legend(curve))
    axes.set_xlabel("step (one rollout and its gradient steps)")
    axes.set_ylabel(name)


def _draw_frontier(axes: Axes, curves: Sequence[Curve]) -> None:
    """The reward of each setting at the end, against its KL to the initial model."""
    found = [ends(curve) for curve in curves]
    checked = all(np.isfinite(end["held out"]).all() for end in found)
    for end, colour in zip(found, _colours(len(curves)), strict=True):
        x, y = end["KL k1"], end["held out" if checked else "reward"]
        if len(x) > 1:
            axes.scatter(x, y, s=14, color=colour, alpha=0.5, linewidth=0)
        middle, spread = (np.mean(x), np.mean(y)), (np.std(x), np.std(y))
        axes.errorbar(*middle, *spread[::-1], fmt="o", color=colour, markersize=7, capsize=2)
    axes.set_xlabel("KL to the initial model, nats per token (k1), last steps")
    axes.set_ylabel("held-out reward at the end" if checked else "reward at the end")


def _legend(curve: Curve) -> str:
    seeds = len(curve.seeds)
    return f"{curve.label} ({seeds} seeds)" if seeds > 1 else curve.label


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _smooth(values: np.ndarray) -> np.ndarray:
    """Trailing mean over a few steps; the first steps over what there is."""
    total = np.cumsum(values)
    counts = np.minimum(np.arange(1, len(values) + 1), SMOOTHING)
    before = np.concatenate([np.zeros(SMOOTHING), total])[: len(values)]
    return np.asarray((total - before) / counts)
