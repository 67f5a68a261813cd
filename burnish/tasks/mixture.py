"""Several tasks in one run: each group's task is drawn by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from burnish.randomness import Purpose, Stream, uniforms
from burnish.tasks.task import Task
from burnish.types import Completion, Grade, Prompt


class Mixture:
    """A task that draws prompts from several tasks, its parts. A prompt carries the name of its
    part, so that metrics can be reported by part."""

    def __init__(
        self,
        parts: Mapping[str, Task],
        weights: Mapping[str, float],
        scales: Mapping[str, float] | None = None,
        *,
        seed: int,
    ) -> None:
        """``weights`` are the relative probabilities of the parts. They do not affect validation,
        which uses the held-out prompts of all parts. ``scales`` multiply the rewards that the
        learner sees; a part without a scale has 1."""
        self.parts, self._scales = parts, scales or {}
        self._weights = tuple(weights[name] for name in parts)
        self._seed = seed
        self.validation = [_named(name, p) for name, part in parts.items() for p in part.validation]

    def prompt(self, number: int) -> Prompt:
        """Draw a part for the index ``number`` of the run's prompts, and return the part's next
        prompt: the one after the prompts that it has supplied for smaller indices. An index always
        gives the same prompt."""
        # Draws are cached. Rounding up to a power of two makes new ones rare.
        drawn = _draw(self._seed, self._weights, 1 << number.bit_length())
        before = int(np.count_nonzero(drawn[:number] == drawn[number]))
        name = list(self.parts)[drawn[number]]
        prompt = _named(name, self.parts[name].prompt(before))
        return replace(prompt, scale=self._scales.get(name, 1.0))

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        """Grade each response with the part that its prompt came from, in one call per part; return
        the grades in the order of the pairs."""
        graded: dict[int, Grade] = {}
        for name, part in self.parts.items():
            indices = [i for i, (prompt, _) in enumerate(pairs) if prompt.part == name]
            graded |= zip(indices, part.grade_all([pairs[i] for i in indices]), strict=True)
        return [graded[i] for i in range(len(pairs))]

    def answer(self, prompt: Prompt, response: str) -> str | None:
        assert prompt.part is not None, "this task made the prompt"
        return self.parts[prompt.part].answer(prompt, response)

    def close(self) -> None:
        for part in self.parts.values():
            part.close()


def _named(name: str, prompt: Prompt) -> Prompt:
    return replace(prompt, prompt_id=f"{name}/{prompt.prompt_id}", part=name)


@lru_cache(maxsize=8)
def _draw(seed: int, weights: tuple[float, ...], count: int) -> npt.NDArray[np.intp]:
    """Draw a part by weight for each of the prompt indices 0 … count − 1; return the parts'
    indices [count]."""
    shares = np.cumsum(weights)
    drawn = uniforms(seed, Stream.TASK, np.arange(count), Purpose.PART, 0)
    return np.searchsorted(shares / shares[-1], drawn, side="right")
