"""status.json: where a run is while it runs, and how it ended, for whoever looks from outside.

It is replaced as a whole, so that a reader sees the old one or the new one. A resumed run does not
cut it back: it holds clocks, and nothing that a run goes on from.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

from burnish.progress import Progress
from burnish.runs import checkpoints
from burnish.runs.directory import read_json, replace_file
from burnish.wording import counted, duration

FILE = "status.json"
State = Literal["running", "finished", "stopped", "failed"]
SILENCE = 60.0
"""Seconds without a new status after which a run no longer counts as running."""


def write(run: Path, state: State, progress: Progress, *, now: float) -> None:
    """Writes a run's status; ``now`` is in seconds since 1970."""
    share = progress.done / progress.total if progress.total else None
    told = {"state": state, "updated": now, "doing": sentence(progress), "share": share}
    replace_file(run / FILE, json.dumps(told | {"steps": progress.steps}) + "\n")


def sentence(progress: Progress) -> str:
    """The phase and how far it is, in words."""
    words = [": ".join(filter(None, (progress.phase, progress.doing)))]
    if progress.total:
        words.append(f"{progress.done:,} of {progress.total:,} {progress.unit}".strip())
    if progress.tokens_per_second is not None:
        words.append(f"{progress.tokens_per_second:,.0f} tokens per second")
    if progress.seconds_left is not None:
        words.append(f"about {duration(progress.seconds_left)} left")
    return ", ".join(filter(None, words))


def standing(run: Path, done: int, total: int | None, *, now: float) -> dict[str, Any]:
    """How a run stands, for a page: the kind of its state, the state and the steps in words, and,
    while it runs, the sentence of its progress and the share of the phase that is done.

    ``now`` is in seconds since 1970. ``total`` is None if only the status says how many steps the
    run has.
    """
    told = read_json(run / FILE) if (run / FILE).exists() else {}
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
