"""Rows of data, from a JSONL file or from a script: read, checked, some of them held out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from burnish.draws import Purpose, Stream, permutation
from burnish.errors import ConfigError, DataError
from burnish.schema.tasks import Rows
from burnish.sections import nearest

MARKS = re.compile(r"<<[^<>\n]*=[^<>\n]*>>")
"""GSM8K's marks for a calculator, such as <<48/2=24>>; the text around them says the same."""
HELD_OUT_SEED = 0
ROLES = ("system", "user", "assistant", "tool")
"""Roles that a chat message may have."""


class DataRow(dict[str, Any]):
    """A row's fields, and words for the place where it was found."""

    def __init__(self, fields: Mapping[str, Any], where: str) -> None:
        super().__init__(fields)
        self.where = where


Check = Callable[[Any, str], DataRow]
"""Takes a JSON value and words for its place; returns the row, or raises a DataError."""


def check_prompt(row: Any, where: str) -> DataRow:
    """A row of any fields with a "prompt": a text, or chat messages."""
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: must be an object with a prompt, got {type(row).__name__}")
    if "prompt" not in row:
        raise DataError(f"{where}: no field 'prompt', only {', '.join(map(repr, row)) or 'none'}")
    prompt = row["prompt"]
    messages = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    if not prompt or not all(map(_is_message, messages)):
        raise DataError(
            f"{where}: prompt must be a text that is not empty, or a list of messages "
            f'{{"role": …, "content": …}}, got {str(prompt)[:80]!r}'
        )
    for message in messages:
        role = message["role"]
        if role not in ROLES:
            known, near = ", ".join(ROLES), nearest(role, ROLES)
            raise DataError(f"{where}: a role must be one of {known}, got {role!r}{near}")
        check_text(message["content"], where)
    return DataRow(row, where)


def check_text(text: str, where: str) -> None:
    """Raises if a text has half of a character, such as "\\ud83d" alone in JSON."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: a text must be whole characters, got the lone surrogate "
            f"{text[error.start]!r} after {text[: error.start][-20:]!r}; remove it"
        ) from None


def _is_message(message: Any) -> bool:
    keys = ("role", "content")
    return isinstance(message, Mapping) and all(isinstance(message.get(k), str) for k in keys)


def read_rows(path: Path, check: Check = check_prompt) -> list[DataRow]:
    """The rows of a JSONL file; an error names the file and the line."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").removesuffix(b"\n").split(b"\n")
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from error
    if lines == [b""]:
        raise DataError(f"{path} holds no rows")
    rows = []
    for number, line in enumerate(lines, 1):
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:  # a UnicodeDecodeError is one as well
            raise DataError(f"{where}: not JSON: {error}") from error
        rows.append(check(row, where))
    return rows


def rows_of(
    config: Rows, *, seed: int, check: Check = check_prompt
) -> tuple[list[DataRow], list[DataRow]]:
    """Train and validation rows from a script or from the recipe's files.

    The rows chosen of a validation file are the same for every seed, so that runs compare.
    """
    if config.rows is not None:
        rows = [check(row, f"prompts[{i}]") for i, row in enumerate(config.rows)]
    elif config.train is not None:
        rows = read_rows(Path(config.train), check)
    else:
        raise ConfigError("there are no prompts; give --data FILE.jsonl or set task.train")
    count = config.validation_rows
    if config.validation is None:
        return split(rows, max(1, round(0.1 * len(rows))) if count is None else count, seed=seed)
    validation = read_rows(Path(config.validation), check)
    if count not in (None, len(validation)):
        _, validation = split(validation, count, seed=HELD_OUT_SEED)
    return rows, validation


def split(rows: Sequence[DataRow], count: int, *, seed: int) -> tuple[list[DataRow], list[DataRow]]:
    """Train rows, and ``count`` validation rows, each in the file's order."""
    if count >= len(rows):
        raise DataError(
            f"{len(rows)} rows do not split: {count} for validation leave no others; give more "
            "rows, hold out fewer, or give a validation file of their own"
        )
    chosen = set(permutation(seed, Stream.TASK, 0, Purpose.SPLIT, len(rows))[:count].tolist())
    train = [row for i, row in enumerate(rows) if i not in chosen]
    return train, [row for i, row in enumerate(rows) if i in chosen]


def shuffled(index: int, size: int, *, seed: int) -> int:
    """The row at place ``index`` of an endless order: every epoch has each row once."""
    epoch, place = divmod(index, size)
    return int(_order(seed, epoch, size)[place])


@lru_cache(maxsize=8)
def _order(seed: int, epoch: int, size: int) -> npt.NDArray[np.intp]:
    return permutation(seed, Stream.TASK, epoch, Purpose.ROWS, size)
