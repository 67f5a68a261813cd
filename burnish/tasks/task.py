"""What every task is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from burnish.types import Completion, Grade, Prompt


class Task(Protocol):
    """Where prompts come from, and what their responses are worth."""

    def prompt(self, index: int) -> Prompt:
        """The prompt of the run's group number ``index``."""

    @property
    def validation(self) -> list[Prompt]:
        """The prompts that are held out."""

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        """The grades in the pairs' order."""

    def answer(self, prompt: Prompt, response: str) -> str | None:
        """The answer that a response votes for in majority@k; None if it has none."""

    def close(self) -> None:
        """Ends what the task started."""
