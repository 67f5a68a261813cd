"""Which prompts a rollout asks: the task's in turn, but some of those that would teach nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from burnish.draws import Stream, uniforms
from burnish.tasks.task import Task
from burnish.types import Group, Prompt, Status

REVISIT = 5
"""What a draw is for."""


class Choice:
    """A prompt whose last group earned one reward throughout is too hard, or too easy, for now:
    when its turn comes again, it is asked with the chance ``revisit``, and passed over otherwise.
    """

    def __init__(self, revisit: float, *, seed: int) -> None:
        self._revisit, self._seed = revisit, seed
        self._turn = 0
        self._settled: set[str] = set()
        """Ids of the prompts whose last group earned one reward throughout."""

    def take(self, task: Task, count: int) -> tuple[list[Prompt], dict[str, float]]:
        """The next prompts, and how many were passed over for them."""
        first, taken = self._turn, list[Prompt]()
        while len(taken) < count:
            prompt = task.prompt(self._turn)
            if prompt.prompt_id not in self._settled or self._is_revisited():
                taken.append(prompt)
            self._turn += 1
        if self._revisit == 1:
            return taken, {}
        return taken, {"rollout/passed_over": float(self._turn - first - count)}

    def record(self, groups: Sequence[Group]) -> None:
        """What the prompts' responses earned."""
        if self._revisit == 1:
            return
        for group in groups:
            earned = {grade.reward for grade in group.grades if grade.status is not Status.ERROR}
            if len(earned) > 1:
                self._settled.discard(group.prompt.prompt_id)
            elif earned:
                self._settled.add(group.prompt.prompt_id)

    def state(self) -> dict[str, Any]:
        return {"turn": self._turn, "settled": sorted(self._settled)}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._turn, self._settled = state["turn"], set(state["settled"])

    def _is_revisited(self) -> bool:
        return float(uniforms(self._seed, Stream.TASK, self._turn, REVISIT, 0)) < self._revisit
