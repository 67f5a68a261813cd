"""Records why a run failed: in status.json, at the end of log.txt and in report.html, and as a note
of the exception that says how to continue.

A second error, while the first one is recorded or while the run's components are closed, never
replaces the first.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from burnish.console.text import printable
from burnish.errors import (
    ActorError,
    BurnishError,
    ChildError,
    ConfigError,
    DataError,
    EngineError,
    GraderError,
    ModelError,
    RunError,
)
from burnish.runs import checkpoints
from burnish.runs.directory import RunDirectory
from burnish.runs.report import CONTINUE, Failure, write_failure, write_report
from burnish.runs.resuming import command_to_resume
from burnish.runs.verdicts import smaller_passes

FULL = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "the disk quota is exceeded",
    errno.EFBIG: "the file is larger than the limit for files of this process",
}
"""Causes of a write that finds no space, by error number."""
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)
EXPLAINED = ("disk full", "read-only", "storage")
"""Kinds of failures of the disk, whose traceback tells nothing."""
OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|ALLOC_FAILED|Killed by the OOM",
    re.IGNORECASE,
)
"""Messages of errors about memory, also of errors that another process has sent as text."""
PASSING = (ActorError, ChildError, EngineError)
"""Errors of other processes, which may not return when a run is resumed."""
CORRECT = "correct the cause first, or the error returns; then continue with"
NEW_RUN = (
    "correct the recipe and start a new run; this one keeps its recipe, and resuming it would "
    "repeat the error"
)
LONGEST = 2000
"""Number of characters of an error's message that status.json keeps, so that the status fits into
the space that the file occupies on a full disk. log.txt has the whole message."""


class Closeable(Protocol):
    """An object with a method ``close``."""

    @property
    def close(self) -> Callable[[], None]: ...


C = TypeVar("C", bound=Closeable)


@dataclass
class Attempt:
    """An attempt to train or to resume a run."""

    path: Path
    create: Callable[[], RunDirectory] | None
    """Creates the directory of a new run; None if the run is resumed."""
    is_open: bool = False
    """Whether this process has opened the directory, so that it may record an error there."""
    is_restored: bool = True
    """False while a resumed run has not gone back to its checkpoint: log.txt must not grow, since
    its length is checked, and a finished run is still finished."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of `command_to_resume` that would repeat this attempt."""

    def open(self) -> RunDirectory:
        """Create the directory of a new run and return it; from now on, errors are recorded there.
        Call it once, and not if the run is resumed."""
        assert self.create is not None, "the directory of a resumed run is already open"
        opened = self.create()
        self.is_open = True
        return opened


@contextmanager
def recorded(
    path: Path,
    create: Callable[[], RunDirectory] | None = None,
    options: Mapping[str, Any] | None = None,
) -> Iterator[Attempt]:
    """Record an error of the block in the run's directory, which is created if it is missing.

    The exception gets a note with the command that continues the run. An ``OSError`` of a full or
    read-only disk, or a lack of memory, is raised as a ``RunError`` that names cause and remedy.
    ``create`` and ``options`` as in `Attempt`.
    """
    is_resumed = create is None
    attempt = Attempt(path, create, is_resumed, not is_resumed, dict(options or {}))
    try:
        yield attempt
    except Exception as error:
        if not attempt.is_open:
            with suppress(BurnishError, OSError), attempt.open():
                pass
        shown, notes = error, list[str]()
        with suppress(Exception):  # the error is more informative
            command = command_to_resume(path, **attempt.options)
            failure = explain(error, path, command, logs=attempt.is_restored)
            if not isinstance(error, BurnishError) and failure.kind != type(error).__name__:
                shown = RunError("; ".join(filter(None, [failure.message, failure.remedy])))
            elif failure.remedy:
                notes.append(failure.remedy)
            notes += _record(attempt, failure, error)
        for note in notes:
            shown.add_note(note)
        if shown is not error:
            raise shown from error
        raise


def _record(attempt: Attempt, failure: Failure, error: Exception) -> list[str]:
    """Write a failure to the run's files if the run exists and has not been finished; return notes
    for the exception."""
    path, again = attempt.path, [failure.advice]
    if not attempt.is_restored and (path / "summary.json").exists():
        return again
    if not attempt.is_open or not (path / "recipe.toml").exists():
        return [] if isinstance(error, BurnishError) else ["then repeat the command"]
    return [*record_failure(path, failure, error, logs=attempt.is_restored), *again]


def record_failure(
    path: Path, failure: Failure, error: BaseException, *, logs: bool = True
) -> list[str]:
    """Write a failure to status.json, report.html and, if ``logs``, log.txt of the run at ``path``;
    return a sentence for each file that could not be written. No exception is raised."""
    lines = [f"the run failed: {failure.kind}: {failure.message}", failure.remedy]
    lines += [failure.advice]
    if not (failure.kind in EXPLAINED or isinstance(error, BurnishError)):
        lines.append("".join(traceback.format_exception(error)).rstrip())
    text = "".join(f"{printable(line)}\n" for line in lines if line)

    def log() -> None:
        with (path / "log.txt").open("a", encoding="utf-8") as file:
            file.write(f"\n{text}")

    short = failure._replace(message=_shortened(failure.message))
    writes: dict[str, Callable[[], object]] = {
        "status.json": lambda: write_failure(path, short, now=time.time()),
        **({"log.txt": log} if logs else {}),
        "report.html": lambda: write_report(path),
    }
    problems, same = [], []
    cause = _system_error(error)
    for name, write in writes.items():
        try:
            write()
        except Exception as second:  # the first error is more informative
            found = _system_error(second)
            if found is None or cause is None or found.errno != cause.errno:
                problems.append(f"{path / name} could not be written: {second}")
            elif str(path / name) != cause.filename:
                same.append(str(path / name))
    if same:
        problems.append(f"{' and '.join(same)} could not be written for the same reason")
    return problems


