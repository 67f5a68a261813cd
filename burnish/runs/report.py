"""``report.html``: one file that shows a run, made from its directory at any time.

The page is a template (templates/report.html with its script) and one block of JSON. Model text is
data: it is escaped in the JSON, and the script puts it into the page as text only.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

from burnish.runs import checkpoints, pages, status
from burnish.runs.directory import is_held, read_recipe, replace_file
from burnish.runs.drift import read_drift, read_mismatch
from burnish.runs.excerpt import excerpt, rounded
from burnish.runs.metrics import combine, end_means, iterate_rows, window
from burnish.runs.pages import encode
from burnish.wording import counted

LIMIT = 4_000_000
"""Bytes of a page; rollouts are sampled past it."""
POINTS = 400
"""Points of a line; longer runs are shown as means over several steps."""

REWARD, VALIDATION = "rollout/reward", "validation/reward"
LOSS, VALIDATION_LOSS = "train/loss", "validation/loss"

PANELS = (
    ("reward", "Reward", (REWARD, VALIDATION)),
    ("reward", "Parts of the reward", ("rollout/part_*", "validation/part_*")),
    ("drift", "KL to the initial model, nats per token", ("kl/initial_k?", "kl/held_out_k?")),
    (
        "drift",
        "KL to the initial model, nats per response",
        ("kl/initial_*_response", "kl/held_out_*_response"),
    ),
    ("drift", "KL to the previous step, nats per token", ("kl/previous_k?",)),
    ("drift", "KL to the previous step, nats per response", ("kl/previous_*_response",)),
    ("drift", "KL to the reference, nats per token", ("kl/reference_k?",)),
    ("drift", "Sampler against learner, nats", ("mismatch/*",)),
    ("policy", "Entropy, nats per token", ("*/entropy*",)),
    ("policy", "Response length, tokens", ("*/length*",)),
    ("policy", "Ended and truncated, share", ("*/ended*", "*/truncated*")),
    ("policy", "Clipped, share of tokens", ("*/clip_fraction*",)),
    ("policy", "Ratio to the proximal policy", ("*/ratio_*",)),
    ("policy", "Gradient norm", ("*/grad_norm*",)),
    ("policy", "Loss", ("train/loss*", VALIDATION_LOSS)),
    ("policy", "Groups without variance, share", ("*/dead_groups*",)),
    ("policy", "Grades, share", ("*/grades_*",)),
    ("policy", "Lag, versions", ("*/lag*",)),
    ("policy", "Tokens per second", ("*tokens_per_second*",)),
    ("other", "{}", ("*",)),
)
"""Section, title, metrics: a metric is shown by the first panel that takes it."""

PHASES = {
    "generate": "rollout generation",
    "grade": "reward computation",
    "score": "policy optimization: scoring",
    "learn": "policy optimization: steps",
    "publish": "weight synchronization",
    "evaluate": "evaluation",
    "checkpoint": "checkpointing",
    "other": "unclaimed",
}

Series = dict[str, list[tuple[float, float]]]


class Tile(NamedTuple):
    """A figure of the page's head."""

    label: str
    value: str
    note: str


def write_report(run: Path, *, limit: int = LIMIT, clock: Callable[[], float] = time.time) -> Path:
    """Makes the report of a run that runs, crashed or finished; at most ``limit`` bytes."""
    data = describe(run, limit=limit, now=clock())
    replace_file(run / "report.html", pages.render("report", data=encode(data)))
    return run / "report.html"


