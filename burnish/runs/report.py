"""``report.html``, a page that shows a run and can be written at any time, and ``status.json``,
which holds the progress of an active run and how it ended.

The page consists of a template (templates/report.html with its script) and one block of JSON with
the curves and their statistics. The script decides how curves are grouped and labelled. Model text
is escaped in the JSON, and the script inserts it as text only.

The status is replaced atomically. A resumed run does not restore it: it contains clock times, and
no state that the run needs.
"""

from __future__ import annotations

import json
import math
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

from burnish.console.progress import Progress, format_progress
from burnish.console.text import counted, duration
from burnish.runs import checkpoints, ledger, pages, timeline
from burnish.runs.directory import APPENDED, STATUS, load_json, read_recipe, replace_file
from burnish.runs.drift import read_drift, read_mismatch
from burnish.runs.metrics import Series, collect, combine, end_means, iterate_rows, window
from burnish.runs.note import NOTE, read_note
from burnish.runs.responses import excerpt
from burnish.runs.resuming import command_to_resume
from burnish.runs.verdicts import read_warnings

LIMIT, REACH = 4_000_000, 100_000_000
"""Maximum size of the responses in a page, in characters of JSON, and number of bytes that are read
from each end of a file with responses."""
POINTS = 400
"""Maximum number of points of a line. The points of longer runs combine several steps."""
EVENTS = (ledger.FILE, timeline.FILE)
FILES = ("recipe.toml", "environment.json", NOTE, "summary.json", *APPENDED[:-1], *EVENTS)
"""Files of a run from which its page is made."""
State = Literal["running", "finished", "stopped", "failed"]
SILENCE = 60.0
"""Seconds without a status update after which a run no longer counts as running."""


CONTINUE = "continue with"
"""Text before the command that continues a run, if the command alone may cure an error."""


class Failure(NamedTuple):
    """Why a run failed, and how to continue it."""

    kind: str
    """"disk full", "read-only", "storage", "memory" or "network"; otherwise the error's class, such
    as "GraderError"."""
    message: str
    """The error's message. A `BurnishError` contains its remedy."""
    remedy: str
    """What to do before the command; empty if the message says it, or if nothing is known."""
    command: str
    """The command that continues the run; empty if resuming would repeat the error."""
    lead: str = CONTINUE
    """Text before the command: whether the cause has to be corrected first. Without a command, it
    says what to do instead."""

    @property
    def advice(self) -> str:
        """A line that says how to go on: the lead and the command."""
        return f"{self.lead}: {self.command}" if self.command else self.lead

    def __str__(self) -> str:
        return "\n".join(filter(None, [self.message, self.remedy, self.advice]))


def write_report(run: Path, *, limit: int = LIMIT) -> Path:
    """Write report.html of a run, which may be active, crashed or finished; return its path.
    ``limit`` is the maximum size of the responses in it, in characters."""
    data = report_data(run)
    data["state"] = run_state(run, data["done"], data["total"], now=time.time())
    data["rollouts"] = excerpt(run, limit, REACH)
    replace_file(run / "report.html", pages.render("report", data=pages.to_script_json(data)))
    return run / "report.html"


def report_data(run: Path) -> dict[str, Any]:
    """Return the data that a run's page displays, except for its state and its responses."""
    recipe = read_recipe(run)
    series = collect(iterate_rows(run / "metrics.jsonl"))
    return {
        "name": str(recipe.get("name", run.name)),
        "run": run.name,
        "description": str(recipe.get("description", "")),
        "note": read_note(run)._asdict(),
        "seed": recipe.get("seed", 0),
        "done": int(max((points[-1][0] for points in series.values()), default=0)),
        "total": recipe.get("train", {}).get("steps"),
        "asof": updated(run),
        "series": _outlines(series),
        "clocks": _outlines(collect(iterate_rows(run / "timings.jsonl"))),
        "reading": _sentences(series, recipe),
        "warnings": read_warnings(run),
        "lags": sorted(ledger.lags(iterate_rows(run / ledger.FILE)).items()),
        "timeline": timeline.timeline_data(run),
        "recipe": (run / "recipe.toml").read_text(encoding="utf-8"),
        "environment": (run / "environment.json").read_text(encoding="utf-8"),
    }


def updated(run: Path) -> float:
    """Return the time of a run's last write, in seconds since 1970; 0 if it has no file."""
    files = (run / name for name in (*FILES, STATUS))
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def _sentences(series: Series, recipe: dict[str, Any]) -> list[str]:
    """Return sentences about the policy's drift from the initial model, and about the mismatch of
    log-probabilities between sampler and learner."""
    held_out = series.get("validation/reward", [])
    reward = held_out if len(held_out) > 3 else series.get("rollout/reward", [])
    gaps = [series.get(f"mismatch/logprob_{name}", []) for name in ("mean", "max")]
    is_rounded = recipe.get("engine", {}).get("precision") in ("bf16", "fp16")
    drift = read_drift(reward, series.get("kl/initial_k1", []))
    return drift + read_mismatch(*gaps, rounded=is_rounded)


