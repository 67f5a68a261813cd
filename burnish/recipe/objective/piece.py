"""A piece of an objective: its name, its settings, its formula, and its function in ``rl/``."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from burnish.sections import Section

if TYPE_CHECKING:
    from torch import Tensor

Function = Any
"""A function of a script, or its name alone if the recipe was read from a run."""


def rl(module: str, name: str) -> Callable[..., Tensor]:
    """The function ``name`` of a module in ``rl/``. It is imported when a piece is computed, so
    that ``burnish plan`` prints an objective, and refuses a wrong one, without loading torch."""
    function: Callable[..., Tensor] = getattr(import_module(f"burnish.rl.{module}"), name)
    return function


class Piece(Section):
    name: str
    written: ClassVar[str]
    """The formula, with settings in braces."""

    @property
    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in self if key != "name"}

    def formula(self) -> str:
        return self.written.format(**self.settings)


def name_of(function: Function) -> str:
    """The name of a script's function, or of an object that is called like one."""
    if isinstance(function, str):
        return function
    return str(getattr(function, "__name__", type(function).__name__))
