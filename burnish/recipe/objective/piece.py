"""A piece of an objective: its name, settings, formula and paper, and the method that computes it.

Methods that compute import their function of ``rl/`` when they are called, so that reading a recipe
and printing its plan do not load torch.
"""

from __future__ import annotations

from typing import Any, ClassVar

from burnish.recipe.base import Section

Function = Any
"""A function from a script, or only its name if the recipe was read from a run."""


class Piece(Section):
    """Base class of the pieces. Of each kind, such as the losses, a recipe selects one by name."""

    name: str
    written: ClassVar[str]
    """The formula, with settings in braces. docs/objectives.md prints it with the defaults."""
    paper: ClassVar[str] = ""
    """The source of the piece in Markdown; "" if it has none."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the piece by name, without ``name``."""
        return {key: value for key, value in self if key != "name"}

    def formula(self) -> str:
        """Return the formula of the piece with the values of its settings."""
        return self.written.format(**self.settings)


def arxiv(number: str) -> str:
    """Return a Markdown link to a paper on arXiv."""
    return f"[{number}](https://arxiv.org/abs/{number})"


def name_of(function: Function) -> str:
    """Return the name of a function from a script, or of the class of a callable object."""
    if isinstance(function, str):
        return function
    return str(getattr(function, "__name__", type(function).__name__))
