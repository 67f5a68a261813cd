"""What sections of a recipe share: the strict model, names that stand for tables, spelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict

OWN = "own"
"""The name of a piece that is a function of a script."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def named(default: str) -> BeforeValidator:
    """A field that is one of several sections, told apart by their names.

    A table without a name is the default section.
    """

    def check(given: Any) -> Any:
        table = as_table(given)
        return {"name": default, **table} if isinstance(table, Mapping) else table

    return BeforeValidator(check)


def as_table(given: Any) -> Any:
    """The table that a bare name, or a function of a script, is short for."""
    if isinstance(given, str):
        return {"name": given}
    if callable(given):
        return {"name": OWN, "function": given}
    return given


def nearest(word: str, words: Iterable[str]) -> str:
    """Words for an error: the nearest right spelling, if there is one."""
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
