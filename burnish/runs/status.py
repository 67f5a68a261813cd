"""status.json: where a run is while it runs, and how it ended, for whoever looks from outside.

It is replaced as a whole, so that a reader sees the old one or the new one. A resumed run does not
cut it back: it holds clocks, and nothing that a run goes on from.
"""

from __future__ import annotations

import json
import math
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from burnish.progress import Progress
from burnish.runs.directory import replace_file
from burnish.wording import duration

FILE = "status.json"
State = Literal["running", "finished", "stopped", "failed"]
SILENCE = 60.0
"""Seconds without a new status after which a run no longer counts as running."""


@dataclass(frozen=True)
class Status:
    """A field is None if the run did not say it."""

    state: str | None
    """running, finished, stopped or failed."""
    updated: float
    """When the run last wrote this, in seconds since 1970."""
    phase: str | None = None
    doing: str | None = None
    done: float | None = None
    total: float | None = None
    unit: str | None = None
    step: float | None = None
    steps: float | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None
    started: float | None = None
    pid: float | None = None

    def silence(self, now: float) -> str | None:
        """How long a running run has written nothing; None if it did lately, or is not running."""
        quiet = now - self.updated
        return duration(quiet) if self.state == "running" and quiet > SILENCE else None

    @property
    def share(self) -> float | None:
        """How much of what the run is doing is done, from 0 to 1; None if that is not known."""
        if self.done is None or not self.total or self.total < 0:
            return None
        return min(1.0, max(0.0, self.done / self.total))

    def sentence(self) -> str:
        """What the run is doing, in words; empty if it did not say."""
        words = [": ".join(word for word in (self.phase, self.doing) if word)]
        if self.done is not None:
            of = "" if self.total is None else f" of {self.total:,.0f}"
            words.append(f"{self.done:z,.0f}{of} {self.unit or ''}".strip())
        if self.tokens_per_second is not None:
            words.append(f"{self.tokens_per_second:z,.0f} tokens per second")
        return ", ".join(word for word in words if word)

    def left(self) -> str:
        """The time that the whole run still takes, in words; empty if it is not known."""
        known = self.seconds_left is not None and self.seconds_left >= 0
        return f"about {duration(self.seconds_left or 0)} left" if known else ""


def write(run: Path, state: State, progress: Progress, *, started: float, updated: float) -> None:
    """Writes a run's status; ``started`` and ``updated`` are seconds since 1970."""
    status = {
        "state": state,
        "phase": progress.phase,
        "doing": progress.doing,
        "done": progress.done,
        "total": progress.total,
        "unit": progress.unit,
        "step": progress.step,
        "steps": progress.steps,
        "tokens_per_second": progress.tokens_per_second,
        "seconds_left": progress.seconds_left,
        "started": started,
        "updated": updated,
        "pid": os.getpid(),
    }
    replace_file(run / FILE, json.dumps(status) + "\n")


def mark_stopped(run: Path) -> None:
    """For a run that is ended from outside of its loop; one without a status stays without."""
    with suppress(OSError, ValueError):
        found = json.loads((run / FILE).read_text(encoding="utf-8"))
        if found["state"] == "running":
            replace_file(run / FILE, json.dumps(found | {"state": "stopped"}) + "\n")


def read(run: Path) -> Status | None:
    """A run's status; None if there is none that can be read."""
    try:
        found = json.loads((run / FILE).read_text(encoding="utf-8"))
        written = (run / FILE).stat().st_mtime
    except (OSError, ValueError):
        return None
    if not isinstance(found, dict):
        return None

    def text(key: str) -> str | None:
        value = found.get(key)
        return value if isinstance(value, str) else None

    def number(key: str) -> float | None:
        value = found.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            return None
        return float(value) if math.isfinite(value) else None

    updated = number("updated")
    return Status(
        state=text("state"),
        updated=written if updated is None else updated,
        phase=text("phase"),
        doing=text("doing"),
        done=number("done"),
        total=number("total"),
        unit=text("unit"),
        step=number("step"),
        steps=number("steps"),
        tokens_per_second=number("tokens_per_second"),
        seconds_left=number("seconds_left"),
        started=number("started"),
        pid=number("pid"),
    )
