"""A run is a directory. Everything a plot or a report shows is read from there.

recipe.toml       the resolved recipe; itself a recipe
environment.json  versions, machine, threads
metrics.jsonl     a row per step, the same for the same seed
timings.jsonl     a row per step, wall clock
rollouts.jsonl    a row per response, with its tokens and log-probabilities
evaluations.jsonl the same for validation
log.txt           prompts, responses, rewards and advantages, to be read
events.…          the metrics for TensorBoard
checkpoints/      what a killed run resumes from
status.json       where it is while it runs, and how it ended; clocks, so no two are the same
restarts.txt      a line for each time it was resumed
summary.json      where it began and ended; a finished run has one
report.html       all of it, to be looked at
curves.png        loss and reward
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from burnish.config import Recipe, effective, to_toml
from burnish.errors import RunError

EVENTS = "events.out.tfevents.burnish"
"""TensorBoard finds a file by the middle of this name."""
APPENDED = (
    "metrics.jsonl",
    "timings.jsonl",
    "rollouts.jsonl",
    "evaluations.jsonl",
    "log.txt",
    EVENTS,
)
"""Files that only grow; a resumed run cuts them back to where its checkpoint was."""


class RunDirectory:
    """Open for writing by one process at a time, which holds its lock."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        check_new(path)
        self._open(path)
        self.write("recipe.toml", to_toml(effective(recipe)))
        self.write("environment.json", json.dumps(environment(), indent=2) + "\n")

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """A run that was begun before, as it lies there; ``cut_back`` is what comes next."""
        if not (path / "recipe.toml").is_file():
            raise RunError(f"{path} is not a run directory: it has no recipe.toml")
        run = cls.__new__(cls)
        run._open(path)
        return run

    def _open(self, path: Path) -> None:
        self.path = path
        self._lock = lock(path)
        self._files: dict[str, FileIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for file in self._files.values():
            file.close()
        self._lock.close()

    def append(self, name: str, content: str | bytes) -> None:
        """Adds to a file and hands it to the operating system, so that a crash loses no line."""
        assert name in APPENDED, name  # another file would not be cut back
        data = content.encode() if isinstance(content, str) else content
        try:
            if name not in self._files:
                self._files[name] = (self.path / name).open("ab", buffering=0)
            while data:
                data = data[self._files[name].write(data) :]
        except OSError as error:
            raise RunError(
                f"can't write {self.path / name}: {error.strerror}; "
                "make room and continue with `burnish resume`"
            ) from error

    def append_row(self, name: str, row: Mapping[str, Any]) -> None:
        self.append(name, json.dumps(row) + "\n")

    def write(self, name: str, text: str) -> None:
        """Replaces a file as a whole: a reader sees the old one or the new one."""
        replace_file(self.path / name, text)

    def positions(self) -> dict[str, int]:
        """How long each growing file is, once all of it is on the disk; a checkpoint keeps this."""
        for file in self._files.values():
            os.fsync(file.fileno())
        fsync_directory(self.path)
        files = {name: self.path / name for name in APPENDED}
        return {name: file.stat().st_size for name, file in files.items() if file.exists()}

    def cut_back(self, positions: Mapping[str, int]) -> None:
        """Undoes what was written after a checkpoint: each file ends where it ended then.

        A file that the checkpoint does not name had not begun, and goes. All files are looked at
        before the first is cut.
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
        fsync_directory(self.path)

    def restart(self, step: int) -> int:
        """Notes that the run goes on from a step; how often it has been restarted by now.

        Kept beside the checkpoints, not in them: a restart that was killed before it saved counts.
        """
        file = self.path / "restarts.txt"
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        self.write(file.name, f"{before}from step {step}\n")
        return before.count("\n") + 1


def check_new(path: Path) -> None:
    """Raises where a new run can't begin: a run lies there, or anything else that is not hidden."""
    if path.exists() and not path.is_dir():
        raise RunError(f"{path} is a file, a run is a directory; choose another --out")
    held = sorted(p.name for p in path.glob("*") if not p.name.startswith("."))
    if not held:
        return
    if is_held(path):
        raise RunError(f"{path} is in use by another run; choose another --out")
    if "recipe.toml" in held or any(name in held for name in (*APPENDED, "checkpoints")):
        raise RunError(
            f"{path} already holds a run; continue it with `burnish resume {path}`, "
            "choose another --out or remove it"
        )
    raise RunError(
        f"{path} must be new or empty, it holds {held[0]}{', …' if held[1:] else ''}; "
        "choose another --out"
    )


def replace_file(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"can't write {path}: {error.strerror}") from error


def fsync_directory(path: Path) -> None:
    """Makes the names in a directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_held(path: Path) -> bool:
    """Whether a process is writing this run."""
    try:
        with (path / ".lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def lock(path: Path) -> TextIO:
    """Makes the directory this process's alone, until what is returned is closed."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        held = (path / ".lock").open("w")
    except OSError as error:
        message = f"can't write to {path}: {error.strerror}; choose another --out"
        raise RunError(message) from error
    for patience in (0.05, 0.05, 0.0):  # a report that asks ``is_held`` holds it for a moment
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return held
        except BlockingIOError:
            time.sleep(patience)
    held.close()
    raise RunError(f"{path} is in use by another run; choose another --out")


def next_directory(root: Path, name: str) -> Path:
    """The first of root/name-1, root/name-2, … that does not exist."""
    number = 1
    while (root / f"{name}-{number}").exists():
        number += 1
    return root / f"{name}-{number}"


def environment() -> dict[str, Any]:
    """What bit-exactness depends on."""
    return {
        "burnish": _version("burnish"),
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in ("torch", "numpy", "pydantic")},
        "machine": platform.machine(),
        "threads": _threads(),
    }


def _threads() -> int | None:
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
