"""Several tasks in one run: the part of each group is drawn by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from burnish.draws import Purpose, Stream, uniforms
from burnish.tasks.task import Task
from burnish.types import Completion, Grade, Prompt


class Mixture:
    """Prompts carry their part's name, so that metrics tell the parts apart."""

    def __init__(
        self,
        parts: Mapping[str, Task],
        weights: Mapping[str, float],
        scales: Mapping[str, float] | None = None,
        *,
        seed: int,
    ) -> None:
        """The prompts that are held out are those of all parts, whatever their weights. ``scales``
        are factors of the parts' rewards as they are learned, 1 where none is given."""
        self.parts, self._scales = parts, scales or {}
        self._weights = tuple(weights[name] for name in parts)
        self._seed = seed
        self.validation = [_named(name, p) for name, part in parts.items() for p in part.validation]

    def prompt(self, number: int) -> Prompt:
        """The next prompt of the part that is drawn for this place; no prompt is left out."""
        # Twice as many parts are drawn whenever there are too few.
        drawn = _draw(self._seed, self._weights, 1 << number.bit_length())
        before = int(np.count_nonzero(drawn[:number] == drawn[number]))
        name = list(self.parts)[drawn[number]]
        prompt = _named(name, self.parts[name].prompt(before))
        return replace(prompt, scale=self._scales.get(name, 1.0))

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        """Each part grades its own responses in one call."""
        graded: dict[int, Grade] = {}
        for name, part in self.parts.items():
            own = [i for i, (prompt, _) in enumerate(pairs) if prompt.part == name]
            graded |= zip(own, part.grade_all([pairs[i] for i in own]), strict=True)
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
    """The numbers of the parts at places 0 … count − 1."""
    shares = np.cumsum(weights)
    drawn = uniforms(seed, Stream.TASK, np.arange(count), Purpose.PART, 0)
    return np.searchsorted(shares / shares[-1], drawn, side="right")
