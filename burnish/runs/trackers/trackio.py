"""Trackio: a local SQLite database, or the Space or server that Trackio's environment variables
name."""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence
from pathlib import Path

from burnish.runs.trackers.tracker import Tables, TrackedRun, Values

_REJECTED = re.compile(r"[^A-Za-z0-9._-]")


class TrackioTracker:
    """A Trackio run. Trackio continues runs by name, so the name has a random suffix, with which no
    other run of the project is continued by mistake."""

    def start(self, run: TrackedRun, kept: str | None) -> str:
        import trackio

        self._trackio = trackio
        # Trackio itself only warns if it can't write.
        Path(trackio.TRACKIO_DIR).mkdir(parents=True, exist_ok=True)
        self._name = kept or f"{run.path.name}-{uuid.uuid4().hex[:8]}"
        self._run = trackio.init(
            run.project,
            name=self._name,
            group=run.group,
            config=run.recipe | {"environment": run.environment},
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
        return self._name

    def log(self, step: int, values: Values, tables: Tables) -> None:
        made = {
            f"samples/{name}": self._trackio.Table(data=list(rows)) for name, rows in tables.items()
        }
        self._run.log(dict(values) | made, step=step)

    def finish(self, state: str, files: Sequence[Path]) -> None:
        for file in files:
            name = _REJECTED.sub("_", f"{self._name}-{file.name}")
            self._trackio.log_artifact(file, name=name, type="report", overwrite=True)
        levels = {"finished": self._trackio.AlertLevel.INFO}
        level = levels.get(state, self._trackio.AlertLevel.WARN)
        # Trackio has no states of runs; alerts are stored and shown on the dashboard.
        self._run.alert(f"The run {state}", level=level)
        self._trackio.finish()
