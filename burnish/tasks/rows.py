"""Rows of data from files, tables or a script: reading, checking, holding some of them out."""

from __future__ import annotations

import hashlib
import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from burnish.console.progress import begin, tell, unheard
from burnish.console.text import counted
from burnish.errors import ConfigError, DataError
from burnish.randomness import Purpose, Stream, permutation
from burnish.recipe.base import nearest
from burnish.recipe.tasks import MathTask, PromptsTask, RowsTask
from burnish.tasks.data.lines import JoinedRows, JsonLines, RowSource, ScriptRows
from burnish.tasks.data.names import parse_data_name

MARKS = re.compile(r"<<[^<>\n]*=[^<>\n]*>>")
"""GSM8K's calculator annotations, such as <<48/2=24>>, which repeat the text around them."""
HELD_OUT_SEED = 0
"""Seed of the choice of rows from a validation file; it is the same for all runs."""
MOST_HELD_OUT = 1000
"""Maximum number of rows of a table that are held out unless the recipe sets another number."""
LARGE, REPORTED = 50_000, 2000
"""Number of rows from which on checks report their progress, and rows between two reports."""
ROLES = ("system", "user", "assistant", "tool")
"""Roles that a chat message may have."""


T = TypeVar("T")


class DataRow(dict[str, Any]):
    """A row of data: a dict of its fields. ``where`` describes its place, such as the file and the
    line, for error messages. Rows are held out by ``held_out_by``; None: by their prompts."""

    def __init__(self, fields: Mapping[str, Any], where: str, held_out_by: Any = None) -> None:
        super().__init__(fields)
        self.where = where
        self._held_out_by = held_out_by

    @property
    def held_out_by(self) -> Any:
        """The text or messages by which rows are held out."""
        return self["prompt"] if self._held_out_by is None else self._held_out_by


Check = Callable[[Any, str], DataRow]
"""Takes a JSON value and the description of its place; returns the row or raises a DataError."""


def check_prompt(row: Any, where: str) -> DataRow:
    """Check that a row has a valid "prompt", a text or chat messages; other fields are not checked.

    Return the row or raise a DataError, which begins with ``where``, the row's place.
    """
    if not isinstance(row, Mapping):
        raise DataError(f"{where}: must be an object with a prompt, got {type(row).__name__}")
    if "prompt" not in row:
        raise DataError(
            f"{where}: no field 'prompt', only {', '.join(map(repr, row)) or 'none'}; if another "
            "field holds the prompt, set task.columns.prompt to its name"
        )
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
    """Raise a DataError if a text has a lone surrogate, such as "\\ud83d" in JSON."""
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


class Rows(Sequence[DataRow]):
    """Checked rows of a source, in its order. A row is read and checked whenever it is accessed, so
    a large table needs little memory, and each access may raise a DataError."""

    def __init__(
        self,
        source: RowSource,
        check: Check = check_prompt,
        columns: Mapping[str, str] | None = None,
        indices: npt.NDArray[np.intp] | None = None,
    ) -> None:
        """``check`` checks each row. ``columns`` maps a field to the source's column that holds it,
        as task.columns does; None for no such fields. ``indices`` are the indices of the rows in
        the source, ascending; None for all rows."""
        self.source, self._check, self._columns = source, check, columns or {}
        self._indices = np.arange(len(source)) if indices is None else indices

    @property
    def name(self) -> str:
        return self.source.name

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.select(np.arange(len(self))[index])
        place = int(self._indices[index])
        return self._checked(place, self.source.read(place))

    def __iter__(self) -> Iterator[DataRow]:
        if 4 * len(self) < len(self.source):  # a few rows of many
            yield from map(self.__getitem__, range(len(self)))
            return
        chosen = np.zeros(len(self.source), bool)
        chosen[self._indices] = True
        for place, row in enumerate(self.source.scan()):
            if chosen[place]:
                yield self._checked(place, row)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(map(operator.eq, self, other))

    def select(self, positions: npt.NDArray[np.intp]) -> Rows:
        """Return the rows at these positions, which are ascending."""
        return Rows(self.source, self._check, self._columns, self._indices[positions])

    def hash_prompts(self) -> npt.NDArray[np.uint64]:
        """Read and check all rows; return a hash of each prompt, [len(self)].

        Prompts that differ only in white space or case have the same hash.
        """
        doing = f"checking the rows of {self.name}"
        hashes = (
            _hash_prompt(r.held_out_by) for r in counted_rows(self, len(self), "check", doing)
        )
        return np.fromiter(hashes, np.uint64, len(self))

    def _checked(self, place: int, row: Any) -> DataRow:
        where = self.source.place(place)
        return self._check(_with_columns(row, self._columns, where), where)


