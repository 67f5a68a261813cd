"""A run is a directory. Everything a plot or a report shows is read from there.

recipe.toml      the resolved recipe; itself a recipe
environment.json versions, machine, threads
metrics.jsonl    a row per step, the same for the same seed
timings.jsonl    a row per step, wall clock
log.txt          prompts, responses, rewards and advantages, to be read
summary.json     where it began and ended
curves.png       loss and reward
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from burnish.config import Recipe, effective, to_toml
from burnish.errors import RunError


class RunDirectory:
    """Open for writing by one process at a time, which holds its lock."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.path = path
        self._lock = _lock(path)
        if (path / "metrics.jsonl").exists():
            self._lock.close()
            raise RunError(f"{path} already holds a run; choose another --out or remove it")
        self.write("recipe.toml", to_toml(effective(recipe)))
        self.write("environment.json", json.dumps(environment(), indent=2) + "\n")
        self._files: dict[str, TextIO] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for file in (*self._files.values(), self._lock):
            file.close()

    def append(self, name: str, text: str) -> None:
        """Adds to a file and hands it to the operating system, so that a crash loses no line."""
        if name not in self._files:
            self._files[name] = (self.path / name).open("a", encoding="utf-8")
        self._files[name].write(text)
        self._files[name].flush()

    def append_row(self, name: str, row: Mapping[str, Any]) -> None:
        self.append(name, json.dumps(row) + "\n")

    def write(self, name: str, text: str) -> None:
        """Replaces a file as a whole: a reader sees the old one or the new one."""
        temporary = self.path / f".{name}.new"
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, self.path / name)


def _lock(path: Path) -> TextIO:
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / ".lock").open("w")
    except OSError as error:
        message = f"can't write to {path}: {error.strerror}; choose another --out"
        raise RunError(message) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise RunError(f"{path} is in use by another run; choose another --out") from None
    return lock


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
