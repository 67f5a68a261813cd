"""Pictures of runs, made from what their directories hold."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from burnish.errors import RunError
from burnish.runs.metrics import read_rows

PANELS = (("rollout/reward", "reward"), ("train/loss", "loss"))
SMOOTHING = 5
COLOURS = ("#3465a4", "#cc7a00", "#2e8b57", "#a33b5c", "#6b4fa0", "#5c6b73", "#8c6d1f", "#17808a")


class Curve(NamedTuple):
    """One line of a comparison: runs that differ in nothing but their seed."""

    label: str
    seeds: list[int]
    rows: list[list[dict[str, Any]]]


def draw_run(path: Path) -> Path:
    """Loss and reward of one run, as ``curves.png`` in its directory."""
    recipe = read_recipe(path)
    curve = Curve("", [recipe.get("seed", 0)], [_steps(path)])
    return _draw(
        [curve], path / "curves.png", f"{recipe.get('name', path.name)}, seed {curve.seeds[0]}"
    )


def draw_comparison(paths: Sequence[Path], out: Path) -> list[Curve]:
    """Several runs in one picture; runs that differ only in their seed share a line and a band."""
    curves = group_by_settings(paths)
    _draw(curves, out, None)
    return curves


def group_by_settings(paths: Sequence[Path]) -> list[Curve]:
    """The runs as curves, each named by the settings in which the runs differ."""
    recipes = [_flat(read_recipe(path)) for path in paths]
    rows = [_steps(path) for path in paths]
    ignored = {"seed", "description", "name"}
    keys = sorted({key for recipe in recipes for key in recipe} - ignored)
    # A setting that only some runs have belongs to a piece that differs; the piece says it all.
    values = {key: {repr(recipe[key]) for recipe in recipes if key in recipe} for key in keys}
    differing = [key for key in keys if len(values[key]) > 1]
    curves: dict[str, Curve] = {}
    for path, recipe, run in zip(paths, recipes, rows, strict=True):
        if not run:
            raise RunError(f"{path} has no finished step yet")
        parts = [f"{k.rpartition('.')[2]} = {recipe[k]}" for k in differing if k in recipe]
        label = ", ".join(parts) or str(recipe.get("name", path.name))
        curve = curves.setdefault(label, Curve(label, [], []))
        curve.seeds.append(recipe.get("seed", 0))
        curve.rows.append(run)
    return list(curves.values())


def final_reward(curve: Curve, window: int = 10) -> tuple[float, float]:
    """Mean over seeds of the reward over the last steps, and the spread between seeds (std)."""
    ends = [np.mean([row["rollout/reward"] for row in run[-window:]]) for run in curve.rows]
    return float(np.mean(ends)), float(np.std(ends))


def _steps(path: Path) -> list[dict[str, Any]]:
    """The rows of training steps; a row of validation alone is left out."""
    rows = read_rows(path / "metrics.jsonl")
    return [row for row in rows if all(metric in row for metric, _ in PANELS)]


def read_recipe(path: Path) -> dict[str, Any]:
    file = path / "recipe.toml"
    if not file.is_file():
        raise RunError(f"{path} is not a run directory: it has no recipe.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def _draw(curves: Sequence[Curve], out: Path, title: str | None) -> Path:
    # Imported here: the rest of the package does not need it, and it takes half a second.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.8), layout="constrained")
    for axes, (metric, name) in zip(figure.subplots(1, 2), PANELS, strict=True):
        for curve, colour in zip(curves, _colours(len(curves)), strict=True):
            steps = min(len(run) for run in curve.rows)
            values = np.array([[row[metric] for row in run[:steps]] for run in curve.rows])
            smooth = np.apply_along_axis(_smooth, 1, values)
            mean, spread = smooth.mean(0), smooth.std(0)
            x = np.arange(1, steps + 1)
            if len(curve.rows) == 1:
                axes.plot(x, values[0], color=colour, alpha=0.25, linewidth=0.8)
            axes.fill_between(
                x, mean - spread, mean + spread, color=colour, alpha=0.15, linewidth=0
            )
            axes.plot(x, mean, color=colour, linewidth=1.8, label=_legend(curve))
        axes.set_xlabel("step (one rollout and its gradient steps)")
        axes.set_ylabel(name)
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    if len(curves) > 1:
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
    if title:
        figure.suptitle(title, fontsize=10)
    temporary = out.with_name(f".{out.name}.new")
    FigureCanvasAgg(figure).print_png(str(temporary))  # type: ignore[no-untyped-call]
    temporary.replace(out)
    return out


def _legend(curve: Curve) -> str:
    seeds = len(curve.seeds)
    return f"{curve.label} ({seeds} seeds)" if seeds > 1 else curve.label


def _colours(count: int) -> list[str]:
    return [COLOURS[i % len(COLOURS)] for i in range(count)]


def _smooth(values: np.ndarray) -> np.ndarray:
    """Trailing mean over a few steps; the first steps over what there is."""
    total = np.cumsum(values)
    window = np.minimum(np.arange(1, len(values) + 1), SMOOTHING)
    before = np.concatenate([np.zeros(SMOOTHING), total])[: len(values)]
    return np.asarray((total - before) / window)
