"""Several tasks in one run: each group's is drawn by weight from the seed and its index."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from burnish.draws import Stream, uniforms
from burnish.tasks.task import Task
from burnish.types import Completion, Grade, Prompt

MIXTURE = 4
"""What a draw is for."""


class Mixture:
    """Prompts carry their part's name, so that metrics tell the parts apart."""

    def __init__(
        self, parts: Mapping[str, Task], weights: Mapping[str, float], *, seed: int
    ) -> None:
        self.parts = parts
        self._names = list(parts)
        shares = np.cumsum([weights[name] for name in parts])

        def draw(count: int) -> npt.NDArray[np.intp]:
            drawn = uniforms(seed, Stream.TASK, np.arange(count), MIXTURE, 0)
            return np.searchsorted(shares / shares[-1], drawn, side="right")

        self._drawn = lru_cache(maxsize=1)(draw)

    def prompt(self, index: int) -> Prompt:
        """The next prompt of the part that is drawn for group ``index``: none of it is skipped."""
        drawn = self._drawn(1 << index.bit_length())  # drawn anew only when the number doubles
        chosen = drawn[index]
        before = int(np.count_nonzero(drawn[:index] == chosen))
        name = self._names[chosen]
        return _of(name, self.parts[name].prompt(before))

    @property
    def validation(self) -> list[Prompt]:
        """Those of all parts, whatever their weights."""
        return [_of(name, p) for name, part in self.parts.items() for p in part.validation]

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        """Each part grades its own at once."""
        graded: dict[int, Grade] = {}
        for name, part in self.parts.items():
            own = [i for i, (prompt, _) in enumerate(pairs) if prompt.meta["part"] == name]
            graded |= zip(own, part.grade_all([pairs[i] for i in own]), strict=True)
        return [graded[i] for i in range(len(pairs))]

    def answer(self, prompt: Prompt, response: str) -> str | None:
        return self.parts[prompt.meta["part"]].answer(prompt, response)

    def close(self) -> None:
        for part in self.parts.values():
            part.close()


def _of(name: str, prompt: Prompt) -> Prompt:
    return replace(
        prompt, prompt_id=f"{name}/{prompt.prompt_id}", meta=prompt.meta | {"part": name}
    )
