"""``report.html``: one file that shows a run, made from its directory at any time, and
``status.json``, which says where a run is while it runs, and how it ended.

The page is a template (templates/report.html with its script) and one block of JSON: the curves and
their figures. Which curves stand together, and under which words, is the script's affair. Model
text is data: it is escaped in the JSON, and the script puts it into the page as text only.

The status is replaced as a whole. A resumed run does not cut it back: it holds clocks, and nothing
that a run goes on from.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, Literal

from burnish.progress import Progress, spelled
from burnish.runs import checkpoints, ledger, pages, timeline
from burnish.runs.directory import APPENDED, read_json, read_recipe, replace_file
from burnish.runs.drift import read_drift, read_mismatch
from burnish.runs.metrics import Series, collect, combine, end_means, iterate_rows, window
from burnish.runs.responses import excerpt
from burnish.wording import counted, duration

LIMIT, REACH = 4_000_000, 100_000_000
"""Bytes of a page's responses, and bytes that are read at each end of a file with responses."""
POINTS = 400
"""Points of a line; longer runs are shown as means over several steps."""
EVENTS = (ledger.FILE, timeline.FILE)
FILES = ("recipe.toml", "environment.json", "summary.json", *APPENDED[:-1], *EVENTS)
"""A page is made of these."""
STATUS = "status.json"
State = Literal["running", "finished", "stopped", "failed"]
SILENCE = 60.0
"""Seconds without a new status after which a run no longer counts as running."""


def write_report(run: Path, *, limit: int = LIMIT) -> Path:
    """Makes the report of a run that runs, crashed or finished."""
    data = describe(run)
    data["state"] = standing(run, data["done"], data["total"], now=time.time())
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
        "lags": sorted(ledger.lags(iterate_rows(run / ledger.FILE)).items()),
        "timeline": timeline.describe(run),
        "recipe": (run / "recipe.toml").read_text(encoding="utf-8"),
        "environment": (run / "environment.json").read_text(encoding="utf-8"),
    }


def updated(run: Path) -> float:
    """When a run last wrote something, in seconds since 1970."""
    files = (run / name for name in (*FILES, STATUS))
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


def write_status(run: Path, state: State, progress: Progress, *, now: float) -> None:
    """Writes a run's status; ``now`` is in seconds since 1970."""
    share = progress.done / progress.total if progress.total else None
    told = {"state": state, "updated": now, "doing": sentence(progress), "share": share}
    replace_file(run / STATUS, json.dumps(told | {"steps": progress.steps}) + "\n")


def sentence(progress: Progress) -> str:
    """The phase and how far it is, in words."""
    words = [": ".join(filter(None, (progress.phase, spelled(progress)))), progress.actors]
    if progress.seconds_left is not None:
        words.append(f"about {duration(progress.seconds_left)} left")
    return ", ".join(filter(None, words))


def standing(run: Path, done: int, total: int | None, *, now: float) -> dict[str, Any]:
    """How a run stands, for a page: the kind of its state, the state and the steps in words, and,
    while it runs, the sentence of its progress and the share of the phase that is done.

    ``now`` is in seconds since 1970. ``total`` is None if only the status says how many steps the
    run has.
    """
    told = read_json(run / STATUS) if (run / STATUS).exists() else {}
    kind, doing, share, note = "stopped", "", None, ""
    state, age = told.get("state"), now - told.get("updated", now)
    if (run / "summary.json").exists():
        kind = state = "finished"
    elif state != "running":
        state = "failed" if state == "failed" else "stopped early"
    elif age > SILENCE:
        kind, state = "silent", f"no sign of life for {duration(age)}"
    else:
        kind, doing, share = "running", told["doing"], told["share"]
    total = told.get("steps") if total is None else total
    steps = f"{done:,} of {counted(total, 'step')}" if total else counted(done, "step")
    if kind in ("stopped", "silent") and (last := checkpoints.latest(run)):
        note = f"; resumes from {last.name}"
    return {"kind": kind, "text": f"{state}, {steps}{note}", "doing": doing, "share": share}
