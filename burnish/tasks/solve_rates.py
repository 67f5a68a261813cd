"""Solve rates of prompts, by which a run decides which prompts to skip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from burnish.errors import DataError
from burnish.randomness import Purpose, Stream, uniforms
from burnish.recipe.selection import SelectionConfig
from burnish.types import Finish, Group

PATIENCE = 100, 4
"""Give up after 100 + 4 × retired consecutive retired prompts. Every epoch has each prompt once, so
all prompts are retired by then, unless a mixture almost never draws the others."""


class History:
    """Records the solve rate of each prompt and decides whether a prompt is used again. The solve
    rate is the share of correct responses in the prompt's last group (the responses sampled
    together). A prompt that was solved often enough is retired: it is not sampled again."""

    def __init__(
        self, chosen: SelectionConfig, seed: int, *, drops_truncated: bool = False
    ) -> None:
        """``drops_truncated``: the recipe drops responses that were truncated at the length limit,
        so they do not count in solve rates."""
        self._chosen, self._seed, self._drops_truncated = chosen, seed, drops_truncated
        self.load({})

    def load(self, rates: Mapping[str, float]) -> None:
        """Replace the solve rates by ``rates``, by prompt id, and set the counters of consecutive
        retired prompts and of skipped prompts to 0."""
        self.rates = dict(rates)
        self.left = sum(map(self.has_left, rates))
        """Number of retired prompts."""
        self._row = self._passed = 0
        """Number of consecutive retired prompts, and of prompts skipped since the last call of
        ``note``."""

    @property
    def counts(self) -> tuple[int, int]:
        """The counters that ``admits`` changes: consecutive retired prompts, and skipped prompts.
        `PromptStream` restores them when it takes prompts back."""
        return self._row, self._passed

    @counts.setter
    def counts(self, counts: tuple[int, int]) -> None:
        self._row, self._passed = counts

    def has_left(self, prompt_id: str) -> bool:
        """Return whether a prompt is retired because its solve rate has reached
        ``selection.leave_at``: no-positive-resampling of ScaleRL, https://arxiv.org/abs/2510.13786.
        False if that setting is None or the prompt has no solve rate yet."""
        bound = self._chosen.leave_at
        return bound is not None and self.rates.get(prompt_id, 0.0) >= bound

    def chance(self, prompt_id: str) -> float:
        """Return the probability that a prompt is used when its turn comes, given its solve rate s:

        max(floor, 1 − |s − target| / max(target, 1 − target)); 1 if there is no target or if the
        prompt has no solve rate yet
        """
        target, rate = self._chosen.target, self.rates.get(prompt_id)
        if target is None or rate is None:
            return 1.0
        return max(self._chosen.floor, 1 - abs(rate - target) / max(target, 1 - target))

    def admits(self, prompt_id: str, place: int) -> bool:
        """Decide whether to use the prompt at index ``place`` of the task's sequence: not if it is
        retired, otherwise at random with probability ``chance``. Count skipped prompts, and raise a
        DataError if all prompts are retired."""
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
        """Update solve rates from a step's groups, and reset the count of skipped prompts; return
        metrics.

        A retired prompt stays retired, whatever the results of its groups that were in flight.
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
        metrics = {"rollout/passed_prompts": float(self._passed)}
        self._passed = 0
        if self._chosen.leave_at is not None:
            metrics["rollout/left_prompts"] = float(self.left)
        return metrics
