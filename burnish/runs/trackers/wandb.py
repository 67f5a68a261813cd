"""Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish.runs.trackers.tracker import Tables, TrackedRun, Values

EXIT_CODES = {"finished": 0, "stopped": 255}
"""Exit codes by which W&B shows a run as finished or as killed; with any other code, it shows the
run as failed."""


class WandbTracker:
    """A W&B run, whose step is the step of the run. Its local files are in the run's directory,
    unless WANDB_DIR names another."""

    def start(self, run: TrackedRun, kept: str | None) -> str:
        import wandb

        self._wandb = wandb
        self._run: Any = wandb.init(
            project=run.project,
            group=run.group,
            name=run.path.name,
            id=kept,
            # "allow" also accepts an id that the server does not know, as after offline runs.
            resume=None if kept is None else "allow",
            dir=os.environ.get("WANDB_DIR") or run.path / "trackers",
            config=run.recipe | {"environment": run.environment},
            settings=wandb.Settings(console="off", silent=True),
        )
        return str(self._run.id)

    def log(self, step: int, values: Values, tables: Tables) -> None:
        # A column may hold None in some rows and numbers in others.
        made = {
            f"samples/{name}": self._wandb.Table(
                columns=list(rows[0]),
                data=[list(row.values()) for row in rows],
                allow_mixed_types=True,
            )
            for name, rows in tables.items()
        }
        # W&B accepts each step once. It writes the step at once, not when the next one begins.
        self._run.log(dict(values) | made, step=step, commit=True)

    def finish(self, state: str, files: Sequence[Path]) -> None:
        if files:
            artifact = self._wandb.Artifact(f"run-{self._run.id}", type="report")
            for file in files:
                artifact.add_file(str(file), policy="mutable")
            self._run.log_artifact(artifact)
        self._run.summary["state"] = state
        self._run.finish(exit_code=EXIT_CODES.get(state, 1))
