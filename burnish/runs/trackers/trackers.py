"""The trackers of a run, as the recorder sees them.

TensorBoard's events are written by the run's own process. Every other tracker has a process that
follows the run's directory (``follower.py``).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from burnish.console.progress import tell
from burnish.errors import BurnishError, ChildError
from burnish.machine.process import ChildProcess, exit_status
from burnish.runs.trackers.follower import FOLDER, FollowerSettings
from burnish.runs.trackers.places import tracker_place
from burnish.runs.trackers.tensorboard import TensorboardTracker
from burnish.runs.trackers.tracker import TrackedRun, Values

FINISH_SECONDS = 60.0
"""Seconds that trackers have at the end of a run to send what they have not sent yet."""


class TrackerSettings(NamedTuple):
    """The trackers of a run, and the names under which they show it."""

    names: Sequence[str] | None
    """None for TensorBoard, if it is installed."""
    project: str
    group: str | None
    samples: int
    """Maximum number of responses in a table."""


class Trackers:
    """The trackers of a run. A tracker that fails never stops the run: it is reported once, and the
    run continues without it."""

    def __init__(self, run: Path, settings: TrackerSettings, log: Callable[[str], None]) -> None:
        """Start the trackers, and display where each tracker that the recipe names stores the run.
        ``log`` writes a line to the run's log.txt; it is called at the end, after the last
        checkpoint, so that checkpoints do not depend on trackers."""
        self._run, self._log = run, log
        self._problems: list[str] = []
        self._followers: dict[str, tuple[ChildProcess, Connection]] = {}
        self._events: TensorboardTracker | None = None
        names = settings.names
        if names is None:
            names = ["tensorboard"] if find_spec("tensorboard") is not None else []
        for name in settings.names or ():
            tell("note", tracker_place(name, run, settings.project, os.environ))
        for name in names:
            if name == "tensorboard":
                self._events = TensorboardTracker()
                self._events.start(TrackedRun(run, "", None, {}, {}), None)
            else:
                self._start(
                    FollowerSettings(
                        name, str(run), settings.project, settings.group, settings.samples
                    )
                )

    def _start(self, settings: FollowerSettings) -> None:
        folder = self._run / FOLDER
        ends, held = Pipe(duplex=False)
        try:
            folder.mkdir(exist_ok=True)
            command = [sys.executable, "-m", "burnish.runs.trackers.follower"]
            child = ChildProcess(
                [*command, json.dumps(settings._asdict()), str(ends.fileno())],
                name=f"the tracker {settings.tracker}",
                inherited=[ends],
                log=folder / f"{settings.tracker}.log",
            )
        except (OSError, BurnishError) as error:
            held.close()
            self._report(settings.tracker, str(error))
        else:
            self._followers[settings.tracker] = child, held

    def log(self, step: int, values: Values) -> None:
        """Write a finished step to TensorBoard's events, and report the trackers that failed since
        the last call."""
        if self._events is not None:
            try:
                self._events.log(step, values, {})
            except Exception as error:  # the package's code may raise anything
                self._events = None
                self._report("tensorboard", f"{type(error).__name__}: {error}")
        for name, (child, _) in list(self._followers.items()):
            if not child.is_running:
                self._end(name, 0.0)

    def close(self) -> None:
        """Wait until all trackers have sent everything, at most `FINISH_SECONDS`; stop and report
        those that take longer. Call it after status.json has the state of the ended run."""
        if self._events is not None:
            self._events.finish("", ())
            self._events = None
        for _, held in self._followers.values():
            held.close()  # followers notice it and finish, all at the same time
        end = time.monotonic() + FINISH_SECONDS
        try:
            for name in list(self._followers):
                tell("report", f"waiting for the tracker {name}")
                self._end(name, max(0.0, end - time.monotonic()))
        finally:
            for child, _ in self._followers.values():  # after a second Ctrl-C
                child.close()
            for problem in self._problems:
                self._log(f"{problem}\n")

    def _end(self, name: str, grace: float) -> None:
        """Wait for a follower to exit, kill it after ``grace`` seconds, and report it if it has not
        sent everything."""
        child, held = self._followers[name]
        problem = ""
        try:
            if code := child.wait(grace):
                problem = "".join(child.tail(1)) if code > 0 else exit_status(code)
        except ChildError:
            problem = f"it has not sent everything within {FINISH_SECONDS:g} s"
        held.close()
        child.close()
        del self._followers[name]
        if problem:
            self._report(name, problem)

    def _report(self, name: str, cause: str) -> None:
        problem = (
            f"the tracker {name} failed: {cause.strip()} (its output is in "
            f"{self._run / FOLDER / name}.log); the run does not need it, and `burnish resume` "
            "sends the missing steps"
        )
        self._problems.append(problem)
        tell("note", problem)
