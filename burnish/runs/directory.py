"""A run is a directory. Everything a plot or a report shows is read from there.

recipe.toml       the resolved recipe; itself a recipe
environment.json  versions, machine, threads, and hashes of the files that the run reads
prompts.jsonl     the rows, if a script gave them
metrics.jsonl     a row per step, the same for the same seed
timings.jsonl     a row per step, wall clock
rollouts.jsonl    a row per response, with its tokens and log-probabilities
evaluations.jsonl the same for validation
rubrics.jsonl     a row per version of a rubric that evolves
log.txt           the responses of rollouts.jsonl, to be read
events.…          the metrics for TensorBoard, a file for each restart
checkpoints/      the states from which a killed run resumes
ledger.jsonl      of a run that may learn from old tokens: a row per group and event
timeline.jsonl    of a run on Ray: a row per call of an actor, wall clock
actors.json       of a run on Ray: the machine and the process of each actor
status.json       where it is while it runs, and how it ended; clocks, so no two are the same
restarts.txt      a line for each time it was resumed
summary.json      where it began and ended; a finished run has one
report.html       a page that shows the run
"""

from __future__ import annotations

import json
import os
import platform
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from burnish import machine
from burnish.config import effective, to_toml
from burnish.errors import RunError
from burnish.schema.models import SorterConfig
from burnish.schema.recipe import Recipe

ENVIRONMENT, PROMPTS = "environment.json", "prompts.jsonl"
APPENDED = (
    *("metrics.jsonl", "timings.jsonl", "rollouts.jsonl", "evaluations.jsonl"),
    *("rubrics.jsonl", "log.txt"),
)
"""Files that only grow; a resumed run cuts them back to where its checkpoint was."""
PACKAGES = ("torch", "numpy", "pydantic", "numba", "triton")
"""Packages whose version may change a bit of a result."""


class RunDirectory:
    """A run's directory, open for writing by one process at a time, which holds its lock."""

    def __init__(
        self,
        path: Path,
        recipe: Recipe | None = None,
        *,
        inputs: Mapping[str, str] | None = None,
    ) -> None:
        """Begins a run. Without a recipe it opens the run that lies there and changes no file;
        call ``cut_back`` next.

        ``inputs`` are hashes of the files that the run reads.
        """
        self.path = path
        self._events: Any = None
        if recipe is None:
            read_recipe(path)
            self._lock = lock(path)
            return
        check_new(path)
        self._lock = lock(path)
        found = environment(recipe) | {"inputs": dict(inputs or {})}
        self.write(ENVIRONMENT, json.dumps(found, indent=2) + "\n")
        if rows := getattr(recipe.task, "rows", None):
            self.write(PROMPTS, to_jsonl(rows))
        self.write("recipe.toml", to_toml(effective(recipe)))  # the last: now it is a run

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._events is not None:
            self._events.close()
        self._lock.release()

    def append(self, name: str, text: str) -> None:
        """Adds to a file and hands it to the operating system, so that a crash loses no line."""
        assert name in APPENDED, name  # another file would not be cut back
        with (self.path / name).open("a", encoding="utf-8") as file:
            file.write(text)

    def append_row(self, name: str, row: Mapping[str, Any]) -> None:
        self.append(name, json.dumps(row) + "\n")

    def append_scalars(self, step: int, scalars: Mapping[str, float]) -> None:
        """Adds a step's scalars to the events that TensorBoard reads.

        Each process writes a file of its own. Its first step voids that step and all later ones in
        the files of earlier processes, so that a resumed run shows no step twice.
        """
        if self._events is None:
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(self.path), purge_step=step)
        for name, value in scalars.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def write(self, name: str, text: str) -> None:
        """Replaces a file as a whole: a reader sees the old one or the new one."""
        replace_file(self.path / name, text)

    def positions(self) -> dict[str, int]:
        """The length of each growing file, once all of it is on the disk; a checkpoint keeps it."""
        files = [self.path / name for name in APPENDED if (self.path / name).exists()]
        for path in (*files, self.path):
            fsync(path)
        return {file.name: file.stat().st_size for file in files}

    def cut_back(self, positions: Mapping[str, int]) -> None:
        """Undoes everything that was written after a checkpoint: each file ends where it ended
        then, and a file that the checkpoint does not name goes.

        All files are looked at before the first is cut: a file that is shorter than it was then is
        an error.
        """
        sizes = self.positions()
        for name, length in positions.items():
            if sizes.get(name, 0) < length:
                raise RunError(
                    f"{self.path / name} holds {sizes.get(name, 0):,} bytes, the checkpoint "
                    f"recorded {length:,}: it was cut or replaced; put it back, or resume from "
                    "an earlier checkpoint with --from"
                )
        for name in sizes:
            if name in positions:
                os.truncate(self.path / name, positions[name])
            else:
                (self.path / name).unlink()
        (self.path / "summary.json").unlink(missing_ok=True)  # the run is no longer finished
        fsync(self.path)

    def restart(self, step: int) -> int:
        """Notes that the run goes on from a step, and returns how often it has been restarted.

        The count lies beside the checkpoints, not in them: a restart that was killed before it
        saved counts.
        """
        file = self.path / "restarts.txt"
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        self.write(file.name, f"{before}from step {step}\n")
        return before.count("\n") + 1


