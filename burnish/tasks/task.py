"""The protocol that every task implements."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from burnish.types import Completion, Grade, Prompt


class Task(Protocol):
    """Provides prompts and grades responses. Tasks can be pickled."""

    validation: list[Prompt]
    """Held-out prompts."""

    def prompt(self, number: int) -> Prompt:
        """Return the training prompt at index ``number`` of the task's endless sequence."""

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        """Grade each response to its prompt; return the grades in the order of the pairs."""

    def answer(self, prompt: Prompt, response: str) -> str | None:
        """Return the answer in a response, which is its vote in majority@k; None if the response
        has no answer."""

    def close(self) -> None:
        """Stop the processes that the task started."""
