"""A process that follows a run's directory and sends the run's results to one tracker.

The run's files are its only input, so a tracker that is slow, fails or does not respond can't
affect the run, and steps that a tracker has missed are sent when the run is resumed. The file
trackers/NAME.json in the run's directory has the id of the tracker's run and the last step that was
sent. Steps up to that one are not sent again, also if the run goes back to a checkpoint before it.

    python -m burnish.runs.trackers.follower '{"tracker": "wandb", "run": "runs/sort-1", …}' FD

FD is a pipe that the run holds open: when it is closed, the run has ended.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock

from burnish.runs.directory import ENVIRONMENT, STATUS, load_json, read_recipe, replace_file
from burnish.runs.trackers.tracker import Sample, TrackedRun, Tracker

FOLDER = "trackers"
"""Directory of a run in which followers keep their files."""
POLL_SECONDS = 1.0
"""Seconds between two looks at the run's files."""
LOCK_SECONDS = 120.0
"""Seconds to wait for the follower of an earlier process."""
TEXT_LENGTH = 2_000
"""Maximum number of characters of a prompt or a response in a table."""
TABLES = {"rollouts": "rollouts.jsonl", "validation": "evaluations.jsonl"}
"""Tables of sample responses, and the files that they are taken from."""
SENT = ("report.html", "recipe.toml", "environment.json", "summary.json")
"""Files of a run that are sent to a tracker when the run ends."""


def _wandb() -> Tracker:
    from burnish.runs.trackers.wandb import WandbTracker

    return WandbTracker()


def _mlflow() -> Tracker:
    from burnish.runs.trackers.mlflow import MlflowTracker

    return MlflowTracker()


def _trackio() -> Tracker:
    from burnish.runs.trackers.trackio import TrackioTracker

    return TrackioTracker()


FOLLOWING: dict[str, Callable[[], Tracker]] = {
    "wandb": _wandb,
    "mlflow": _mlflow,
    "trackio": _trackio,
}
"""Functions that create the trackers that follow a run in their own process, by name."""


class FollowerSettings(NamedTuple):
    """What a follower does."""

    tracker: str
    run: str
    """Path of the run's directory."""
    project: str
    group: str | None
    samples: int
    """Maximum number of rows of a table."""


class Rows:
    """Reads the rows of a JSONL file in order, also while the file grows. If the file has become
    shorter, because the run went back to a checkpoint, reading starts again at its beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.position = 0

    def up_to(self, step: float) -> Iterator[dict[str, Any]]:
        """Yield the rows of steps up to ``step`` that have not been read yet."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            if os.fstat(file.fileno()).st_size < self.position:
                self.position = 0
            file.seek(self.position)
            for line in file:
                if not line.endswith(b"\n"):
                    return  # it is being written
                row = json.loads(line)
                if row["step"] > step:
                    return
                self.position += len(line)
                yield row


class Follower:
    """Sends the results of a run to a tracker, in the order of steps. The constructor creates the
    tracker's run, or continues the one of an earlier process."""

    def __init__(self, settings: FollowerSettings, tracker: Tracker) -> None:
        self.run, self.tracker, self.limit = Path(settings.run), tracker, settings.samples
        self.file = kept_file(self.run, settings.tracker)
        kept = load_json(self.file) if self.file.exists() else {}
        self.logged: int = kept.get("logged", -1)
        """Last step that was sent; -1 if there is none."""
        recipe, environment = read_recipe(self.run), load_json(self.run / ENVIRONMENT)
        facts = TrackedRun(self.run, settings.project, settings.group, recipe, environment)
        self.id = tracker.start(facts, kept.get("id"))
        self._keep()
        self._restarts = b""
        self._begin()

    def _begin(self) -> None:
        """Read all files from their beginning; steps that were sent already are skipped."""
        self._metrics, self._timings = (
            Rows(self.run / f"{name}.jsonl") for name in ("metrics", "timings")
        )
        self._tables = {name: Rows(self.run / file) for name, file in TABLES.items()}

    def send(self) -> None:
        """Send the steps that were written since the last call."""
        restarts = self.run / "restarts.txt"
        if restarts.exists() and (content := restarts.read_bytes()) != self._restarts:
            self._restarts = content
            self._begin()
        for timings in self._timings.up_to(float("inf")):  # written after the step's metrics
            step = timings["step"]
            metrics = list(self._metrics.up_to(step))
            if step <= self.logged or not metrics:
                continue
            values = metrics[-1] | timings
            del values["step"]
            is_validated = any(name.startswith("validation/") for name in values)
            self.tracker.log(step, values, self._samples(step) if is_validated else {})
            self.logged = step
            self._keep()

    def _samples(self, step: int) -> dict[str, list[Sample]]:
        """Return the tables of a step's sample responses."""
        found = {}
        for name, rows in self._tables.items():
            samples = [as_sample(row) for row in rows.up_to(step) if row["step"] == step]
            if samples[: self.limit]:
                found[name] = samples[: self.limit]
        return found

    def finish(self) -> None:
        """Send the remaining steps, the run's files and its state."""
        self.send()
        state = load_json(self.run / STATUS)["state"]
        files = [self.run / name for name in SENT if (self.run / name).exists()]
        # The status of a killed run still says that it is running.
        self.tracker.finish("crashed" if state == "running" else state, files)

    def _keep(self) -> None:
        replace_file(self.file, json.dumps({"id": self.id, "logged": self.logged}) + "\n")


def kept_file(run: Path, tracker: str) -> Path:
    """Return the file with the id of the tracker's run, and the last step that was sent."""
    return run / FOLDER / f"{tracker}.json"


def as_sample(row: dict[str, Any]) -> Sample:
    """Convert a row of a run's responses to a row of a table. Prompt and response are truncated to
    `TEXT_LENGTH` characters."""
    return {
        "step": row["step"],
        "prompt": row["asked"][:TEXT_LENGTH],
        "response": row["response"][:TEXT_LENGTH],
        "reward": row["reward"],
        "correct": row["correct"],
        "advantage": row["advantage"],
        "status": row["status"],
        "finish": row["finish"],
    }


def _follow(settings: FollowerSettings, descriptor: int) -> None:
    """Follow a run until the pipe ``descriptor`` is closed; then send what is left and end the
    tracker's run."""
    # The follower of a process that was killed may still be finishing.
    with FileLock(
        kept_file(Path(settings.run), settings.tracker).with_suffix(".lock"), LOCK_SECONDS
    ):
        follower = Follower(settings, FOLLOWING[settings.tracker]())
        while not select.select([descriptor], [], [], POLL_SECONDS)[0]:
            follower.send()
        follower.finish()


if __name__ == "__main__":
    # A batch system sends SIGTERM to all processes of a job. The run then saves a checkpoint, and
    # the follower sends the last steps.
    signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        _follow(FollowerSettings(**json.loads(sys.argv[1])), int(sys.argv[2]))
    except Exception as error:
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}".splitlines()[0], file=sys.stderr, flush=True)
        sys.stderr.flush()
        os._exit(1)  # what the tracker does at the interpreter's exit may wait for its server
