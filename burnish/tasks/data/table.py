"""Rows of tables: Parquet, Arrow and CSV files, saved datasets, and datasets of Hugging Face's hub.

The package datasets converts a file to Arrow once, in its cache, and maps that file into memory:
rows are read when they are needed, in any order.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from burnish.console.progress import tell
from burnish.errors import DataError, MissingExtra
from burnish.model.hub import cache_directory
from burnish.recipe.base import nearest
from burnish.tasks.data.names import FORMS, SAVED, SAVED_SPLITS, DataName

BATCH = 1000
"""Rows that are converted to Python objects at once."""
DEFAULT_SPLITS = {"train": "train", "validation": "validation"}
"""Split of data whose name has none, by the setting that names the data."""


class ArrowTable:
    """Rows of a ``datasets.Dataset``, without columns of binary data."""

    def __init__(self, dataset: Any, name: str) -> None:
        self.name = name
        self.left_out = {
            column: str(feature)
            for column, feature in dataset.features.items()
            if _has_binary(dataset.data.schema.field(column).type)
        }
        """Columns that rows do not have, because they hold images, sound or other binary data, by
        their type."""
        self.columns = [name for name in dataset.column_names if name not in self.left_out]
        self._data = dataset.with_format(None).select_columns(self.columns)
        if not len(self):
            raise DataError(f"{name} holds no rows")
        self._chats = [
            column
            for column in self.columns
            if {"role", "content"} <= set(_struct_fields(dataset.data.schema.field(column).type))
        ]
        """Columns of chat messages."""

    def __len__(self) -> int:
        return int(self._data.num_rows)

    def read(self, index: int) -> dict[str, Any]:
        return self._row(self._data[index])

    def scan(self) -> Iterator[dict[str, Any]]:
        for start in range(0, len(self), BATCH):
            columns = self._data[start : start + BATCH]
            for values in zip(*columns.values(), strict=True):
                yield self._row(dict(zip(columns, values, strict=True)))
        _release_memory()

    def place(self, index: int) -> str:
        return f"{self.name}, row {index} (counted from 0)"

    @property
    def cached_files(self) -> list[Path]:
        """The Arrow files that hold the rows."""
        return [Path(file["filename"]) for file in self._data.cache_files]

    def _row(self, row: dict[str, Any]) -> dict[str, Any]:
        return row | {column: _messages(row[column]) for column in self._chats}


def open_table(named: DataName, purpose: str) -> ArrowTable:
    """Open a table; download a dataset of the hub unless the cache has it.

    ``purpose`` is the setting that names the table, "train" or "validation", which is also the
    split of a dataset whose name has none. Raise a DataError if the table can't be read, or
    MissingExtra without the package datasets.
    """
    datasets = import_datasets(f"task.{purpose} = {named.name!r}")
    split = named.split or DEFAULT_SPLITS[purpose]
    with _quiet(datasets):
        if named.format == "hub":
            tell("download", f"fetching {named.name}, unless the cache has it")
        try:
            found = _load(datasets, named, split)
        except (OSError, ConnectionError) as error:
            if named.format == "hub":
                raise DataError(
                    f"{named.name} is neither reachable nor in the cache of the package datasets: "
                    f"{_line(error)}; check the name and the network, or give files of this machine"
                ) from error
            raise DataError(f"{named.name} can't be read: {_line(error)}") from error
        except DataError:
            raise
        except Exception as error:  # the package's readers raise many classes
            raise DataError(
                f"{named.name} can't be read as {named.format} data: {_line(error)}; data must be "
                f"{FORMS}"
            ) from error
    _release_memory()
    return ArrowTable(found, named.name)


def _release_memory() -> None:
    """Return unused memory of Arrow's allocator to the system: after a pass over a large table it
    keeps hundreds of MB."""
    import pyarrow

    pyarrow.default_memory_pool().release_unused()


def _load(datasets: ModuleType, named: DataName, split: str) -> Any:
    """Load one split of the data as a ``datasets.Dataset``."""
    path = Path(named.path)
    if named.format == "directory" and (path / SAVED).is_file():
        if named.split is not None:
            raise DataError(f"{named.path} has no splits, got {named.name!r}; use {named.path!r}")
        return datasets.load_from_disk(named.path)
    if named.format == "directory" and (path / SAVED_SPLITS).is_file():
        splits = datasets.load_from_disk(named.path)
        if split not in splits:
            raise _no_split(named, split, list(splits))
        return splits[split]
    if named.format not in ("directory", "hub"):
        files = {"train": [str(file) for file in named.files]}
        return datasets.load_dataset(named.format, data_files=files, split="train")
    try:
        return datasets.load_dataset(named.path, named.config, split=split)
    except ValueError as error:
        if "Unknown split" not in str(error):
            raise
        known = str(error).partition("[")[2].rpartition("]")[0].replace("'", "").split(", ")
        raise _no_split(named, split, known) from None


def _no_split(named: DataName, split: str, known: list[str]) -> DataError:
    base = named.name.removesuffix(f":{named.split}") if named.split else named.name
    return DataError(
        f"{base} has no split {split!r}, only {', '.join(known)}{nearest(split, known)}; name one "
        f"of them, as in {f'{base}:{known[0]}'!r}"
    )


def save_dataset(data: Any) -> dict[str, str | None]:
    """Write a Dataset, a DatasetDict or a pandas DataFrame of a script to burnish's cache; return
    the directories with the training rows ("train") and the validation rows ("validation").

    Validation rows are the split validation, or else test; None if the data has neither. Equal data
    shares a directory.
    """
    datasets = import_datasets(f"data of the type {type(data).__name__}")
    if isinstance(data, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise DataError(
            f"data must have random access, got a streamed {type(data).__name__}; load it without "
            "streaming=True"
        )
    if isinstance(data, Mapping):
        if "train" not in data:
            raise DataError(f"data has no split 'train', only {', '.join(data)}; pass one of them")
        held_out = next((data[name] for name in ("validation", "test") if name in data), None)
        return {
            "train": _saved(datasets, data["train"]),
            "validation": None if held_out is None else _saved(datasets, held_out),
        }
    if not isinstance(data, datasets.Dataset):
        data = _of_frame(datasets, data)
    return {"train": _saved(datasets, data), "validation": None}


def _of_frame(datasets: ModuleType, frame: Any) -> Any:
    """Convert a pandas DataFrame, whose columns must be of one type each."""
    try:
        return datasets.Dataset.from_pandas(frame, preserve_index=False)
    except (TypeError, ValueError) as error:  # pyarrow's errors are of these classes
        raise DataError(
            f"the DataFrame can't be converted to a table: {_line(error)}; give each column values "
            "of one type and a text as its name"
        ) from None


def _saved(datasets: ModuleType, dataset: Any) -> str:
    """Save a dataset under a hash of its contents; return the path of its directory."""
    given = cache_directory() / "given"
    given.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given) as scratch, _quiet(datasets):
        made, digest = Path(scratch) / "data", hashlib.sha256()
        dataset.save_to_disk(made)
        for file in sorted(made.glob("*.arrow")):
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        target = given / f"data-{digest.hexdigest()[:16]}"
        if not target.exists():
            made.rename(target)
    return str(target)


def import_datasets(needed_by: str) -> ModuleType:
    """Import the package datasets; raise MissingExtra if it is not installed. ``needed_by`` says in
    the error what needs the package."""
    try:
        import datasets
    except ImportError:
        raise MissingExtra("data", needed_by) from None
    module: ModuleType = datasets
    return module


@contextmanager
def _quiet(datasets: ModuleType) -> Iterator[None]:
    """Silence progress bars and warnings of the package and of Hugging Face's hub, such as a line
    for each retry, which would overwrite burnish's display."""
    shown = datasets.are_progress_bars_disabled()
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    datasets.disable_progress_bars()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if not shown:
            datasets.enable_progress_bars()


