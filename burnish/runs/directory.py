"""A run is a directory. Everything a plot or a report shows is read from there.

recipe.toml       the resolved recipe; itself a recipe
environment.json  versions, machine, threads, and hashes of what the run reads
prompts.jsonl     the rows, if a script gave them
metrics.jsonl     a row per step, the same for the same seed
timings.jsonl     a row per step, wall clock
rollouts.jsonl    a row per response, with its tokens and log-probabilities
evaluations.jsonl the same for validation
log.txt           prompts, responses, rewards and advantages, to be read
events.…          the metrics for TensorBoard, a file for each restart
checkpoints/      the states from which a killed run resumes
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
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from io import FileIO
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from burnish import machine
from burnish.config import Recipe, SorterConfig, effective, to_toml
from burnish.errors import RunError

ENVIRONMENT, PROMPTS = "environment.json", "prompts.jsonl"
APPENDED = ("metrics.jsonl", "timings.jsonl", "rollouts.jsonl", "evaluations.jsonl", "log.txt")
"""Files that only grow; a resumed run cuts them back to where its checkpoint was."""
PACKAGES = ("torch", "numpy", "pydantic", "numba", "triton")
"""Packages whose version may change a bit of what is computed."""


class RunDirectory:
    """Open for writing by one process at a time, which holds its lock."""

    def __init__(
        self,
        path: Path,
        recipe: Recipe,
        *,
        inputs: Mapping[str, str] | None = None,
        prompts: str | None = None,
    ) -> None:
        """``inputs`` are hashes of what the run reads; ``prompts`` are a script's rows as JSONL."""
        self._open(path)
        try:
            _check_empty(path)
        except RunError:
            self._lock.close()
            raise
        found = environment(recipe) | {"inputs": dict(inputs or {})}
        self.write(ENVIRONMENT, json.dumps(found, indent=2) + "\n")
        if prompts is not None:
            self.write(PROMPTS, prompts)
        self.write("recipe.toml", to_toml(effective(recipe)))  # the last: now it is a run

    @classmethod
    def reopen(cls, path: Path) -> Self:
        """Opens a run that was begun before, and changes no file; call ``cut_back`` next."""
        if not (path / "recipe.toml").is_file():
            raise RunError(f"{path} is not a run directory: it has no recipe.toml")
        run = cls.__new__(cls)
        run._open(path, "watch it with `burnish watch`, or wait until it ends")
        return run

    def _open(self, path: Path, remedy: str = "choose another --out") -> None:
        self.path = path
        self._lock = lock(path, remedy)
        self._files: dict[str, FileIO] = {}
        self._events: Any = None

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
        if self._events is not None:
            self._events.close()
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
        """How long each growing file is, once all of it is on the disk; a checkpoint keeps this."""
        for file in self._files.values():
            os.fsync(file.fileno())
        fsync_directory(self.path)
        files = {name: self.path / name for name in APPENDED}
        return {name: file.stat().st_size for name, file in files.items() if file.exists()}

    def check_positions(self, positions: Mapping[str, int]) -> None:
        """Raises where a file is shorter than when a checkpoint was saved."""
        sizes = self.positions()
        for name, length in positions.items():
            if sizes.get(name, 0) < length:
                raise RunError(
                    f"{self.path / name} holds {sizes.get(name, 0):,} bytes, the checkpoint "
                    f"recorded {length:,}: it was cut or replaced; put it back, or resume from "
                    "an earlier checkpoint with --from"
                )

    def cut_back(self, positions: Mapping[str, int]) -> None:
        """Undoes what was written after a checkpoint: each file ends where it ended then.

        A file that the checkpoint does not name had not begun, and goes. All files are looked at
        before the first is cut.
        """
        self.check_positions(positions)
        sizes = self.positions()
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


def read_recipe(run: Path) -> dict[str, Any]:
    """The recipe of a run, as its file has it."""
    try:
        return tomllib.loads((run / "recipe.toml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunError(f"{run} is not a run directory: it has no recipe.toml") from None


def check_new(path: Path) -> None:
    """Raises where a new run can't begin: a run lies there, or anything else that is not hidden."""
    folder = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not folder.is_dir():
        raise RunError(f"{folder} is a file, a run is a directory; choose another --out")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise RunError(f"can't write to {folder}: it is read-only here; choose another --out")
    if is_held(path):
        raise RunError(f"{path} is in use by another run; choose another --out")
    _check_empty(path)


def _check_empty(path: Path) -> None:
    held = sorted(p.name for p in path.glob("*") if not p.name.startswith("."))
    if ENVIRONMENT in held and "recipe.toml" not in held:  # killed before it began
        held = [name for name in held if name not in (ENVIRONMENT, PROMPTS)]
    if not held:
        return
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


def lock(path: Path, remedy: str = "choose another --out") -> TextIO:
    """Keeps other processes out of the directory until the returned file is closed.

    ``remedy`` ends the message of the error if another process has it.
    """
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
    raise RunError(f"{path} is in use by another run; {remedy}")


def next_directory(root: Path, name: str) -> Path:
    """The first of root/name-1, root/name-2, … that does not exist."""
    return next(path for path in _numbered(root, name) if not path.exists())


@contextmanager
def claimed(out: Path | None, name: str, root: Path = Path("runs")) -> Iterator[Path]:
    """Where a new run goes: ``out``, or the first of root/name-1, root/name-2, … that this process
    makes, so that no other can take it. If nothing was written there in the end, it goes again."""
    if out is not None:
        yield out
        return
    path = next(path for path in _numbered(root, name) if _made(path))
    try:
        yield path
    finally:
        unclaim(path)


def unclaim(path: Path) -> None:
    """Removes a run's directory, and the one that it is in, where they are empty."""
    with suppress(OSError):
        path.rmdir()
        path.parent.rmdir()


def _numbered(root: Path, name: str) -> Iterator[Path]:
    return (root / f"{name}-{number}" for number in count(1))


def _made(path: Path) -> bool:
    try:
        path.mkdir(parents=True)
    except FileExistsError:
        return False
    except OSError as error:
        raise RunError(f"can't write to {path}: {error.strerror}; choose an --out") from error
    return True


def environment(recipe: Recipe) -> dict[str, Any]:
    """The versions and the hardware on which bit-exactness depends."""
    device = "cpu" if isinstance(recipe.model, SorterConfig) else recipe.device
    return {
        "burnish": version_of("burnish"),
        "python": sys.version.split()[0],
        "packages": {name: version_of(name) for name in PACKAGES},
        "machine": platform.machine(),
        "processor": f"{machine.processor()} ({', '.join(machine.instructions())})",
        "gpu": _gpu(device),
        "threads": _threads(),
    }


def _gpu(device: str) -> str | None:
    """The name of the GPU that a run uses; None if it runs on the CPU."""
    torch = sys.modules.get("torch")
    if torch is None or device == "cpu" or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name(None if device == "auto" else device))


def _threads() -> int | None:
    torch = sys.modules.get("torch")
    return None if torch is None else int(torch.get_num_threads())


def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
