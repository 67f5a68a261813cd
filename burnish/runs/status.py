"""status.json: where a run is while it runs, and how it ended, for whoever looks from outside.

It is replaced as a whole, so that a reader sees the old one or the new one. A resumed run does not
cut it back: it holds clocks, and nothing that a run goes on from.
"""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict

from burnish.progress import Progress
from burnish.runs.directory import replace_file
from burnish.wording import duration

FILE = "status.json"
State = Literal["running", "finished", "stopped", "failed"]
SILENCE = 60.0
"""Seconds without a new status after which a run no longer counts as running."""


class Status(BaseModel):
    """What a run said last; a field is None if the run did not say it."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    state: State
    updated: float
    """When the run wrote this, in seconds since 1970, as is ``started``."""
    started: float | None = None
    pid: int | None = None
    phase: str = ""
    doing: str = ""
    done: float | None = None
    total: float | None = None
    unit: str = ""
    step: int | None = None
    steps: int | None = None
    tokens_per_second: float | None = None
    seconds_left: float | None = None

    def silence(self, now: float) -> str | None:
        """How long a running run has written nothing; None if it did lately, or is not running."""
        quiet = now - self.updated
        return duration(quiet) if self.state == "running" and quiet > SILENCE else None

    @property
    def share(self) -> float | None:
        """How much of the phase is done, from 0 to 1; None if that is not known."""
        if self.done is None or not self.total or self.total < 0:
            return None
        return min(1.0, max(0.0, self.done / self.total))

    def sentence(self) -> str:
        """What the run is doing, in words; empty if it did not say."""
        words = [": ".join(filter(None, (self.phase, self.doing)))]
        if self.done is not None:
            of = "" if self.total is None else f" of {self.total:,.0f}"
            words.append(f"{self.done:z,.0f}{of} {self.unit}".strip())
        if self.tokens_per_second is not None:
            words.append(f"{self.tokens_per_second:z,.0f} tokens per second")
        return ", ".join(filter(None, words))

    def left(self) -> str:
        """The time that the whole run still takes, in words; empty if it is not known."""
        known = self.seconds_left is not None and self.seconds_left >= 0
        return f"about {duration(self.seconds_left or 0)} left" if known else ""


def write(run: Path, state: State, progress: Progress, *, started: float, updated: float) -> None:
    """Writes a run's status; ``started`` and ``updated`` are seconds since 1970."""
    said = {key: value for key, value in asdict(progress).items() if key in Status.model_fields}
    told = Status(state=state, started=started, updated=updated, pid=os.getpid(), **said)
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