def counted_rows(items: Iterable[T], total: int, phase: str, doing: str) -> Iterator[T]:
    """Yield the items. If their number ``total`` is at least `LARGE`, display how many are done.

    ``phase`` and ``doing`` are the phase and the description that `begin` displays.
    """
    report = unheard if total < LARGE else begin(phase, doing, total=total, unit="rows")
    for number, item in enumerate(items):
        if number % REPORTED == 0:
            report(number)
        yield item


def _with_columns(row: Any, columns: Mapping[str, str], where: str) -> Any:
    """Return the row with the fields of task.columns added to its own; raise a DataError if it does
    not have one of the columns."""
    if not columns or not isinstance(row, Mapping):
        return row
    for field, column in columns.items():
        if column not in row:
            raise DataError(f"{where}: {_no_column(field, column, list(row))}")
    return {**row, **{field: row[column] for field, column in columns.items()}}


def _no_column(field: str, column: str, known: Sequence[str]) -> str:
    listed = ", ".join(map(repr, known)) or "none"
    near = nearest(column, known)
    return f"no column {column!r} for task.columns.{field}, only {listed}{near}"


def _hash_prompt(prompt: str | Sequence[Mapping[str, str]]) -> int:
    messages = [{"role": "", "content": prompt}] if isinstance(prompt, str) else prompt
    parts = [part for message in messages for part in (message["role"], message["content"])]
    plain = "\0".join(" ".join(part.casefold().split()) for part in parts)
    return int.from_bytes(hashlib.blake2b(plain.encode(), digest_size=8).digest())


def read_rows(path: Path, check: Check = check_prompt) -> list[DataRow]:
    """Read and check the rows of a JSONL file. A DataError names the file and the line."""
    return list(Rows(JsonLines(path), check))


def open_source(name: str, purpose: str) -> RowSource:
    """Open the data that a recipe names; raise a DataError if it can't be read.

    ``purpose`` is "train" or "validation": the setting with the name, and the default split of a
    table.
    """
    named = parse_data_name(name)
    if named.is_table:
        from burnish.tasks.data.table import open_table

        return open_table(named, purpose)
    sources = [JsonLines(path) for path in named.files or [Path(name)]]
    return sources[0] if len(sources) == 1 else JoinedRows(sources, name)


def open_rows(config: RowsTask, source: RowSource, check: Check) -> Rows:
    """Return the rows of a source, each with the fields that task.columns adds; ``check`` checks a
    row.

    A row that task.system does not suit is an error when it is read. Raise a DataError at once if a
    table lacks a column of task.columns, or if the column has binary data.
    """
    known = getattr(source, "columns", None)
    binary = getattr(source, "left_out", {})
    for field, column in config.columns.items():
        if column in binary:
            raise DataError(
                f"task.columns.{field} = {column!r}: this column of {source.name} has binary data "
                f"({binary[column]}), and burnish reads texts and chat messages; name another one"
            )
        if known is not None and column not in known:
            raise DataError(f"{source.name}: {_no_column(field, column, known)}")
    if config.system is not None and isinstance(config, PromptsTask | MathTask):
        check = partial(_check_with_system, check, config.chat)
    return Rows(source, check, config.columns)


def _check_with_system(check: Check, chat: bool, row: Any, where: str) -> DataRow:
    """Check a row of a task that has a system message."""
    checked = check(row, where)
    prompt = checked["prompt"]
    if isinstance(prompt, str) and not chat:
        raise DataError(
            f"{where}: task.system needs chat messages, and with task.chat = false this prompt is "
            "plain text; set task.chat = true, or remove task.system"
        )
    if not isinstance(prompt, str) and prompt[0]["role"] == "system":
        raise DataError(
            f"{where}: the prompt has a system message, and task.system is another one; remove one "
            "of the two"
        )
    return checked


def load_rows(config: RowsTask, *, seed: int, check: Check = check_prompt) -> tuple[Rows, Rows]:
    """Read and check all rows of a script or of the recipe's data; return training and validation
    rows. A training row whose prompt is also a validation prompt is left out.

    Without validation data, a random part of the training rows is held out, which depends on
    ``seed``. Rows of validation data are the same for every seed, so that runs can be compared. If
    task.validation_rows is 0, validation data is not read, and all rows are training rows. Raise a
    ConfigError if the recipe has no data, or a DataError if a row is invalid or too few rows are
    left.
    """
    if config.rows is not None:
        rows = open_rows(config, ScriptRows(config.rows), check)
    elif config.train is not None:
        rows = open_rows(config, open_source(config.train, "train"), check)
    else:
        raise ConfigError("there are no prompts; give --data FILE.jsonl or set task.train")
    prompts, count = rows.hash_prompts(), config.validation_rows
    if config.validation is None or count == 0:
        most = MOST_HELD_OUT if hasattr(rows.source, "columns") else None
        kept, held = split(prompts, count, seed=seed, most=most)
        return rows.select(kept), rows.select(held)
    validation = open_rows(config, open_source(config.validation, "validation"), check)
    held_out = validation.hash_prompts()
    if count not in (None, len(validation)):
        chosen = choose(len(validation), count, seed=HELD_OUT_SEED)
        validation, held_out = validation.select(chosen), held_out[chosen]
    return rows.select(np.flatnonzero(~np.isin(prompts, held_out))), validation


