"""Names of data in a recipe: a file, a glob pattern, a directory or a dataset of the hub.

This module imports no optional package, so the files and extras of a recipe are checked quickly.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from burnish.errors import DataError

HUB = "hf:"
"""Prefix of datasets of Hugging Face's hub: hf:ORG/NAME[/CONFIG][:SPLIT]."""
FORMATS = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}
"""Formats of tables, by the suffix of their files. Any other file holds JSON lines."""
ENDINGS = (".jsonl", *FORMATS)
SAVED, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files that ``save_to_disk`` writes for one dataset, and for several splits."""
FORMS = (
    "a JSONL, Parquet, Arrow or CSV file, a pattern such as 'data/*.parquet', a directory of "
    "datasets.save_to_disk, or hf:ORG/NAME[/CONFIG][:SPLIT]"
)
"""The forms of a name, for error messages."""


@dataclass(frozen=True)
class DataName:
    """A parsed name of data."""

    name: str
    """The name as the recipe has it."""
    format: str
    """jsonl, parquet, arrow, csv, directory, or hub."""
    path: str
    """A path or pattern, or the dataset's name on the hub."""
    config: str | None = None
    """Configuration of a dataset of the hub; None for its only or default one."""
    split: str | None = None
    """Split, such as "train" or "train[:1000]"; None if the name has none."""

    @property
    def is_table(self) -> bool:
        """Whether the package datasets reads the data."""
        return self.format != "jsonl"

    @property
    def files(self) -> list[Path]:
        """The files on this machine, sorted; an empty list for a dataset of the hub, or if no file
        exists. The caches that ``Dataset.map`` writes into a directory are left out."""
        path = Path(self.path)
        if self.format == "hub":
            return []
        if self.format == "directory":
            found = (file for file in path.rglob("*") if file.is_file())
            return sorted(file for file in found if not file.name.startswith((".", "cache-")))
        return [path] if path.exists() else sorted(Path(file) for file in glob(self.path))

    @property
    def is_missing(self) -> bool:
        """Whether the data should be on this machine, and has no file."""
        return self.format != "hub" and not self.files


def parse_data_name(name: str) -> DataName:
    """Parse a name of data; raise a DataError if it can't be one.

    The data need not exist. The file system is read to tell files, patterns and directories apart.
    """
    if name.startswith(HUB):
        repository, _, split = name.removeprefix(HUB).partition(":")
        parts = repository.split("/")
        if not 2 <= len(parts) <= 3 or not all(part and part[0] not in ".~" for part in parts):
            raise DataError(
                f"{name!r} names no dataset; the form is hf:ORG/NAME[/CONFIG][:SPLIT]; for data of "
                "this machine, leave out 'hf:'"
            )
        local = Path("/".join(parts[:2]))
        if local.exists():  # the package datasets would prefer it
            raise DataError(
                f"{name!r} names a dataset of the hub, but {local} also exists in this directory; "
                f"use {str(local)!r} for the data of this machine, or run the command elsewhere"
            )
        return DataName(
            name, "hub", "/".join(parts[:2]), "/".join(parts[2:]) or None, split or None
        )
    whole, _, split = name.rpartition(":")
    path = Path(name)
    if whole and not path.exists() and Path(whole).is_dir():
        return DataName(name, "directory", whole, split=split)
    if path.is_dir():
        return DataName(name, "directory", name)
    suffix = path.suffix
    if has_magic(name) and not path.exists():
        found = sorted({Path(file).suffix for file in glob(name)})
        if len({FORMATS.get(one) for one in found}) > 1:
            raise DataError(
                f"{name!r} matches files of several formats ({', '.join(found)}); give a pattern "
                "for one of them, such as '*.parquet'"
            )
        suffix = found[0] if found else suffix
    return DataName(name, FORMATS.get(suffix, "jsonl"), name)


def parts_of_directory(directory: Path) -> dict[str, str | None]:
    """Return the names of the training and the validation data in a directory, by "train" and
    "validation".

    The directory has the splits of a ``DatasetDict``, one dataset, or files such as train.parquet
    and validation.parquet. If it has no validation data, "validation" is None, so that training
    rows are held out. In all other directories, and beside train.jsonl, the names are train.jsonl
    and validation.jsonl, whether these files exist or not.
    """
    if (directory / SAVED_SPLITS).is_file():
        splits = json.loads((directory / SAVED_SPLITS).read_text(encoding="utf-8"))["splits"]
        held_out = [name for name in ("validation", "test") if name in splits]
        named = [f"{directory}:{name}" for name in held_out]
        return {"train": f"{directory}:train", "validation": named[0] if named else None}
    for ending in ENDINGS:
        train, validation = (directory / f"{name}{ending}" for name in ("train", "validation"))
        if train.is_file():
            has_own = validation.is_file() or ending == ".jsonl"
            return {"train": str(train), "validation": str(validation) if has_own else None}
    if any(file.suffix in FORMATS for file in parse_data_name(str(directory)).files):
        return {"train": str(directory), "validation": None}
    return {name: str(directory / f"{name}.jsonl") for name in ("train", "validation")}


def is_table_object(data: Any) -> bool:
    """Return whether data of a script is a table: a Dataset, a DatasetDict or a pandas DataFrame.
    Neither package is imported."""
    return type(data).__module__.partition(".")[0] in ("datasets", "pandas")
