"""A task whose responses are scored by a reward model, all responses of a rollout at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from burnish.model.reward import RewardModel, last_slots
from burnish.rollout.packing import Pack, pack
from burnish.tasks.task import Task
from burnish.types import Completion, Grade, Group, PackedBatch, Prompt, Status


class LearnedReward:
    """Wraps a task and grades with a reward model: the reward is the model's reward plus ``weight``
    times the task's own reward.

    Both are stored as parts of the grade, "learned" and "task". The rewards of an episode's turns
    are part of the task's reward, and have the same weight (`Grade.turn_weight`). A response that
    the task could not grade remains an error, and the model does not read it; a response to which
    the model gives no finite reward becomes an error.
    """

    def __init__(
        self,
        task: Task,
        model: RewardModel,
        *,
        weight: float,
        cut: Callable[[PackedBatch], list[Pack]],
    ) -> None:
        """``cut`` divides a batch into packs; each pack is one forward pass."""
        self.task, self.model, self.weight, self._cut = task, model, weight, cut
        self.validation = task.validation

    def prompt(self, number: int) -> Prompt:
        return self.task.prompt(number)

    def answer(self, prompt: Prompt, response: str) -> str | None:
        return self.task.answer(prompt, response)

    def close(self) -> None:
        self.task.close()

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        own = self.task.grade_all(pairs)
        good = [pair for pair, grade in zip(pairs, own, strict=True) if not grade.is_error]
        scores = iter(self.rewards(good) if good else ())
        return [grade if grade.is_error else self._total(grade, next(scores)) for grade in own]

    @torch.no_grad()
    def rewards(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[float]:
        """Score pairs of prompt and response with the reward model; return the rewards in the same
        order."""
        runs = [list(run) for _, run in groupby(pairs, key=lambda pair: id(pair[0]))]
        groups = [
            Group(0, run[0][0], tuple(c for _, c in run), (Grade(0.0),) * len(run)) for run in runs
        ]
        batch = pack(groups).to(self.model.weight.device)
        found: list[float] = []
        for part in self._cut(batch):
            found += self.model.score(part.batch).rewards[last_slots(part.batch)].tolist()
        return found

    def _total(self, grade: Grade, score: float) -> Grade:
        if not math.isfinite(score):
            said = f"the reward model gave {score}; set train.precision to fp32"
            return Grade(math.nan, {}, Status.ERROR, said, grade.cost)
        parts = grade.parts | {"task": grade.reward, "learned": score}
        total = score + self.weight * grade.reward
        return replace(grade, reward=total, parts=parts, turn_weight=self.weight)
