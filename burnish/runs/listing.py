"""A table of runs: state, best score, tags and note."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from burnish.console.text import duration
from burnish.runs import report
from burnish.runs.directory import read_recipe
from burnish.runs.live_page import DAMAGE, find_runs
from burnish.runs.metrics import Series, collect, iterate_rows
from burnish.runs.note import RunNote, read_note


class ListedRun(NamedTuple):
    """A row of the table."""

    path: Path
    state: str
    best: str
    """The best held-out result with its step; "" if nothing was evaluated."""
    age: float
    """Seconds since the last write."""
    note: RunNote


def list_run_rows(path: Path, now: float, tags: Collection[str] = ()) -> list[ListedRun]:
    """Return one row for each run at ``path``, a run or a directory of runs; the most recently
    updated run is first.

    ``now`` is the time in seconds since 1970. Only runs that have all ``tags`` are returned. A
    damaged run has a row whose state is the error.
    """
    rows = []
    for run in find_runs(path).values():
        note, best = RunNote(), ""
        try:
            note = read_note(run)
            series = collect(iterate_rows(run / "metrics.jsonl"))
            recipe = read_recipe(run)
            steps = recipe.get("train", {}).get("steps")
            done = int(max((points[-1][0] for points in series.values()), default=0))
            state = report.run_state(run, done, steps, now=now)["text"]
            best = best_result(series, recipe.get("validation", {}))
        except DAMAGE as error:
            state = f"can't be read: {error}"
        if set(tags) <= set(note.tags):
            rows.append(ListedRun(run, state, best, now - report.updated(run), note))
    return sorted(rows, key=lambda row: row.age)


def best_result(series: Series, validation: Mapping[str, Any]) -> str:
    """Return the best held-out result with its step: of validation.metric if the recipe's section
    ``validation`` has it, otherwise of the reward, or the loss of a supervised run. Return "" if
    there is none."""
    chosen = validation.get("metric")
    for metric in ["validation/reward", "validation/loss"] if chosen is None else [chosen]:
        if points := series.get(metric):
            goal = validation.get("goal", "min" if metric == "validation/loss" else "max")
            step, value = (min if goal == "min" else max)(points, key=lambda point: point[1])
            name = "" if metric == "validation/reward" else f"{metric.partition('/')[2]} "
            return f"{name}{value:z.3f} at step {step:g}"
    return ""


def tabulate_runs(rows: Collection[ListedRun]) -> list[list[str]]:
    """Return the cells of a table of runs, a heading first. Columns without any value are left
    out."""
    heads = ["run", "state", "held out, best", "last update", "tags", "note"]
    cells = [
        [
            row.path.name,
            row.state,
            row.best,
            f"{duration(row.age)} ago",
            ", ".join(row.note.tags),
            row.note.text,
        ]
        for row in rows
    ]
    shown = [i for i in range(len(heads)) if any(line[i] for line in cells)]
    return [[line[i] for i in shown] for line in [heads, *cells]]
