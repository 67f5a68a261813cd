"""The note and the tags of a run, which people write and change at any time.

They are in note.json. No result depends on them, and a resumed run keeps them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from burnish.errors import ConfigError
from burnish.runs.directory import load_json, read_recipe, replace_file

NOTE = "note.json"


class RunNote(NamedTuple):
    """The note and the tags of a run; both are empty by default."""

    text: str = ""
    tags: tuple[str, ...] = ()


def read_note(run: Path) -> RunNote:
    """Return a run's note and tags; both are empty if the run has none."""
    if not (run / NOTE).exists():
        return RunNote()
    found = load_json(run / NOTE)
    return RunNote(str(found["note"]), tuple(map(str, found["tags"])))


def write_note(
    run: Path,
    text: str | None = None,
    *,
    add: Iterable[str] = (),
    remove: Iterable[str] = (),
) -> RunNote:
    """Change a run's note and tags, and return them. The note stays as it is if ``text`` is None.

    ``add`` and ``remove`` are tags; a tag in both is removed. A tag to add that is empty or
    contains white space or a comma is a ConfigError; a directory without a run is a RunError.
    """
    read_recipe(run)  # raises if there is no run
    before, added, removed = read_note(run), tuple(add), set(remove)
    for tag in added:
        if not tag or any(c.isspace() or c == "," for c in tag):
            raise ConfigError(
                f"a tag must be a word without white space and commas, got {tag!r}; "
                "use a hyphen, or give several tags one by one"
            )
    tags = tuple(tag for tag in dict.fromkeys([*before.tags, *added]) if tag not in removed)
    note = RunNote(before.text if text is None else text, tags)
    replace_file(run / NOTE, json.dumps({"note": note.text, "tags": list(tags)}) + "\n")
    return note
