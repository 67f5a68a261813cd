"""The prompt stream: a task's prompts in order, each with the index of the group that it starts.

A group is the sampled responses to one prompt. It is dead if nothing can be learned from it. A loop
takes as many prompts as it needs and reports the results of each step, from which the stream
updates solve rates (`burnish.tasks.solve_rates`) and rubrics. The stream's state is saved in
checkpoints, so that a resumed run continues with the next prompt.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from burnish.errors import DataError
from burnish.recipe.costs import Room
from burnish.tasks.judged import Evolving
from burnish.tasks.solve_rates import History
from burnish.tasks.task import Task
from burnish.types import Group, Prompt

PATIENCE = 100
"""Give up after this many consecutive prompts that are too long."""


class Mark(NamedTuple):
    """Position of a prompt stream: all of its counters."""

    groups: int
    prompts: int
    skipped: int
    passed: tuple[int, int]
    """``History.counts``; (0, 0) if there is no history of solve rates."""
    returned: tuple[int, int]
    """How many returned group indices and prompt indices have not been reused yet."""


class Reserve(NamedTuple):
    """Prompts that were set aside for a rollout in flight, to replace its dead groups."""

    numbers: list[int]
    """Group indices of the prompts."""
    marks: list[Mark]
    """Positions of the stream before the first of the prompts and after each of them."""


class PromptStream:
    """Supplies a task's prompts in order, gives the group that each one starts an index, and
    remembers the group's prompt until the group is closed: used by the learner or dropped."""

    BEGINNING: ClassVar[dict[str, Any]] = {"groups": 0, "prompts": 0, "skipped": 0, "open": []}

    def __init__(
        self,
        task: Task,
        room: Room | None = None,
        history: History | None = None,
        evolving: Mapping[str, Evolving] | None = None,
    ) -> None:
        """``room``: token limit of a prompt; None if no model limits it. ``history``: solve rates
        that select prompts; None if every prompt is used in its turn. ``evolving``: rubrics that
        change during the run, by the name of the mixture's part that they apply to."""
        self._task, self._room, self._history = task, room, history
        self._evolving = evolving or {}
        self._groups = self._prompts = self.skipped = 0
        self._open: dict[int, int] = {}
        """Index of each open group's prompt in the task's sequence."""
        self._reserved: list[Reserve] = []
        """The reserves of rollouts in flight, oldest first."""
        self._returned: tuple[list[int], list[int]] = [], []
        """Group indices and prompt indices of unused reserves, which are reused first."""

    @property
    def next_index(self) -> int:
        """Index of the next new group."""
        return self._groups

    @property
    def open(self) -> list[int]:
        """Indices of the groups that have started and are not closed."""
        return list(self._open)

    def take(self, count: int) -> list[tuple[int, Prompt]]:
        """Open a group for each of the next ``count`` prompts; return pairs of group index and
        prompt.

        Prompts that are too long, or that the history of solve rates rejects, are skipped. Raise a
        DataError if too many consecutive prompts are too long, or if no prompt is left.
        """
        return [self._next() for _ in range(count)]

    def reserve(self, count: int) -> list[tuple[int, Prompt]]:
        """Take the next ``count`` prompts as a reserve with which the rollout that is issued now
        may replace dead groups; return pairs of group index and prompt. Group indices are assigned
        now, so that they do not depend on when a group turns out to be dead or on which other
        rollouts are in flight."""
        marks, prompts = [self._mark()], list[tuple[int, Prompt]]()
        for _ in range(count):
            prompts.append(self._next())
            marks.append(self._mark())
        self._reserved.append(Reserve([index for index, _ in prompts], marks))
        return prompts

    def release(self, used: Container[int]) -> None:
        """Give the unused prompts of the oldest reserve back to the stream. ``used`` has the
        indices of the groups that its rollout has sampled.

        If nothing was taken after the reserve, the stream goes back to its earlier position.
        Otherwise the unused prompts and group indices are the next ones to be taken."""
        numbers, marks = self._reserved.pop(0)
        if marks[-1] == self._mark():
            # The stream's counters do not include indices that had been returned before.
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
        """Return the prompt of the open group with this index."""
        return self._prompt_at(self._open[index])

    def close(self, indices: Iterable[int]) -> None:
        """Forget the prompts of groups that the learner has used or that were dropped."""
        for index in indices:
            del self._open[index]

    def ask_again(self, index: int) -> tuple[int, Prompt]:
        """Close the group with this index and start a new group with the same prompt; return the
        new group's index and the prompt."""
        return self._begin(self._open.pop(index))

    def note(self, groups: Sequence[Group]) -> dict[str, float]:
        """Update solve rates and rubrics from a step's groups; return metrics."""
        metrics = {} if self._history is None else self._history.note(groups)
        for part, rubric in self._evolving.items():
            found = rubric.note([group for group in groups if (group.prompt.part or "") == part])
            metrics |= {f"{name}/{part}" if part else name: n for name, n in found.items()}
        return metrics

    def versions(self, step: int) -> list[dict[str, Any]]:
        """Return the rubric versions that step ``step`` created, as rows of rubrics.jsonl. "part"
        is the name of the task in the mixture, None without a mixture."""
        every = [(part, row) for part, rubric in self._evolving.items() for row in rubric.versions]
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
        """Return the stream's state for a checkpoint, with solve rates and rubrics."""
        rubrics = {part: rubric.state() for part, rubric in self._evolving.items()}
        counts = {"groups": self._groups, "prompts": self._prompts, "skipped": self.skipped}
        rates = {} if self._history is None else dict(self._history.rates)
        known: dict[str, Any] = {"rates": rates, "rubrics": rubrics}
        if self._reserved or any(self._returned):
            known["reserved"] = [(list(one.numbers), list(one.marks)) for one in self._reserved]
            known["returned"] = [list(one) for one in self._returned]
        return {**counts, "open": list(self._open.items()), **known}

    def load_state(self, state: dict[str, Any]) -> None:
        """Replace the stream's state, solve rates and rubrics by a saved ``state``, or by
        `BEGINNING`. Solve rates or rubrics that it does not have are reset."""
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
        for part, rubric in self._evolving.items():
            rubric.load_state(state.get("rubrics", {}).get(part, {}))

    def _begin(self, place: int) -> tuple[int, Prompt]:
        if self._returned[0]:
            index = self._returned[0].pop(0)
        else:
            index, self._groups = self._groups, self._groups + 1
        self._open[index] = place
        return index, self._prompt_at(place)

    def _prompt_at(self, place: int) -> Prompt:
        prompt = self._task.prompt(place)
        rubric = self._evolving.get(prompt.part or "")
        return prompt if rubric is None else rubric.attach(prompt)

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
            f"{PATIENCE} consecutive prompts are too long: the last has "
            f"{len(prompt.token_ids)} tokens, and {self._room.why} leaves {self._room.tokens}; "
            "raise the limit, or set task.long_prompts = 'cut'"
        )


def _mark_of(groups: int, prompts: int, skipped: int, passed: Any, returned: Any) -> Mark:
    return Mark(groups, prompts, skipped, tuple(passed), tuple(returned))


def fits(prompt: Prompt, room: Room | None) -> bool:
    """Return whether a prompt has at most ``room.tokens`` tokens; True if ``room`` is None."""
    return room is None or len(prompt.token_ids) <= room.tokens
