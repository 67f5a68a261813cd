"""TensorBoard: event files in the run's directory, with the scalars of each step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish.runs.trackers.tracker import Tables, TrackedRun, Values


class TensorboardTracker:
    """Writes the values of each step to an event file. The run's directory has everything else, so
    tables and files are not repeated in events."""

    def __init__(self) -> None:
        self._events: Any = None
        self._last = -1

    def start(self, run: TrackedRun, kept: str | None) -> str:
        self._path = run.path
        return run.path.name

    def log(self, step: int, values: Values, tables: Tables) -> None:
        """Append the values to the event file of this process.

        The first step purges this step and all later ones from earlier event files, so that
        TensorBoard shows each step of a resumed run once. So does a step that is logged again,
        because the run went back to a checkpoint.
        """
        if self._events is not None and step <= self._last:
            self._close()
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(self._path), purge_step=step)
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()
        self._last = step

    def finish(self, state: str, files: Sequence[Path]) -> None:
        self._close()

    def _close(self) -> None:
        if self._events is not None:
            self._events.close()
        self._events = None
