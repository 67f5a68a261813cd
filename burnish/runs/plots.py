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
from burnish.runs.metrics import end_means, iterate_rows, smooth
from burnish.sections import nearest

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = list[dict[str, Any]]
REWARD, LOSS, KL = "rollout/reward", "train/loss", "kl/initial_k1"
NAMES = {REWARD: "reward", LOSS: "loss", KL: "KL to the initial model, nats per token (k1)"}
"""Words at the axes; other metrics go by their names."""
ENDS = {
    "reward": (REWARD, True),
    "held out": ("validation/reward", False),
    "inclusion": ("validation/part_inclusion", False),
    "ended": ("validation/ended", False),
    "KL k1": (KL, True),
    "KL k3": ("kl/initial_k3", True),
}
"""Columns of a comparison: a metric, and whether the mean over the run's last steps is taken."""
LETTERS = 50
"""Letters of a legend that stand side by side under one panel."""


class Curve(NamedTuple):
    """One line of a comparison: runs that differ in nothing but their seed."""

    label: str
    seeds: list[int]
    rows: list[Rows]


def draw_comparison(paths: Sequence[Path], out: Path, metrics: Sequence[str] = ()) -> list[Curve]:
    """Several runs in one picture; runs that differ only in their seed share a line and a band.

    A panel for each metric; by default for the reward and for the KL to the initial model, or for
    the loss where not every run measured the KL.
    """
    curves = group_by_settings(paths)
    runs = [run for curve in curves for run in curve.rows]
    known = sorted({key for run in runs for row in run for key in row})
    for metric in metrics:
        if not all(measured(run, metric) for run in runs):
            why = "not every run measured" if metric in known else "no run measured"
            raise RunError(f"{why} {metric!r}{nearest(metric, [k for k in known if k != metric])}")
    second = KL if all(measured(run, KL) for run in runs) else LOSS
    _draw(curves, out, metrics or (REWARD, second))
    return curves


def group_by_settings(paths: Sequence[Path]) -> list[Curve]:
    """The runs as curves, each named by the settings in which the runs differ."""
    recipes = [flat(read_recipe(path)) for path in paths]
    rows = [list(iterate_rows(path / "metrics.jsonl")) for path in paths]
    ignored = {"seed", "description", "name"}
    keys = sorted({key for recipe in recipes for key in recipe} - ignored)
    # A setting that only some runs have belongs to a piece that differs; the piece says it all.
    values = {key: {repr(recipe[key]) for recipe in recipes if key in recipe} for key in keys}
    differing = [key for key in keys if len(values[key]) > 1]
    curves: dict[str, Curve] = {}
    for path, recipe, run in zip(paths, recipes, rows, strict=True):
        if not measured(run, REWARD):
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


def measured(run: Rows, metric: str) -> bool:
    return any(metric in row for row in run)


def ends(curve: Curve) -> dict[str, list[float]]:
    """The figures of ``ENDS``, a value for each run; NaN where it was not measured."""

    def last(run: Rows, metric: str, averaged: bool) -> float:
        values = [row[metric] for row in run if metric in row]
        if not values:
            return float("nan")
        return float(end_means(values)[1] if averaged else values[-1])

    return {name: [last(run, *what) for run in curve.rows] for name, what in ENDS.items()}


def _draw(curves: Sequence[Curve], out: Path, metrics: Sequence[str]) -> None:
    # Imported here: the rest of the package does not need it, and it takes half a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    shape = ((len(metrics) + 1) // 2, min(2, len(metrics)))
    figure = Figure(figsize=(5.0 * shape[1], 3.8 * shape[0]), layout="constrained")
    for number, metric in enumerate(metrics, 1):
        _draw_panel(figure.add_subplot(*shape, number), curves, metric)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    room = LETTERS * shape[1]
    columns = 2 if max(map(len, labels)) < room // 2 else 1
    # A line may break between settings, not within one.
    labels = [fill(label.replace(" = ", "\u00a0=\u00a0"), room) for label in labels]
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
    temporary = out.with_name(f".{out.name}.new")
    FigureCanvasAgg(figure).print_png(str(temporary))  # type: ignore[no-untyped-call]
    temporary.replace(out)


def _draw_panel(axes: Axes, curves: Sequence[Curve], metric: str) -> None:
    """A metric at the steps at which all runs of a curve measured it; smoothed if at every one."""
    for number, curve in enumerate(curves):
        colour = f"C{number}"
        found = [{row["step"]: row[metric] for row in run if metric in row} for run in curve.rows]
        steps = sorted(set.intersection(*map(set, found)))
        values = [[run[step] for step in steps] for run in found]
        every = len(steps) == steps[-1] - steps[0] + 1 if steps else False
        shown = np.array([smooth(run) if every else run for run in values])
        mean, spread = shown.mean(0), shown.std(0)
        if len(values) == 1 and every:
            axes.plot(steps, values[0], color=colour, alpha=0.25, linewidth=0.8)
        low, high = mean - spread, mean + spread
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, linewidth=0)
        label = curve.label + (f" ({len(values)} seeds)" if len(values) > 1 else "")
        axes.plot(steps, mean, "-" if every else "o-", color=colour, lw=1.8, ms=4, label=label)
    axes.set_xlabel("step (one rollout and its gradient steps)")
    axes.set_ylabel(NAMES.get(metric, metric))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