def _outlines(series: Series) -> dict[str, Any]:
    """Return for each metric the points of its line, the number and the sum of its values, and
    their means over the first and the last steps."""
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
    """Reduce the line of the metric ``name`` to at most ``POINTS`` points.

    Each point combines the values of consecutive steps with ``combine``, and has the step of the
    last one. Values are rounded to 6 significant digits.
    """
    stride = math.ceil(len(points) / POINTS) or 1
    stretches = (points[i : i + stride] for i in range(0, len(points), stride))
    return [(s[-1][0], _rounded(combine({name: v} for _, v in s)[name])) for s in stretches]


def _rounded(value: float) -> float:
    return float(f"{value:.6g}")


def write_status(
    run: Path, state: State, progress: Progress, *, now: float, note: str = ""
) -> None:
    """Replace a run's status.json; ``now`` is the time in seconds since 1970. ``note`` says why the
    run ends early; "" if it does not end early."""
    share = progress.done / progress.total if progress.total else None
    status = {"state": state, "updated": now, "doing": sentence(progress), "share": share}
    status |= {"steps": progress.steps} | ({"note": note} if note else {})
    replace_file(run / STATUS, json.dumps(status) + "\n")


def write_failure(run: Path, failure: Failure, *, now: float) -> None:
    """Set the state "failed" and the error in a run's status.json, even if the disk is full and
    the file exists: then the file is overwritten in place. ``now`` as in ``write_status``."""
    status = {**_read_status(run), "state": "failed", "updated": now, "error": failure._asdict()}
    text = json.dumps(status) + "\n"
    try:
        replace_file(run / STATUS, text)
    except OSError:
        if not (run / STATUS).exists():
            raise
        with (run / STATUS).open("r+", encoding="utf-8") as file:  # needs no second file
            file.write(text)
            file.truncate()


def read_failure(run: Path) -> Failure | None:
    """Return why a run failed; None if it did not fail, has been resumed since, or has no readable
    status.json."""
    status = _read_status(run)
    error = status.get("error") if status.get("state") == "failed" else None
    if not isinstance(error, dict):
        return None
    known = {"lead": CONTINUE} | error
    return Failure(*(str(known.get(name, "")) for name in Failure._fields))


def _read_status(run: Path) -> dict[str, Any]:
    """Return a run's status; an empty dict if status.json is missing or incomplete."""
    found: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        found = load_json(run / STATUS)
    return found


def sentence(progress: Progress) -> str:
    """Return a text with the phase, its progress, the actors' work and the remaining time."""
    words = [": ".join(filter(None, (progress.phase, format_progress(progress)))), progress.actors]
    if progress.seconds_left is not None:
        words.append(f"about {duration(progress.seconds_left)} left")
    return ", ".join(filter(None, words))


def run_state(run: Path, done: int, total: int | None, *, now: float) -> dict[str, Any]:
    """Return a run's state for a page, as a dict.

    "kind" is "running", "finished", "failed", "stopped" or "silent" (no recent status), and "text"
    the state with the steps. "doing" and "share" are the current work and the completed share of
    its phase; "" and None unless the run is running. "error" is the `Failure` of a failed run as a
    dict, otherwise None. "command" continues the run; None if it is running or finished, and empty
    if resuming would repeat the error.

    ``now`` is the time in seconds since 1970, ``done`` the number of finished steps. ``total`` is
    the number of all steps; None if only the status knows it.
    """
    status, failure = _read_status(run), read_failure(run)
    kind, doing, share, note, command = "stopped", "", None, "", None
    state, age = status.get("state"), now - status.get("updated", now)
    if state == "failed":
        kind = "failed"
    elif (run / "summary.json").exists():
        kind = state = "finished"
        if early := load_json(run / "summary.json").get("ended_early"):
            note = f"; ended early: {early}"
    elif state != "running":
        state = "stopped early"
    elif age > SILENCE:
        kind, state = "silent", f"no sign of life for {duration(age)}"
    else:
        kind, doing, share = "running", status["doing"], status["share"]
    total = status.get("steps") if total is None else total
    steps = f"{done:,} of {counted(total, 'step')}" if total else counted(done, "step")
    if kind not in ("finished", "running"):
        command = command_to_resume(run) if failure is None else failure.command
        if last := checkpoints.latest(run):
            note = f"; resumes from {last.name}"
    return {
        "kind": kind,
        "text": f"{state}, {steps}{note}",
        "doing": doing,
        "share": share,
        "error": None if failure is None else failure._asdict(),
        "command": command,
    }
