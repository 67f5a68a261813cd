"""The protocol that every task follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from burnish.types import Completion, Grade, Prompt


class TooLong(NamedTuple):
    """Prompts that a task made and that were too long for the model, counted since its start."""

    skipped: int = 0
    """Another prompt was asked instead."""
    cut: int = 0
    """The end of the prompt was asked."""


class Task(Protocol):
    """Where prompts come from, and what their responses are worth. Tasks can be pickled."""

    def prompt(self, index: int) -> Prompt:
        """The prompt of the run's group number ``index``."""

    @property
    def validation(self) -> list[Prompt]:
        """The prompts that are held out."""

    @property
    def too_long(self) -> TooLong:
        """How many prompts were skipped or cut so far."""

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        """The grades in the pairs' order."""

    def answer(self, prompt: Prompt, response: str) -> str | None:
        """The answer that a response votes for in majority@k; None if it has none."""

    def close(self) -> None:
        """Ends the processes that the task started."""
