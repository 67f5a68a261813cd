"""Sorting: a prompt is a list of numbers, the right response the same numbers in ascending order.

Two rewards with partial credit, from a lecture's worked example. Numbers are their own token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from burnish.draws import Purpose, Stream, uniforms
from burnish.schema.tasks import SortTask
from burnish.types import Completion, Grade, Prompt


def position_match(prompt: Sequence[int], response: Sequence[int]) -> dict[str, float]:
    """One point for every position where response and sorted prompt agree."""
    matches = sum(a == b for a, b in zip(sorted(prompt), response, strict=True))
    return {"position": float(matches)}


def inclusion_ordering(prompt: Sequence[int], response: Sequence[int]) -> dict[str, float]:
    """A point for each prompt number in the response, one for each neighbouring pair in order.

    A loophole is left on purpose, as in the lecture: for the prompt 1 0 1 the response 0 1 1 and
    the wrong 0 0 1 earn the same, since a number counts as held however often it occurs.
    """
    inclusion = sum(number in response for number in prompt)
    ordering = sum(a <= b for a, b in pairwise(response))
    return {"inclusion": float(inclusion), "ordering": float(ordering)}


REWARDS: dict[str, Callable[[Sequence[int], Sequence[int]], dict[str, float]]] = {
    "position_match": position_match,
    "inclusion_ordering": inclusion_ordering,
}


class Sorting:
    """The prompts, drawn once from the run's seed, and their grader."""

    def __init__(self, config: SortTask, *, seed: int) -> None:
        self.config = config
        rows = np.arange(config.prompts)[:, None]
        draws = uniforms(seed, Stream.TASK, rows, Purpose.ROWS, np.arange(config.length))
        numbers = (draws * config.numbers).astype(np.int32)
        self.prompts = [
            Prompt(
                f"sort/{i}", " ".join(map(str, row)), row, "sort", reference=sorted(row.tolist())
            )
            for i, row in enumerate(numbers)
        ]
        self.validation = self.prompts  # nothing is held out

    def prompt(self, number: int) -> Prompt:
        """The prompts in turn."""
        return self.prompts[number % len(self.prompts)]

    def close(self) -> None:
        """Nothing to end."""

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        return [self._grade(prompt, completion) for prompt, completion in pairs]

    def answer(self, prompt: Prompt, response: str) -> str | None:
        return response.strip()

    def _grade(self, prompt: Prompt, completion: Completion) -> Grade:
        response = completion.token_ids.tolist()
        parts = REWARDS[self.config.reward](prompt.token_ids.tolist(), response)
        is_sorted = response == prompt.reference
        reward = sum(parts.values())
        return Grade(reward, parts | {"sorted": float(is_sorted)}, correct=is_sorted)
