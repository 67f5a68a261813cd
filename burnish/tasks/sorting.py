"""Sorting: a prompt is a list of numbers; the right response is the numbers in ascending order.

The two rewards give partial credit and come from a lecture's worked example. Each number is its own
token id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from burnish.randomness import Purpose, Stream, uniforms
from burnish.recipe.tasks import SortTask
from burnish.types import Completion, Grade, Prompt


def position_match(prompt: Sequence[int], response: Sequence[int]) -> dict[str, float]:
    """Give one point for each position at which the response agrees with the sorted prompt; return
    the points as the reward's only part."""
    matches = sum(a == b for a, b in zip(sorted(prompt), response, strict=True))
    return {"position": float(matches)}


def inclusion_ordering(prompt: Sequence[int], response: Sequence[int]) -> dict[str, float]:
    """Give one point for each prompt number that the response contains, and one for each adjacent
    pair of the response in ascending order; return both sums as parts of the reward.

    As in the lecture, the reward has an intentional loophole: for the prompt 1 0 1, the right
    response 0 1 1 and the wrong response 0 0 1 earn the same, because it does not matter how often
    the response contains a number.
    """
    inclusion = sum(number in response for number in prompt)
    ordering = sum(a <= b for a, b in pairwise(response))
    return {"inclusion": float(inclusion), "ordering": float(ordering)}


REWARDS: dict[str, Callable[[Sequence[int], Sequence[int]], dict[str, float]]] = {
    "position_match": position_match,
    "inclusion_ordering": inclusion_ordering,
}


class Sorting:
    """Provides lists of numbers to sort and grades the sorted lists. All prompts are drawn at the
    start from the run's seed. They are also the validation prompts: none is held out."""

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
        """Return the prompt at index ``number``; the prompts are repeated in the same order."""
        return self.prompts[number % len(self.prompts)]

    def close(self) -> None:
        """Do nothing: the task has no processes."""

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
