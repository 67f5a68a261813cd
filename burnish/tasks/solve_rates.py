"""What a run has learned about its prompts: how often each was solved, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from burnish.draws import Purpose, Stream, uniforms
from burnish.errors import DataError
from burnish.schema.selection import SelectionConfig
from burnish.types import Finish, Group

PATIENCE = 100, 4
"""Prompts in a row that may have left: so many, and so many for each that has. Every pass over the
prompts has each once, so all have left then, unless a mixture hardly ever asks the others."""


class History:
    """Solve rates by the id of a prompt: the share of correct responses in its last group."""

    def __init__(
        self, chosen: SelectionConfig, seed: int, *, drops_truncated: bool = False
    ) -> None:
        """``drops_truncated``: responses that were truncated at the length limit count in no solve
        rate, because the recipe drops them."""
        self._chosen, self._seed, self._drops_truncated = chosen, seed, drops_truncated
        self.load({})

    def load(self, rates: Mapping[str, float]) -> None:
        self.rates = dict(rates)
        self.left = sum(map(self.has_left, rates))
        """How many prompts have left."""
        self._row = self._passed = 0
        """Prompts that have left, in a row; prompts passed over since the last ``note``."""

    @property
    def counts(self) -> tuple[int, int]:
        """What taking prompts has counted since the last ``note``; `PromptStream` sets it back when
        it takes prompts back."""
        return self._row, self._passed

    @counts.setter
    def counts(self, counts: tuple[int, int]) -> None:
        self._row, self._passed = counts

    def has_left(self, prompt_id: str) -> bool:
        """No-positive-resampling (ScaleRL, https://arxiv.org/abs/2510.13786): a prompt that was
        solved at a rate of ``leave_at`` is not asked again."""
        bound = self._chosen.leave_at
        return bound is not None and self.rates.get(prompt_id, 0.0) >= bound

    def chance(self, prompt_id: str) -> float:
        """The chance that a prompt is asked when its turn comes, by its solve rate s:

        max(floor, 1 − |s − target| / max(target, 1 − target)), and 1 without a rate
        """
        target, rate = self._chosen.target, self.rates.get(prompt_id)
        if target is None or rate is None:
            return 1.0
        return max(self._chosen.floor, 1 - abs(rate - target) / max(target, 1 - target))

    def admits(self, prompt_id: str, place: int) -> bool:
        """Whether the prompt at a place of the task's order is asked."""
        left = self.has_left(prompt_id)
        self._row = self._row + 1 if left else 0
        if self._row > PATIENCE[0] + PATIENCE[1] * self.left:
            raise DataError(
                f"all {self.left} prompts were solved at a rate of selection.leave_at = "
                f"{self._chosen.leave_at:g} or more, so that none is left to ask; raise it, or "
                "train on more prompts"
            )
        drawn = uniforms(self._seed, Stream.TASK, place, Purpose.CURRICULUM, 0)
        admitted = not left and bool(drawn < self.chance(prompt_id))
        self._passed += not admitted
        return admitted

    def note(self, groups: Sequence[Group]) -> dict[str, float]:
        """Takes the results of a step, and tells how many prompts were passed over and have left.

        A prompt that has left stays away, whatever a group says that was in flight.
        """
        for group in groups:
            counted = [
                grade.correct is True
                for completion, grade in group.graded
                if not grade.is_error
                and not (self._drops_truncated and completion.finish is Finish.LENGTH)
            ]
            name = group.prompt.prompt_id
            if counted and not self.has_left(name):
                self.rates[name] = float(np.mean(counted))
                self.left += self.has_left(name)
        figures = {"rollout/passed_prompts": float(self._passed)}
        self._passed = 0
        if self._chosen.leave_at is not None:
            figures["rollout/left_prompts"] = float(self.left)
        return figures
