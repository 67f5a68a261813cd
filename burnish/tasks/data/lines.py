"""Rows of JSONL files and of scripts, with random access."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from burnish.errors import DataError

BOM = b"\xef\xbb\xbf"
IN_MEMORY = 64 * 2**20
"""Size in bytes up to which the lines of a file are kept in memory, without parsing them."""
BLOCK = 16 * 2**20
"""Bytes of a larger file that are searched for line ends at once."""


class RowSource(Protocol):
    """Rows as they were written, by index."""

    name: str
    """Name of the data for messages."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any:
        """Return a row as a JSON value."""

    def scan(self) -> Iterator[Any]:
        """Yield all rows in order."""

    def place(self, index: int) -> str:
        """Describe the place of a row, for messages."""


class ScriptRows:
    """Rows in memory, such as a list that a script has passed, with a name for messages."""

    def __init__(self, rows: Sequence[Any], name: str = "prompts") -> None:
        self._rows, self.name = rows, name

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, index: int) -> Any:
        return self._rows[index]

    def scan(self) -> Iterator[Any]:
        yield from self._rows

    def place(self, index: int) -> str:
        return f"{self.name}[{index}]"


class JsonLines:
    """Rows of a JSONL file. A large file is read line by line when rows are needed; only the
    offsets of its lines are in memory, and it must not change.

    Raise a DataError if the file can't be read or has no rows, and later if a line is not JSON or a
    large file has changed.
    """

    def __init__(self, path: Path) -> None:
        self.name, self._path = str(path), path
        try:
            with path.open("rb") as file:
                about = os.fstat(file.fileno())
                self._data = file.read() if about.st_size <= IN_MEMORY else None
                ends = _line_ends(path) if self._data is None else _newlines(self._data)
                file.seek(0)
                first = len(BOM) if file.read(len(BOM)) == BOM else 0
        except OSError as error:
            raise DataError(f"{path} can't be read: {error.strerror}") from error
        self._about = about.st_size, about.st_mtime_ns
        size = about.st_size if self._data is None else len(self._data)
        if size == first or (size == first + 1 and len(ends)):
            raise DataError(f"{path} holds no rows")
        if not len(ends) or ends[-1] != size - 1:
            ends = np.append(ends, size)
        self._bounds = np.concatenate([[first - 1], ends])
        """Offsets of the line ends, preceded by the offset before the first line."""

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def read(self, index: int) -> Any:
        start, end = int(self._bounds[index]) + 1, int(self._bounds[index + 1])
        if self._data is not None:
            return self._parsed(self._data[start:end], index)
        with self._opened() as file:
            file.seek(start)
            return self._parsed(file.read(end - start), index)

    def scan(self) -> Iterator[Any]:
        if self._data is not None:
            yield from map(self.read, range(len(self)))
            return
        with self._opened() as file:
            file.seek(int(self._bounds[0]) + 1)
            for index, line in enumerate(file):
                yield self._parsed(line.removesuffix(b"\n"), index)

    def place(self, index: int) -> str:
        return f"{self.name}, line {index + 1}"

    def _parsed(self, line: bytes, index: int) -> Any:
        try:
            return json.loads(line)
        except ValueError as error:  # includes UnicodeDecodeError
            raise DataError(f"{self.place(index)}: not JSON: {error}") from error

    def _opened(self) -> Any:
        """Open a large file, whose offsets are known, and check that it has not changed."""
        try:
            file = self._path.open("rb")
        except OSError as error:
            raise DataError(f"{self._path} can't be read: {error.strerror}") from error
        about = os.fstat(file.fileno())
        if (about.st_size, about.st_mtime_ns) != self._about:
            file.close()
            raise DataError(
                f"{self._path} has changed since it was opened, and its rows are read while they "
                "are used; restore it and resume the run, or start a new run"
            )
        return file


class JoinedRows:
    """The rows of several sources, one source after the other."""

    def __init__(self, sources: Sequence[RowSource], name: str) -> None:
        self.name, self._sources = name, sources
        self._ends = np.cumsum([len(source) for source in sources])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(self, index: int) -> Any:
        source, inner = self._find(index)
        return source.read(inner)

    def scan(self) -> Iterator[Any]:
        for source in self._sources:
            yield from source.scan()

    def place(self, index: int) -> str:
        source, inner = self._find(index)
        return source.place(inner)

    def _find(self, index: int) -> tuple[RowSource, int]:
        """Return the source that has a row, and the row's index in it."""
        which = int(np.searchsorted(self._ends, index, side="right"))
        return self._sources[which], index - (int(self._ends[which - 1]) if which else 0)


def _newlines(data: bytes) -> npt.NDArray[np.int64]:
    return np.flatnonzero(np.frombuffer(data, np.uint8) == ord("\n")).astype(np.int64)


def _line_ends(path: Path) -> npt.NDArray[np.int64]:
    """Return the offsets of all line ends of a file, which is read in blocks."""
    found, offset = [np.zeros(0, np.int64)], 0
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            found.append(_newlines(block) + offset)
            offset += len(block)
    return np.concatenate(found)