def describe(
    run: Path, *, now: float, limit: int = LIMIT, reach: int | None = None
) -> dict[str, Any]:
    """The data of a run's page; with them the page has at most ``limit`` bytes.

    now: seconds since 1970. reach: bytes that are read at each end of the files with responses,
    None for all of them.
    """
    recipe = read_recipe(run)
    clocks = collect(iterate_rows(run / "timings.jsonl"))
    series = collect(iterate_rows(run / "metrics.jsonl"))
    series |= {k: v for k, v in clocks.items() if not k.startswith("time/")}
    trained = (key for key in series if key.startswith(("rollout/", "train/")))
    done = len({step for key in trained for step, _ in series[key]})
    total = total_steps(run, recipe)
    kl = drift_metric(series, "kl/initial", "k1")
    heads = headlines(series, kl)
    drawn = panels(series, heads)
    shown = {line["name"] for panel in drawn for line in panel["lines"]}
    previous = drift_metric(series, "kl/previous", "k3")
    reward = series.get(VALIDATION, []) if len(series.get(VALIDATION, [])) > 3 else []
    reward = reward or series.get(REWARD, [])
    data = {
        "name": str(recipe.get("name", run.name)),
        "run": run.name,
        "description": str(recipe.get("description", "")),
        "seed": recipe.get("seed", 0),
        "state": chip(run, done, total, now=now),
        "done": done,
        "total": total,
        "asof": _as_of(run),
        "tiles": [*heads.values(), *tiles(series, clocks)],
        "reading": [
            *read_drift(reward, series.get(kl, []), series.get(previous, []), unit=unit_of(kl)),
            *read_mismatch(
                series.get("mismatch/logprob_mean", []),
                series.get("mismatch/logprob_max", []),
                rounded=recipe.get("engine", {}).get("precision") in ("bf16", "fp16"),
            ),
        ],
        "panels": drawn,
        "once": {n: rounded(p[0][1]) for n, p in series.items() if len(p) == 1 and n not in shown},
        "frontier": frontier(series, kl),
        "time": time_split(clocks),
        "recipe": _read_text(run / "recipe.toml")[:100_000],
        "environment": _read_text(run / "environment.json")[:100_000],
    }
    empty = len(pages.render("report", data=encode(data | {"rollouts": {"total": 0}})).encode())
    return data | {"rollouts": excerpt(run, limit - empty - 200, reach)}


def collect(rows: Iterable[Mapping[str, Any]]) -> Series:
    """Metric -> (step, value) where it is a finite number."""
    series: Series = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                series.setdefault(name, []).append((row["step"], float(value)))
    return series


