"""The directory of a run. Plots and reports read everything from it.

recipe.toml       the resolved recipe, which can be run again
environment.json  versions, machine, threads, hashes of the files that the run reads, and how the
                  run was started (git commit, host, directory, command line)
note.json         the note and the tags of the run
prompts.jsonl     the rows, if they were passed from Python
metrics.jsonl     one row per step; equal seeds give equal files
timings.jsonl     one row per step with wall-clock times
rollouts.jsonl    one row per response, with its tokens and log-probabilities
evaluations.jsonl one row per response to a validation prompt
turn_times.jsonl  one row per multi-turn episode of the two, with the seconds of the environment's
                  calls
rubrics.jsonl     one row per version of an evolving rubric
log.txt           the responses of rollouts.jsonl as plain text
events.…          the metrics for TensorBoard, one file per start of the run
trackers/         for each other tracker: its run's id, the last step sent, and its output
checkpoints/      the states from which a killed run resumes
ledger.jsonl      one row per group and event, if the run may train on old tokens
timeline.jsonl    one row per actor call with wall-clock times, if the run uses Ray
actors.json       machine and process of each actor, if the run uses Ray
status.json       progress while the run is active, and how it ended; contains clock times
restarts.txt      one line per resume
summary.json      first and last results; only a finished run has it
report.html       a page that shows the run
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import socket
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from pathlib import Path
from typing import Any, Self

from filelock import FileLock, Timeout

from burnish.errors import RunError
from burnish.machine import hardware
from burnish.machine.folders import fsync
from burnish.runs.metrics import iterate_rows

ENVIRONMENT, PROMPTS = "environment.json", "prompts.jsonl"
STARTED = "started"
"""Key of environment.json under which `origin` is stored. A resumed run does not compare it."""
GIT_SECONDS = 5.0
"""Timeout of a git command."""
APPENDED = (
    *("metrics.jsonl", "timings.jsonl", "rollouts.jsonl", "evaluations.jsonl"),
    *("turn_times.jsonl", "rubrics.jsonl", "log.txt"),
)
"""Append-only files. A resumed run truncates them to their lengths at its checkpoint."""
STATUS = "status.json"
BEGUN = {
    *(ENVIRONMENT, PROMPTS, STATUS, *APPENDED, "recipe.toml", "report.html", "restarts.txt"),
    *("ledger.jsonl", "timeline.jsonl", "actors.json", "checkpoints"),
}
"""Files of a run that has not finished a step, besides TensorBoard's events."""
PACKAGES = ("torch", "numpy", "pydantic", "numba", "triton")
"""Packages whose version may change results."""


