"""The prompt stream: a task's prompts in order, each with the number of the group that it starts.

A loop takes as many prompts as it needs, so that a rollout can ask for more, and gives back what it
has learned about them (`burnish.tasks.history`). The stream's state is
saved in checkpoints, and a resumed run goes on with the prompt that would have come next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

from burnish.errors import DataError
from burnish.plan import Room
from burnish.tasks.history import History
from burnish.tasks.judged import Evolving
from burnish.tasks.task import Task
from burnish.types import Group, Prompt

PATIENCE = 100
"""Prompts in a row that may be too long."""


class PromptStream:
    """Numbers groups, and remembers the prompt of each group that is not closed."""

    BEGINNING: ClassVar[dict[str, Any]] = {"groups": 0, "prompts": 0, "skipped": 0, "open": []}

    def __init__(
        self,
        task: Task,
        room: Room | None = None,
        history: History | None = None,
        evolving: Mapping[str, Evolving] | None = None,
    ) -> None:
        """room: for the longest prompt; None if no model bounds it. history: None if every prompt
        is asked in its turn, whatever was learned about it. evolving: criteria that are proposed
        during the run, by the part whose prompts take them."""
        self._task, self._room, self._history = task, room, history
        self._evolving = evolving or {}
        self._groups = self._prompts = self.skipped = 0
        self._open: dict[int, int] = {}
        """The place of each open group's prompt in the task's order."""

    @property
    def next_index(self) -> int:
        """The index of the next group."""
        return self._groups

    @property
    def open(self) -> list[int]:
        """The indices of groups that were asked, and are neither learned from nor dropped."""
        return list(self._open)

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """The next prompts, each after the index of its group in the run."""
        return [self._next() for _ in range(count)]

    def prompt(self, index: int) -> Prompt:
        """The prompt of an open group."""
        return self._ask(self._open[index])

    def close(self, indices: Iterable[int]) -> None:
        """These groups were learned from, or dropped."""
        for index in indices:
            del self._open[index]

    def ask_again(self, index: int) -> tuple[int, Prompt]:
        """Closes a group, and asks its prompt under a new index."""
        return self._begin(self._open.pop(index))

    def note(self, groups: Sequence[Group]) -> dict[str, float]:
        """Takes back what a step has learned about prompts, and tells what follows in figures."""
        figures = {} if self._history is None else self._history.note(groups)
        for part, own in self._evolving.items():
            told = own.note([group for group in groups if (group.prompt.part or "") == part])
            figures |= {f"{name}/{part}" if part else name: n for name, n in told.items()}
        return figures

    def versions(self, step: int) -> list[dict[str, Any]]:
        """The versions of rubrics that a step made."""
        every = [(part, row) for part, own in self._evolving.items() for row in own.versions]
        return [row | {"part": part or None} for part, row in every if row["step"] == step]

    def state(self) -> dict[str, Any]:
        rubrics = {part: own.state() for part, own in self._evolving.items()}
        counts = {"groups": self._groups, "prompts": self._prompts, "skipped": self.skipped}
        rates = {} if self._history is None else dict(self._history.rates)
        known = {"rates": rates, "rubrics": rubrics}
        return {**counts, "open": list(self._open.items()), **known}

    def load_state(self, state: dict[str, Any]) -> None:
        if self._history is not None:
            self._history.load(state.get("rates", {}))
        self._groups, self._prompts = state["groups"], state["prompts"]
        self.skipped, self._open = state["skipped"], dict(state["open"])
        for part, own in self._evolving.items():
            own.load_state(state.get("rubrics", {}).get(part, {}))

    def _begin(self, place: int) -> tuple[int, Prompt]:
        index, self._groups = self._groups, self._groups + 1
        self._open[index] = place
        return index, self._ask(place)

    def _ask(self, place: int) -> Prompt:
        prompt = self._task.prompt(place)
        own = self._evolving.get(prompt.part or "")
        return prompt if own is None else own.attach(prompt)

    def _next(self) -> tuple[int, Prompt]:
        too_long = 0
        while too_long < PATIENCE:
            place, self._prompts = self._prompts, self._prompts + 1
            prompt = self._task.prompt(place)
            if not fits(prompt, self._room):
                self.skipped += 1
                too_long += 1
            elif self._history is None or self._history.admits(prompt.prompt_id, place):
                return self._begin(place)
        assert self._room is not None, "otherwise every prompt fits"
        raise DataError(
            f"{PATIENCE} prompts one after another are too long: the last has "
            f"{len(prompt.token_ids)} tokens, and {self._room.why} leaves {self._room.tokens}; "
            "make room, or set task.long_prompts = 'cut'"
        )


def fits(prompt: Prompt, room: Room | None) -> bool:
    return room is None or len(prompt.token_ids) <= room.tokens
