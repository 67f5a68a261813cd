"""status.json: where a run is while it runs, and how it ended, for whoever looks from outside.

It is replaced as a whole, so that a reader sees the old one or the new one. A resumed run does not
cut it back: it holds clocks, and nothing that a run goes on from.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from burnish.progress import Progress
from burnish.runs import checkpoints
from burnish.runs.directory import replace_file
from burnish.wording import counted, duration

FILE = "status.json"
State = Literal["running", "finished", "stopped", "failed"]
SILENCE = 60.0
"""Seconds without a new status after which a run no longer counts as running."""


class Status(BaseModel):
    """The last words of a run."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    state: State
    updated: float
    """When the run wrote this, in seconds since 1970, as is ``started``."""
    started: float
    pid: int
    progress: Progress

    def sentence(self) -> str:
        """The phase and how far it is, in words."""
        now = self.progress
        words = [": ".join(filter(None, (now.phase, now.doing)))]
        if now.total:
            words.append(f"{now.done:,} of {now.total:,} {now.unit}".strip())
        if now.tokens_per_second is not None:
            words.append(f"{now.tokens_per_second:,.0f} tokens per second")
        if now.seconds_left is not None:
            words.append(f"about {duration(now.seconds_left)} left")
        return ", ".join(filter(None, words))


def write(run: Path, state: State, progress: Progress, *, started: float, updated: float) -> None:
    """Writes a run's status; ``started`` and ``updated`` are seconds since 1970."""
    brief = replace(progress, metrics={}, timings={})
    told = Status(state=state, started=started, updated=updated, pid=os.getpid(), progress=brief)
    replace_file(run / FILE, told.model_dump_json() + "\n")


def mark_stopped(run: Path) -> None:
    """Marks a run that is ended from outside of its loop; a run without a status stays without."""
    told = read(run)
    if told is not None and told.state == "running":
        stopped = told.model_copy(update={"state": "stopped"})
        replace_file(run / FILE, stopped.model_dump_json() + "\n")


def read(run: Path) -> Status | None:
    """A run's status; None if there is none that can be read."""
    try:
        return Status.model_validate_json((run / FILE).read_bytes())
    except (OSError, ValueError):
        return None


def standing(run: Path, done: int, total: int | None, *, now: float) -> dict[str, Any]:
    """How a run stands, for a page: the kind of its state, that state and the steps in words, and,
    while it runs, what it is doing and which share of that is done.

    ``now`` is in seconds since 1970. ``total`` is None if only the status says how many steps the
    run has.
    """
    told = read(run)
    doing, share, note = "", None, ""
    if (run / "summary.json").exists():
        kind = state = "finished"
    elif told is None or told.state != "running":
        kind, state = "stopped", "failed" if told and told.state == "failed" else "stopped early"
    elif now - told.updated > SILENCE:
        kind, state = "silent", f"no sign of life for {duration(now - told.updated)}"
    else:
        kind, state, doing = "running", "running", told.sentence()
        share = told.progress.done / told.progress.total if told.progress.total else None
    total = told.progress.steps if told and total is None else total
    steps = f"{done:,} of {counted(total, 'step')}" if total else counted(done, "step")
    if kind in ("stopped", "silent") and (last := checkpoints.latest(run)):
        note = f"; resumes from {last.name}"
    return {"kind": kind, "text": f"{state}, {steps}{note}", "doing": doing, "share": share}
