"""``report.html``: one file that shows a run, made from its directory at any time.

The page is a template (templates/report.html with its script) and one block of JSON: the curves and
their figures. Which curves stand together, and under which words, is the script's affair. Model
text is data: it is escaped in the JSON, and the script puts it into the page as text only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from burnish.runs import pages, status
from burnish.runs.directory import APPENDED, read_recipe, replace_file
from burnish.runs.drift import read_drift, read_mismatch
from burnish.runs.excerpt import excerpt
from burnish.runs.metrics import Series, collect, combine, end_means, iterate_rows, window
from burnish.runs.pages import encode

LIMIT, REACH = 4_000_000, 100_000_000
"""Bytes of a page, and bytes that are read at each end of a file with responses."""
POINTS = 400
"""Points of a line; longer runs are shown as means over several steps."""
FILES = ("recipe.toml", "environment.json", "summary.json", *APPENDED[:-1])
"""A page is made of these."""
REWARD, VALIDATION = "rollout/reward", "validation/reward"


def write_report(run: Path, *, limit: int = LIMIT, clock: Callable[[], float] = time.time) -> Path:
    """Makes the report of a run that runs, crashed or finished; at most ``limit`` bytes."""
    data = describe(run)
    data["state"] = status.standing(run, data["done"], data["total"], now=clock())
    data["rollouts"] = rollouts(run, data, limit=limit, reach=REACH)
    replace_file(run / "report.html", pages.render("report", data=encode(data)))
    return run / "report.html"


def rollouts(run: Path, data: dict[str, Any], *, limit: int, reach: int) -> dict[str, Any]:
    """The responses for which a page with these data has room if it may have ``limit`` bytes.

    reach: bytes that are read at each end of the files with responses.
    """
    empty = len(pages.render("report", data=encode(data)).encode())
    return excerpt(run, limit - empty - 1000, reach)


def describe(run: Path) -> dict[str, Any]:
    """The data of a run's page, but for its state and its responses."""
    recipe = read_recipe(run)
    series = collect(iterate_rows(run / "metrics.jsonl"))
    kl = drift_metric(series)
    return {
        "name": str(recipe.get("name", run.name)),
        "run": run.name,
        "description": str(recipe.get("description", "")),
        "seed": recipe.get("seed", 0),
        "done": int(max((points[-1][0] for points in series.values()), default=0)),
        "total": recipe.get("train", {}).get("steps"),
        "asof": updated(run),
        "kl": kl,
        "series": _outlines(series),
        "clocks": _outlines(collect(iterate_rows(run / "timings.jsonl"))),
        "reading": _read_series(series, kl, recipe),
        "recipe": _read_text(run / "recipe.toml"),
        "environment": _read_text(run / "environment.json"),
    }


def updated(run: Path) -> float:
    """When a run last wrote something, in seconds since 1970."""
    files = (run / name for name in (*FILES, status.FILE))
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def drift_metric(series: Series) -> str:
    """The KL to the initial model that is read: k1, per token if it was measured.

    A single token that only the initial model finds likely may be most of k3.
    """
    names = [name for name in series if name.startswith("kl/initial")]
    return min(names, key=lambda n: (n.endswith("_response"), "k1" not in n), default="")


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


def _read_series(series: Series, kl: str, recipe: dict[str, Any]) -> list[str]:
    """Sentences about the drift, and about sampler and learner."""
    held_out = series.get(VALIDATION, [])
    reward = held_out if len(held_out) > 3 else series.get(REWARD, [])
    unit = "nats per response" if kl.endswith("_response") else "nats per token"
    return [
        *read_drift(reward, series.get(kl, []), unit=unit),
        *read_mismatch(
            series.get("mismatch/logprob_mean", []),
            series.get("mismatch/logprob_max", []),
            rounded=recipe.get("engine", {}).get("precision") in ("bf16", "fp16"),
        ),
    ]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
