"""The prompt stream: a task's prompts in order, each with the number of the group that it starts.

A loop takes as many prompts as it needs, so that a rollout can ask for more. The stream's state is
saved in checkpoints, and a resumed run goes on with the prompt that would have come next.
"""

from __future__ import annotations

from burnish.errors import DataError
from burnish.plan import Room
from burnish.tasks.task import Task
from burnish.types import Prompt

PATIENCE = 100
"""Prompts in a row that may be too long."""


class PromptStream:
    """Counts groups and prompts. The counts differ by the prompts that were skipped."""

    def __init__(self, task: Task, room: Room | None = None) -> None:
        """room: for the longest prompt; None if no model bounds it."""
        self._task, self._room = task, room
        self._groups = self._prompts = 0

    @property
    def skipped(self) -> int:
        """Prompts that were too long for the model, so that the next ones were asked instead."""
        return self._prompts - self._groups

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """The next prompts, each after the index of its group in the run."""
        return [self._next() for _ in range(count)]

    def state(self) -> dict[str, int]:
        return {"groups": self._groups, "prompts": self._prompts}

    def load_state(self, state: dict[str, int]) -> None:
        self._groups, self._prompts = state["groups"], state["prompts"]

    def _next(self) -> tuple[int, Prompt]:
        for _ in range(PATIENCE):
            prompt = self._task.prompt(self._prompts)
            self._prompts += 1
            if fits(prompt, self._room):
                self._groups += 1
                return self._groups - 1, prompt
        assert self._room is not None, "otherwise every prompt fits"
        raise DataError(
            f"{PATIENCE} prompts one after another are too long: the last has "
            f"{len(prompt.token_ids)} tokens, and {self._room.why} leaves {self._room.tokens}; "
            "make room, or set task.long_prompts = 'cut'"
        )


def fits(prompt: Prompt, room: Room | None) -> bool:
    return room is None or len(prompt.token_ids) <= room.tokens
