"""The prompt stream: a task's prompts in order, each with the number of the group that it starts.

A loop takes as many prompts as it needs, so that a rollout can ask for more, and gives back what it
has learned about them (`burnish.tasks.history`). The stream's state is
saved in checkpoints, and a resumed run goes on with the prompt that would have come next.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from burnish.errors import DataError
from burnish.plan import Room
from burnish.tasks.history import History
from burnish.tasks.judged import Evolving
from burnish.tasks.task import Task
from burnish.types import Group, Prompt

PATIENCE = 100
"""Prompts in a row that may be too long."""


class Mark(NamedTuple):
    """How far a stream is."""

    groups: int
    prompts: int
    skipped: int
    passed: tuple[int, int]
    """The counts of its history; (0, 0) if it has none."""
    returned: tuple[int, int]
    """Numbers and places that were given back and not taken since."""


class Reserve(NamedTuple):
    """Prompts that a rollout in flight may ask in the place of dead groups."""

    numbers: list[int]
    marks: list[Mark]
    """Before the first of them, and after each."""


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
        self._reserved: list[Reserve] = []
        """The reserves of rollouts in flight, oldest first."""
        self._returned: tuple[list[int], list[int]] = [], []
        """Numbers and places of reserves that nobody used, which are taken first."""

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

    def reserve(self, count: int) -> list[tuple[int, Prompt]]:
        """Further prompts, which the rollout that is issued now may ask in the place of dead
        groups. Their numbers are given now, so that they do not depend on when a group is found
        dead, and on which other rollouts are in flight."""
        marks, asked = [self._mark()], list[tuple[int, Prompt]]()
        for _ in range(count):
            asked.append(self._next())
            marks.append(self._mark())
        self._reserved.append(Reserve([index for index, _ in asked], marks))
        return asked

    def release(self, used: Container[int]) -> None:
        """Takes back the prompts that the oldest rollout has in reserve and has not ``used``.

        If they were taken last, it is as if they had never been taken; otherwise the next prompts
        that are taken are these."""
        numbers, marks = self._reserved.pop(0)
        if marks[-1] == self._mark():
            # Numbers that were given back before are not part of the counts.
            while numbers and numbers[-1] not in used and marks[-2].returned == marks[-1].returned:
                del self._open[numbers.pop()]
                marks.pop()
            self._set_back(marks[-1])
        for number in numbers:
            if number not in used:
                self._returned[0].append(number)
                self._returned[1].append(self._open.pop(number))
        for returned in self._returned:
            returned.sort()

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

    def _mark(self) -> Mark:
        passed = (0, 0) if self._history is None else self._history.counts
        numbers, places = self._returned
        return Mark(self._groups, self._prompts, self.skipped, passed, (len(numbers), len(places)))

    def _set_back(self, mark: Mark) -> None:
        self._groups, self._prompts, self.skipped = mark.groups, mark.prompts, mark.skipped
        if self._history is not None:
            self._history.counts = mark.passed

    def state(self) -> dict[str, Any]:
        rubrics = {part: own.state() for part, own in self._evolving.items()}
        counts = {"groups": self._groups, "prompts": self._prompts, "skipped": self.skipped}
        rates = {} if self._history is None else dict(self._history.rates)
        known: dict[str, Any] = {"rates": rates, "rubrics": rubrics}
        if self._reserved or any(self._returned):
            known["reserved"] = [(list(one.numbers), list(one.marks)) for one in self._reserved]
            known["returned"] = [list(one) for one in self._returned]
        return {**counts, "open": list(self._open.items()), **known}

    def load_state(self, state: dict[str, Any]) -> None:
        if self._history is not None:
            self._history.load(state.get("rates", {}))
        self._groups, self._prompts = state["groups"], state["prompts"]
        self.skipped, self._open = state["skipped"], dict(state["open"])
        numbers, places = state.get("returned", ([], []))
        self._returned = list(numbers), list(places)
        self._reserved = [
            Reserve(list(numbers), [_mark_of(*mark) for mark in marks])
            for numbers, marks in state.get("reserved", ())
        ]
        for part, own in self._evolving.items():
            own.load_state(state.get("rubrics", {}).get(part, {}))

    def _begin(self, place: int) -> tuple[int, Prompt]:
        if self._returned[0]:
            index = self._returned[0].pop(0)
        else:
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
            if self._returned[1]:
                place = self._returned[1].pop(0)
            else:
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


def _mark_of(groups: int, prompts: int, skipped: int, passed: Any, returned: Any) -> Mark:
    return Mark(groups, prompts, skipped, tuple(passed), tuple(returned))


def fits(prompt: Prompt, room: Room | None) -> bool:
    return room is None or len(prompt.token_ids) <= room.tokens
