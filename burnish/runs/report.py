"""``report.html``: one file that shows a run, made from its directory at any time.

The page is a template (templates/report.html with its script) and one block of JSON: the curves and
their figures. Which curves stand together, and under which words, is the script's affair. Model
text is data: it is escaped in the JSON, and the script puts it into the page as text only.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

from burnish.runs import pages, status
from burnish.runs.directory import APPENDED, read_recipe, replace_file
from burnish.runs.drift import read_drift, read_mismatch
from burnish.runs.metrics import Series, collect, combine, end_means, iterate_rows, window
from burnish.runs.responses import excerpt

LIMIT, REACH = 4_000_000, 100_000_000
"""Bytes of a page's responses, and bytes that are read at each end of a file with responses."""
POINTS = 400
"""Points of a line; longer runs are shown as means over several steps."""
FILES = ("recipe.toml", "environment.json", "summary.json", *APPENDED[:-1])
"""A page is made of these."""


def write_report(run: Path, *, limit: int = LIMIT) -> Path:
    """Makes the report of a run that runs, crashed or finished."""
    data = describe(run)
    data["state"] = status.standing(run, data["done"], data["total"], now=time.time())
    data["rollouts"] = excerpt(run, limit, REACH)
    replace_file(run / "report.html", pages.render("report", data=pages.encode(data)))
    return run / "report.html"


def describe(run: Path) -> dict[str, Any]:
    """The data of a run's page, but for its state and its responses."""
    recipe = read_recipe(run)
    series = collect(iterate_rows(run / "metrics.jsonl"))
    return {
        "name": str(recipe.get("name", run.name)),
        "run": run.name,
        "description": str(recipe.get("description", "")),
        "seed": recipe.get("seed", 0),
        "done": int(max((points[-1][0] for points in series.values()), default=0)),
        "total": recipe.get("train", {}).get("steps"),
        "asof": updated(run),
        "series": _outlines(series),
        "clocks": _outlines(collect(iterate_rows(run / "timings.jsonl"))),
        "reading": _sentences(series, recipe),
        "recipe": (run / "recipe.toml").read_text(encoding="utf-8"),
        "environment": (run / "environment.json").read_text(encoding="utf-8"),
    }


def updated(run: Path) -> float:
    """When a run last wrote something, in seconds since 1970."""
    files = (run / name for name in (*FILES, status.FILE))
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def _sentences(series: Series, recipe: dict[str, Any]) -> list[str]:
    """Sentences about the drift, and about sampler and learner."""
    held_out = series.get("validation/reward", [])
    reward = held_out if len(held_out) > 3 else series.get("rollout/reward", [])
    gaps = [series.get(f"mismatch/logprob_{name}", []) for name in ("mean", "max")]
    is_rounded = recipe.get("engine", {}).get("precision") in ("bf16", "fp16")
    drift = read_drift(reward, series.get("kl/initial_k1", []))
    return drift + read_mismatch(*gaps, rounded=is_rounded)


def _outlines(series: Series) -> dict[str, Any]:
    """Of each metric its line, how often it was measured, its sum, and the means over a window at
    the two ends."""
    return {
        name: {
            "points": thin(name, points),
            "count": len(points),
            "sum": sum(value for _, value in points),
            "window": window(len(points)),
            "ends": [_rounded(mean) for mean in end_means([value for _, value in points])],
        }
        for name, points in series.items()
    }


def thin(name: str, points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most POINTS of them: each stretch of steps as ``combine`` makes it one."""
    stride = math.ceil(len(points) / POINTS) or 1
    stretches = (points[i : i + stride] for i in range(0, len(points), stride))
    return [(s[-1][0], _rounded(combine({name: v} for _, v in s)[name])) for s in stretches]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")