class RunDirectory:
    """A run's directory, opened for writing. The process that opened it holds its lock."""

    def __init__(
        self,
        path: Path,
        recipe: str | None = None,
        *,
        environment: Mapping[str, Any] | None = None,
        rows: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        """Create the directory of a new run, or open an existing run if ``recipe`` is None.

        ``recipe`` is the TOML text of the recipe. ``environment`` describes machine, packages and
        inputs. ``rows`` are prompts that were passed from Python. The files of an earlier run that
        `learned_nothing` are deleted. Opening an existing run changes no file; call ``cut_back``
        next. Raise a RunError if another process holds the lock, if a new run can't use the
        directory, or if there is no run to open.
        """
        self.path = path
        if recipe is None:
            read_recipe(path)
            self._lock = lock(path)
            return
        check_new(path)
        self._lock = lock(path)
        if learned_nothing(path):
            clear(path)
        try:
            self.write(ENVIRONMENT, json.dumps(environment or {}, indent=2) + "\n")
            if rows:
                self.write(PROMPTS, to_jsonl(rows))
            self.write("recipe.toml", recipe)  # last, because this file makes the directory a run
        except OSError:  # the directory must stay empty, so that the same command can be repeated
            for name in (ENVIRONMENT, PROMPTS, ".lock"):
                with suppress(OSError):
                    (path / name).unlink(missing_ok=True)
            self._lock.release()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def append(self, name: str, text: str) -> None:
        """Append text to a file and pass it to the operating system, so that a crash of this
        process loses no line."""
        assert name in APPENDED, name  # a resumed run truncates only these files
        with naming(self.path / name), (self.path / name).open("a", encoding="utf-8") as file:
            file.write(text)

    def append_row(self, name: str, row: Mapping[str, Any]) -> None:
        """Append a row to a JSONL file in the same way as `append`."""
        self.append(name, json.dumps(row) + "\n")

    def write(self, name: str, text: str) -> None:
        """Replace a file atomically."""
        replace_file(self.path / name, text)

    def positions(self) -> dict[str, int]:
        """Flush the append-only files to disk and return their lengths in bytes by name, for a
        checkpoint."""
        files = [self.path / name for name in APPENDED if (self.path / name).exists()]
        for path in (*files, self.path):
            fsync(path)
        return {file.name: file.stat().st_size for file in files}

    def cut_back(self, positions: Mapping[str, int]) -> None:
        """Truncate the append-only files to their lengths at a checkpoint. Append-only files that
        did not exist at that time are deleted, and so is summary.json.

        All files are checked before the first one is truncated. A file that is shorter than its
        recorded length is an error.
        """
        sizes = self.positions()
        for name, length in positions.items():
            if sizes.get(name, 0) < length:
                raise RunError(
                    f"{self.path / name} holds {sizes.get(name, 0):,} bytes, the checkpoint "
                    f"recorded {length:,}: it was truncated or replaced; restore it, or resume "
                    "from an earlier checkpoint with --from"
                )
        for name in sizes:
            if name in positions:
                os.truncate(self.path / name, positions[name])
            else:
                (self.path / name).unlink()
        (self.path / "summary.json").unlink(missing_ok=True)  # the run is no longer finished
        fsync(self.path)

    def restart(self, step: int) -> int:
        """Record that the run resumes from a step; return the number of restarts so far.

        The count is not part of a checkpoint, so that it includes restarts that were killed before
        they saved one.
        """
        file = self.path / "restarts.txt"
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        self.write(file.name, f"{before}from step {step}\n")
        return before.count("\n") + 1


def read_recipe(run: Path) -> dict[str, Any]:
    """Return the content of a run's recipe.toml; raise a ``RunError`` if there is none."""
    try:
        return tomllib.loads((run / "recipe.toml").read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise RunError(f"{run} is not a run directory: it has no recipe.toml") from None


def load_json(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file."""
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def check_new(path: Path) -> None:
    """Raise a RunError if a new run can't use the directory: it is not writable, or it contains a
    file that is not hidden and does not belong to a run that failed before its first step was
    done."""
    folder = next(p for p in (path.absolute(), *path.absolute().parents) if p.exists())
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise RunError(f"can't write to {folder}: it is a file or read-only; choose another --out")
    held = sorted(file.name for file in path.glob("[!.]*"))
    if held and not learned_nothing(path):
        raise RunError(
            f"{path} must be new or empty, but it contains {held[0]}; choose another --out, or "
            f"continue the run with `burnish resume {shlex.quote(str(path))}`"
        )


def learned_nothing(path: Path) -> bool:
    """Return whether a directory contains only a run that failed before its first step was done, so
    that a new run may replace it."""
    try:
        is_failed = load_json(path / STATUS).get("state") == "failed"
        is_saved = any((path / "checkpoints").glob("*"))
        names = [file.name for file in path.glob("[!.]*")]
        own = all(name in BEGUN or name.startswith("events.") for name in names)
        rows = iterate_rows(path / "metrics.jsonl")
        return is_failed and own and not is_saved and not any(row["step"] for row in rows)
    except (RunError, OSError, ValueError, LookupError, TypeError):
        return False


def clear(path: Path) -> None:
    """Delete the files of a run that `learned_nothing`, except for hidden files."""
    for file in path.glob("[!.]*"):
        if file.is_dir():
            file.rmdir()
        else:
            file.unlink()


def to_jsonl(rows: Iterable[Any]) -> str:
    """Return the rows as JSON, one per line."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def replace_file(path: Path, text: str) -> None:
    """Write a file atomically: a reader sees either the old or the new content."""
    temporary = path.with_name(f".{path.name}.new")
    try:
        with naming(path):
            temporary.write_text(text, encoding="utf-8")
            os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Make an ``OSError`` in the block name ``path``, the file that the block writes: an error of a
    write names no file, and an error of an atomic write names the temporary one."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def lock(path: Path) -> FileLock:
    """Create the directory if it is missing, and lock it; return the acquired lock.

    Raise a RunError at once if another process holds the lock, or if the directory is not writable.
    """
    held = FileLock(path / ".lock", timeout=0)
    try:
        path.mkdir(parents=True, exist_ok=True)
        held.acquire()
    except Timeout:
        raise RunError(
            f"{path} is in use by another process; watch it with `burnish watch`, or wait until it "
            "ends"
        ) from None
    except OSError as error:
        raise RunError(
            f"can't write to {path}: {error.strerror or error}; make it writable, or free disk "
            "space, and repeat the command"
        ) from error
    return held


@contextmanager
def claimed(out: Path | None, name: str, root: Path = Path("runs")) -> Iterator[Path]:
    """Yield the directory of a new run: ``out`` or, if that is None, the first of root/name-1,
    root/name-2, … that does not exist.

    The latter is created at once, so that no other process can use it. At the end of the block, it
    and ``root`` are removed if they are empty.
    """
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
    """Remove a run's directory and its parent directory if they are empty."""
    with suppress(OSError):
        path.rmdir()
        path.parent.rmdir()


def environment(device: str) -> dict[str, Any]:
    """Return the versions and the hardware that bit-exact results depend on. ``device`` is "cpu" or
    the CUDA device of the run."""
    import torch

    return {
        "burnish": version_of("burnish"),
        "python": sys.version.split()[0],
        "packages": {name: version_of(name) for name in PACKAGES},
        "machine": platform.machine(),
        "processor": f"{hardware.processor()} ({', '.join(hardware.instructions())})",
        "gpu": None if device == "cpu" else torch.cuda.get_device_name(device),
        "threads": torch.get_num_threads(),
    }


def origin(folder: Path | None = None) -> dict[str, Any]:
    """Return how a run was started: "command", "directory", "host", "commit" and "modified".

    "commit" is the git commit of ``folder`` (None: the current directory), and "modified" is
    whether tracked files differ from it; both are None outside of a git repository.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    modified = None if commit is None else _git(folder, "diff", "--quiet", "HEAD") is None
    return {
        "command": shlex.join(sys.argv),
        "directory": str(Path.cwd()),
        "host": socket.gethostname(),
        "commit": commit,
        "modified": modified,
    }


def _git(folder: Path | None, *command: str) -> str | None:
    """Run a git command and return its output; None if it fails or git is not installed."""
    try:
        done = subprocess.run(
            ["git", *command],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=GIT_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def version_of(package: str) -> str | None:
    """Return the version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