@contextmanager
def writing(run: Path) -> Iterator[None]:
    """Raise an ``OSError`` of the block, which writes to the directory of a run, as a RunError that
    names the file, the cause and the remedy."""
    try:
        yield
    except OSError as error:
        where = error.filename
        if where is None or (Path(where).exists() and not os.access(where, os.R_OK)):
            raise  # a file that can't be read
        found = explain(error, run, "")
        if found.kind not in EXPLAINED:
            raise
        copy = f", or copy {run} to a place that is" if found.kind == "read-only" else ""
        raise RunError(f"{found.message}; {found.remedy}{copy}") from error


def explain(error: BaseException, path: Path, command: str, *, logs: bool = True) -> Failure:
    """Describe the ``error`` that ended the run at ``path``: its kind, message and remedy, and
    whether its cause has to be corrected before the run continues.

    ``command`` is the command that continues the run, and becomes part of the result if it may
    succeed. ``logs`` is true if log.txt has the traceback.
    """
    kind, message, remedy = type(error).__name__, str(error) or type(error).__name__, ""
    is_known, system = isinstance(error, BurnishError), _system_error(error)
    number, where = (None, None) if system is None else (system.errno, system.filename)
    where = str(path) if where is None and not is_known else where
    said = f"can't write {where}"
    if _lacks_memory(error):
        kind, remedy = "memory", "free memory, by ending other programs that use it"
        said = f"there is not enough memory: {message.splitlines()[0]}"
        if saver := smaller_passes(path / "recipe.toml"):
            remedy += f"; or start a new run that needs less: {saver}"
    elif number in FULL:
        kind, said = "disk full", f"{said}: {FULL[number]}"
        remedy = f"free disk space{_free(where)}"
        if number == errno.EFBIG:
            remedy = "raise the limit, as with `ulimit -f unlimited`"
    elif number in READ_ONLY and system is not None:
        kind, said = "read-only", f"{said}: {system.strerror}"
        remedy = "make the directory and its files writable"
    elif isinstance(error, ConnectionError | TimeoutError):
        kind, said = "network", f"a connection failed: {message}"
        remedy = "check the network and the server at the other end"
    elif isinstance(error, OSError) and path in Path(where or "").parents:
        kind, said, remedy = "storage", f"{said}: {error.strerror}", "check the disk"
    elif not is_known:
        said = f"{kind}: {message}" if str(error) else kind
        remedy = f"{path / 'log.txt'} has the traceback" if logs else ""
    lead = _lead(error, path, command) if kind == type(error).__name__ else CONTINUE
    return Failure(
        kind, message if is_known else said, remedy, "" if lead == NEW_RUN else command, lead
    )


@contextmanager
def closing_last(parts: C) -> Iterator[C]:
    """Close ``parts`` at the end of the block. An error of ``close`` does not replace an error of
    the block."""
    try:
        yield parts
    except BaseException:
        with suppress(Exception):
            parts.close()
        raise
    parts.close()


def _lead(error: BaseException, path: Path, command: str) -> str:
    """Return the text before the ``command`` that continues the run at ``path``; `NEW_RUN` if the
    command can't succeed.

    A run computes the same on each attempt, so most errors return unless their cause is corrected.
    """
    if isinstance(error, PASSING):
        return CONTINUE
    if isinstance(error, ConfigError):
        return NEW_RUN
    notes = []
    if isinstance(error, GraderError | DataError) and checkpoints.latest(path):
        option = "--anyway" if command.startswith("burnish resume ") else "anyway=True"
        notes.append(f"add {option} if a reward or data file has changed")
    if isinstance(error, DataError | ModelError):
        notes.append("a changed recipe needs a new run")
    return CORRECT + (f" ({'; '.join(notes)})" if notes else "")


def _system_error(error: BaseException | None) -> OSError | None:
    """Return the system's error that caused an exception; None if no system error did."""
    while error is not None:
        if isinstance(error, OSError) and error.errno is not None:
            return error
        if found := re.search(r"\(os error (\d+)\)", str(error)):  # of safetensors
            return OSError(int(found[1]), str(error))
        error = error.__cause__
    return None


def _lacks_memory(error: BaseException) -> bool:
    kinds = (MemoryError, RuntimeError, BurnishError)  # torch raises a RuntimeError
    is_number = isinstance(error, OSError) and error.errno == errno.ENOMEM
    is_said = isinstance(error, kinds) and OUT_OF_MEMORY.search(str(error)) is not None
    return is_number or is_said or isinstance(error, MemoryError)


def _free(where: str | None) -> str:
    """Return a text with the number of free bytes of the disk that holds a path; empty if it is
    unknown."""
    with suppress(OSError, StopIteration, TypeError):
        path = Path(str(where)).absolute()
        place = next(place for place in (path, *path.parents) if place.exists())
        return f" ({shutil.disk_usage(place).free:,} bytes are free)" if where else ""
    return ""


def _shortened(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]} … (log.txt has the rest)"
