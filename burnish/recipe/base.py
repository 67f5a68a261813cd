"""The base class of a recipe's sections, tagged unions of sections, and spelling suggestions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

OWN = "own"
"""The name of an advantage or a loss that is a function from a script."""
LIST = "list"
"""The tag of a list of sections, in a setting that takes one section or several."""
BY_NAME = Field(discriminator="name")
"""Marks a union of sections whose member is selected by ``name``."""


class Section(BaseModel):
    """A frozen table of settings that rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    ordered: ClassVar[tuple[str, str] | None] = None
    """Names of two settings, the first of which must not exceed the second; None: no such pair."""

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        if self.ordered is not None:
            low, high = (getattr(self, name) for name in self.ordered)
            if low > high:
                names = " at or below ".join(self.ordered)
                raise ValueError(f"needs {names}, got {low:g} and {high:g}")
        return self


def named(default: str) -> BeforeValidator:
    """Return a validator for a union of sections: a bare string is the name of the member, and a
    table without a name gets the name ``default``."""

    def add_name(given: Any) -> Any:
        table = as_table(given)
        return {"name": default, **table} if isinstance(table, Mapping) else table

    return BeforeValidator(add_name)


def as_table(given: Any) -> Any:
    """Expand the short form of a section, a bare name or a function from a script, to a table.

    Any other value is returned unchanged.
    """
    if isinstance(given, str):
        return {"name": given}
    if callable(given):
        return {"name": OWN, "function": given}
    return given


def nearest(word: str, words: Iterable[str]) -> str:
    """Return "; did you mean 'WORD'?" with the one of ``words`` that is closest in spelling to
    ``word``, or "" if none is close."""
    matches = difflib.get_close_matches(word, list(words), n=1, cutoff=0.6)
    return f"; did you mean {matches[0]!r}?" if matches else ""
