"""The base of a recipe's sections, names that stand for tables, and the nearest right spelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, model_validator

OWN = "own"
"""The name of a piece that is a function of a script."""


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)
    ordered: ClassVar[tuple[str, str] | None] = None
    """Two settings of which the first is at most the second; None if no two are compared."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.ordered is not None:
            low, high = (getattr(self, name) for name in self.ordered)
            if low > high:
                names = " at or below ".join(self.ordered)
                raise ValueError(f"needs {names}, got {low:g} and {high:g}")
        return self


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
    """The end of an error's message: the nearest right spelling, or nothing if none is near."""
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
