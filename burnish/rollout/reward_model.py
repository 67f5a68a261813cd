"""A learned reward over a task: all responses of a rollout are scored at once by a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import torch

from burnish.model.reward import RewardModel, ends
from burnish.rollout.packing import Pack, pack
from burnish.tasks.task import Task
from burnish.types import Completion, Grade, Group, PackedBatch, Prompt, Status


class LearnedReward:
    """A task whose reward is the model's, plus the task's own reward times ``weight``.

    Both are parts of the grade, "learned" and "task". A response that the task could not grade
    stays an error.
    """

    def __init__(
        self,
        task: Task,
        model: RewardModel,
        *,
        weight: float,
        cut: Callable[[PackedBatch], list[Pack]],
    ) -> None:
        """``cut`` makes the packs of a forward pass each."""
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
        scores = self.rewards(pairs) if pairs else []
        return [self._total(grade, score) for grade, score in zip(own, scores, strict=True)]

    @torch.no_grad()
    def rewards(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[float]:
        """The model's rewards in the pairs' order."""
        runs = [list(run) for _, run in groupby(pairs, key=lambda pair: id(pair[0]))]
        groups = [
            Group(0, run[0][0], tuple(c for _, c in run), (Grade(0.0),) * len(run)) for run in runs
        ]
        batch = pack(groups).to(self.model.weight.device)
        found: list[float] = []
        for part in self._cut(batch):
            found += self.model.score(part.batch).logprobs[ends(part.batch)].tolist()
        return found

    def _total(self, grade: Grade, score: float) -> Grade:
        if grade.is_error:
            return grade
        if not math.isfinite(score):
            said = f"the reward model gave {score}; set train.precision to fp32"
            return Grade(math.nan, {}, Status.ERROR, said, grade.cost)
        parts = grade.parts | {"task": grade.reward, "learned": score}
        return replace(grade, reward=score + self.weight * grade.reward, parts=parts)
