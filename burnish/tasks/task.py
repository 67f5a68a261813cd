"""The protocol that every task follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from burnish.types import Completion, Grade, Prompt


class Task(Protocol):
    """Where prompts come from, and what their responses are worth. Tasks can be pickled."""

    validation: list[Prompt]
    """The prompts that are held out."""

    def prompt(self, number: int) -> Prompt:
        """The prompt at place ``number`` of the task's endless order."""

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        """The grades in the pairs' order."""

    def answer(self, prompt: Prompt, response: str) -> str | None:
        """The answer that a response votes for in majority@k; None if it has none."""

    def close(self) -> None:
        """Ends the processes that the task started."""