def _has_binary(kind: Any) -> bool:
    """Return whether an Arrow type is binary or contains a binary type."""
    names = ("binary", "large_binary", "fixed_size_binary", "binary_view")
    storage = getattr(kind, "storage_type", kind)
    inner = [storage.field(i).type for i in range(storage.num_fields)]
    return str(storage).partition("[")[0] in names or any(map(_has_binary, inner))


def _struct_fields(kind: Any) -> list[str]:
    """Return the field names of a struct, or of the structs in a list; empty for other types."""
    if str(kind).startswith(("list", "large_list")) and kind.num_fields:
        kind = kind.field(0).type
    is_struct = str(kind).startswith("struct")
    return [kind.field(i).name for i in range(kind.num_fields)] if is_struct else []


def _messages(value: Any) -> Any:
    """Return chat messages as JSONL has them: a list of objects, without the fields that the table
    adds because other messages, or their tool calls, have them."""
    if isinstance(value, Mapping) and all(isinstance(one, list) for one in value.values()):
        # Older versions of the package store a list of structs as one list of each field.
        value = [dict(zip(value, row, strict=True)) for row in zip(*value.values(), strict=True)]
    return _without_none(value)


def _without_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_none(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _without_none(item) for key, item in value.items() if item is not None}
    return value


def _line(error: BaseException) -> str:
    """Return the error's text in one line."""
    cause = error.__cause__ if type(error).__name__ == "DatasetGenerationError" else None
    return " ".join(f"{cause or error}".split())[:300]