def read_recipe(run: Path) -> dict[str, Any]:
    """The recipe of a run, as its file has it."""
    try:
        return tomllib.loads((run / "recipe.toml").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{run} is not a run directory: it has no recipe.toml") from None


def read_json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def check_new(path: Path) -> None:
    """Raises where a new run can't begin: a directory that can't be written to, or that holds a
    file that is not hidden."""
    folder = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise RunError(f"can't write to {folder}: a file or read-only; choose another --out")
    if held := sorted(file.name for file in path.glob("[!.]*")):
        raise RunError(
            f"{path} must be new or empty, it holds {held[0]}; choose another --out, or continue "
            f"a run with `burnish resume {path}`"
        )


def to_jsonl(rows: Iterable[Any]) -> str:
    """Rows of JSON, each on a line of its own."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def replace_file(path: Path, text: str) -> None:
    """Writes a file as a whole: a reader sees the old one or the new one."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def fsync(path: Path) -> None:
    """Makes a file's content, or the names in a directory, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def lock(path: Path) -> FileLock:
    """Makes the directory if there is none, and keeps other processes out of it until the lock is
    released."""
    path.mkdir(parents=True, exist_ok=True)
    held = FileLock(path / ".lock", timeout=0)
    try:
        held.acquire()
    except Timeout:
        raise RunError(
            f"{path} is in use by another run; watch it with `burnish watch`, or wait until it ends"
        ) from None
    return held


@contextmanager
def claimed(out: Path | None, name: str, root: Path = Path("runs")) -> Iterator[Path]:
    """The directory of a new run: ``out``, or the first of root/name-1, root/name-2, … that this
    process makes, so that no other can take it. If nothing was written there in the end, it goes
    again."""
    path, numbers = out, count(1)
    while path is None:
        with suppress(FileExistsError):
            (made := root / f"{name}-{next(numbers)}").mkdir(parents=True)
            path = made
    try:
        yield path
    finally:
        if out is None:
            unclaim(path)


def unclaim(path: Path) -> None:
    """Removes a run's directory, and the one that it is in, where they are empty."""
    with suppress(OSError):
        path.rmdir()
        path.parent.rmdir()


def environment(recipe: Recipe) -> dict[str, Any]:
    """The versions and the hardware on which bit-exactness depends."""
    import torch

    device = "cpu" if isinstance(recipe.model, SorterConfig) else recipe.device
    on_gpu = device != "cpu" and torch.cuda.is_available()
    return {
        "burnish": version_of("burnish"),
        "python": sys.version.split()[0],
        "packages": {name: version_of(name) for name in PACKAGES},
        "machine": platform.machine(),
        "processor": f"{machine.processor()} ({', '.join(machine.instructions())})",
        "gpu": torch.cuda.get_device_name(None if device == "auto" else device) if on_gpu else None,
        "threads": torch.get_num_threads(),
    }


def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