def choose(size: int, count: int, *, seed: int) -> npt.NDArray[np.intp]:
    """Draw ``count`` of ``size`` rows at random; return their indices, ascending. Raise a DataError
    unless ``count`` is less than ``size``."""
    if count >= size:
        raise DataError(
            f"{size} rows do not split: {count} for validation leave no others; give more "
            "rows, hold out fewer, or give a separate validation file"
        )
    return np.sort(permutation(seed, Stream.TASK, 0, Purpose.SPLIT, size)[:count])


def split(
    prompts: npt.NDArray[np.uint64], count: int | None, *, seed: int, most: int | None = None
) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    """Draw different prompts at random and hold out one row of each; return the indices of the
    training rows and of the validation rows, both ascending. Other rows with a held-out prompt are
    in neither part.

    ``prompts`` are hashes of the rows' prompts. ``count`` is the number of validation rows; 0 holds
    out none. If it is None, a tenth of the different prompts is held out, at least one and at most
    ``most`` (None: no maximum); if all rows have the same prompt, none is. Raise a DataError if no
    prompt is left to train on.
    """
    order = permutation(seed, Stream.TASK, 0, Purpose.SPLIT, len(prompts))
    _, first = np.unique(prompts[order], return_index=True)
    distinct = len(first)
    if count is None and distinct == 1:
        return np.arange(len(prompts)), np.arange(0)
    wanted = max(1, round(0.1 * distinct)) if count is None else count
    if count is None and most is not None:
        wanted = min(wanted, most)
    if wanted >= distinct:
        repeated = "" if distinct == len(prompts) else f" with {distinct} different prompts"
        remedy = "hold out fewer" if distinct > 1 else "use task.validation_rows = 0"
        raise DataError(
            f"{len(prompts)} rows{repeated} do not split: {wanted} for validation leave no others; "
            f"give more rows, {remedy}, or give a separate validation file"
        )
    held_out = np.sort(order[np.sort(first)[:wanted]])
    return np.flatnonzero(~np.isin(prompts, prompts[held_out])), held_out


def check_trainable(train: Rows, validation: Rows) -> None:
    """Raise a DataError if no row is left to train on."""
    if not len(train):
        raise DataError(
            f"no row of {train.name} is left to train on, because every prompt is also a "
            f"validation prompt (in {validation.name}); give other rows, or hold out fewer"
        )


def describe_split(train: Rows, validation: Rows, wanted: int | None = None) -> list[str]:
    """Return sentences on the rows that are used for validation, and on rows and columns that are
    left out. ``wanted`` is task.validation_rows."""
    count, name = len(validation), validation.name
    source, whole = train.source, len(train.source)
    is_held_out = validation.source is source
    lines = [f"validation: {counted(count, 'row')} of {name}"]
    if is_held_out and count:
        lines = [f"validation: {count:,} of the {counted(whole, 'row')} of {name} are held out"]
    elif wanted == 0:
        lines = [
            f"validation: none, because task.validation_rows = 0; all {counted(whole, 'row')} of "
            f"{name} are trained on"
        ]
    elif not count:
        lines = [
            f"validation: none, because {name} has only one prompt; give two or more prompts to "
            "hold one out"
        ]
    left_out = whole - len(train) - is_held_out * count
    if left_out and len(train):
        lines.append(
            f"{counted(left_out, 'row')} of {train.name} with the prompt of a validation row: not "
            "trained on"
        )
    for one in {id(rows.source): rows.source for rows in (train, validation)}.values():
        if binary := getattr(one, "left_out", {}):
            named = ", ".join(map(repr, binary))
            lines.append(f"rows of {one.name} come without the binary data of {named}")
    return lines


def tell_split(train: Rows, validation: Rows, wanted: int | None) -> None:
    """Display how the rows are used; see ``describe_split``."""
    for line in describe_split(train, validation, wanted):
        tell("note", line)


def shuffled(index: int, size: int, *, seed: int) -> int:
    """Return the row, a number in 0 … size − 1, at ``index`` of an endless sequence in which every
    epoch has each of the ``size`` rows once, in a new order."""
    epoch, position = divmod(index, size)
    return int(_order(seed, epoch, size)[position])


@lru_cache(maxsize=8)
def _order(seed: int, epoch: int, size: int) -> npt.NDArray[np.intp]:
    return permutation(seed, Stream.TASK, epoch, Purpose.ROWS, size)