def thin(name: str, points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most POINTS of them: what ``combine`` makes of each stretch of steps."""
    stride = math.ceil(len(points) / POINTS)
    stretches = (points[i : i + stride] for i in range(0, len(points), stride)) if stride else ()
    return [(s[-1][0], rounded(combine({name: v} for _, v in s)[name])) for s in stretches]


def panels(series: Series, heads: Mapping[str, Tile]) -> list[dict[str, Any]]:
    """What is drawn, in order; a panel needs a line of two points or more.

    The legend of a metric that is in the page's head says what the head says.
    """
    left = dict(sorted(series.items(), key=lambda item: item[0].startswith("validation/")))
    drawn = []
    for section, title, patterns in PANELS:
        names = [name for name in left if any(fnmatch(name, pattern) for pattern in patterns)][:40]
        lines: list[dict[str, Any]] = [
            {"name": name, "points": thin(name, left.pop(name)), "head": heads.get(name)}
            for name in names
        ]
        alone = section == "other"
        for group in [[line] for line in lines] if alone else [lines[:8]] if lines else []:
            if any(len(line["points"]) > 1 for line in group):
                shown = title.format(group[0]["name"])
                drawn.append({"section": section, "title": shown, "lines": group})
    return drawn


def drift_metric(series: Series, prefix: str, estimator: str) -> str:
    """The figure that is read: that estimator per token if it was measured.

    k3 has little noise where the KL is small, as of one step; where it is large, a single token
    that only the reference finds likely may be most of it, and k1 is the one to read.
    """
    names = [name for name in series if name.startswith(prefix)]
    return min(names, key=lambda n: (n.endswith("_response"), estimator not in n), default="")


def unit_of(metric: str) -> str:
    return "nats per response" if metric.endswith("_response") else "nats per token"


def frontier(series: Series, kl: str) -> dict[str, Any] | None:
    """Reward against KL, step by step: what each nat bought."""
    name = VALIDATION if len(series.get(VALIDATION, [])) > 3 else REWARD
    at = dict(series.get(kl, []))
    points = [(step, at[step], value) for step, value in series.get(name, []) if step in at]
    stride = math.ceil(len(points) / POINTS) or 1
    kept = [(step, rounded(x), rounded(y)) for step, x, y in points[::stride]]
    return {"x": f"{kl} ({unit_of(kl)})", "y": name, "points": kept} if len(kept) > 2 else None


def time_split(clocks: Series) -> dict[str, Any] | None:
    """Seconds per phase, the largest first, in all and step by step."""
    series = {name: points for name, points in clocks.items() if name.startswith("time/")}
    whole = sum(value for _, value in series.pop("time/step", []))
    if not series:
        return None
    totals = {name: sum(value for _, value in points) for name, points in series.items()}
    names = sorted(totals, key=lambda name: (name == "time/other", -totals[name]))[:12]
    whole = whole or sum(totals.values())
    phases = [
        {
            "label": PHASES.get(name[5:], name[5:].replace("_", " ")),
            "seconds": rounded(totals[name]),
            "share": rounded(totals[name] / whole) if whole > 0 else 0,
            "points": thin(name, series[name]),
        }
        for name in names
    ]
    return {"phases": phases, "whole": rounded(whole), "steps": max(map(len, series.values()))}


def headlines(series: Series, kl: str) -> dict[str, Tile]:
    """The figures of the page's head that a chart shows as well, by metric."""
    found = {}

    def add(name: str, label: str, averaged: bool = False, unit: str = "") -> None:
        values = [value for _, value in series.get(name, [])]
        if not values:
            return
        first, last = end_means(values) if averaged else (values[0], values[-1])
        size = window(len(values)) if averaged else 1
        over = f", last {size} steps" if size > 1 else ""
        note = f"from {first:z.3g}" if len(values) > 1 else "one measurement"
        if name in (VALIDATION, VALIDATION_LOSS) and len(values) > 1:
            better = max if name == VALIDATION else min
            step, best = better(series[name], key=lambda point: point[1])
            note += f"; best {best:z.3g} at step {step:g}"
        found[name] = Tile(f"{label}{over}", f"{last:z.3g}", f"{unit}{note}")

    add(REWARD, "reward", averaged=True)
    add(VALIDATION, "held-out reward")
    if REWARD not in series:
        add(LOSS, "loss", averaged=True)
    add(VALIDATION_LOSS, "held-out loss")
    estimator = kl.removesuffix("_response").rpartition("_")[2]
    add(kl, f"KL to the initial model, {estimator}", unit=f"{unit_of(kl)}; ")
    add("rollout/ended", "ended", averaged=True)
    return found


def tiles(series: Series, clocks: Series) -> list[Tile]:
    """The other figures of the page's head."""
    found = []
    responses = sum(value for _, value in series.get("rollout/responses", []))
    if responses:
        found.append(Tile("responses", f"{responses:,.0f}", "sampled to learn"))
    seconds = sum(value for _, value in clocks.get("time/step", []))
    if seconds:
        value = f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
        found.append(Tile("time", value, "wall clock of the steps"))
    return found


def total_steps(run: Path, recipe: Mapping[str, Any]) -> int | None:
    """The steps that a run will have; of a supervised run its status says them, if anything."""
    told = status.read(run)
    said = None if told is None else told.steps
    steps = recipe.get("train", {}).get("steps", said)
    return None if steps is None else int(steps)


def state_of(run: Path, *, now: float) -> tuple[str, str]:
    """What kind of state a run is in, and the state in words, told from the files."""
    told = status.read(run)
    if (run / "summary.json").exists():
        return "finished", "finished"
    silence = told and told.silence(now)
    if silence:
        return "silent", f"no sign of life for {silence}"
    if (told and told.state == "running") or is_held(run):
        return "running", "running"
    return "stopped", "failed" if told and told.state == "failed" else "stopped early"


def chip(run: Path, done: int, total: int | None, *, now: float) -> dict[str, str]:
    """The state with the steps that are done, for the page's head."""
    kind, state = state_of(run, now=now)
    steps = f"{done:,} of {counted(total, 'step')}" if total else counted(done, "step")
    last = checkpoints.latest(run) if kind in ("stopped", "silent") else None
    note = "" if last is None else f"; resumes from {last.name}"
    return {"kind": kind, "text": f"{state}, {steps}{note}"}


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def _as_of(run: Path) -> str:
    """When the run last wrote something."""
    files = [run / name for name in ("recipe.toml", "metrics.jsonl", "summary.json")]
    newest = max(file.stat().st_mtime for file in files if file.exists())
    return datetime.fromtimestamp(newest, UTC).strftime("%Y-%m-%d %H:%M UTC")
