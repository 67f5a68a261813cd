"""Keys and values in pages, and the tokens of a step that go there. It knows no processor.

Legend: N tokens of a step, Hkv key and value heads, D head width; `queries` query heads share a key
head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.engine.sequence import Sequence as Sample
from burnish.model.transformer import ModelConfig

Array = np.ndarray[Any, np.dtype[Any]]


class Cache:
    def __init__(
        self, config: ModelConfig, pages: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self.heads, self.width = config.kv_heads, config.head_width
        self.queries = config.n_heads // config.kv_heads
        # Zeros, not whatever memory holds: a masked slot is still multiplied, and NaN · 0 is NaN.
        shape = (config.n_layers, 2, pages, size * self.heads * self.width)
        self._pool = torch.zeros(shape, dtype=dtype, device=device)
        self._scratch = [torch.empty(0, shape[3], dtype=dtype, device=device) for _ in range(2)]

    @staticmethod
    def page_bytes(config: ModelConfig, size: int, dtype: torch.dtype) -> int:
        return 2 * config.n_layers * size * config.kv_heads * config.head_width * dtype.itemsize

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """All pages are read before any is written, so one may be both source and target."""
        source, target = torch.tensor(pairs, device=self.device).T
        self._pool[:, :, target] = self._pool[:, :, source]

    def clear(self, pages: Sequence[int]) -> None:
        self._pool[:, :, list(pages)] = 0

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, Hkv, D] where they lie; a slot is page · size + place."""
        keys, values = self._pool[layer].view(2, -1, self.heads, self.width)
        return keys, values

    def read(self, layer: int, pages: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """pages [rows · n] -> keys and values [rows, n · size, Hkv, D], until the next read.

        Reusing the memory they are gathered into halves the time: fresh memory has to be mapped in.
        """
        found = []
        for i, pool in enumerate(self._pool[layer]):
            if len(self._scratch[i]) < len(pages):
                self._scratch[i] = pool.new_empty(len(pages), pool.shape[1])
            out = self._scratch[i][: len(pages)]
            torch.index_select(pool, 0, pages, out=out)
            found.append(out.view(rows, -1, self.heads, self.width))
        return found[0], found[1]

    def tensor(self, values: object) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self.device)


@dataclass(slots=True)  # not frozen, which takes three times as long to make
class Run:
    """The tokens of one sequence that a step runs."""

    sequence: Sample
    start: int
    count: int
    first: int = 0
    """The row of its first token in the step, which `order` sets."""

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.count)

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def is_fresh(self) -> bool:
        """Whether it begins a prompt, and the cache holds nothing of the prompt yet."""
        return self.count > 1 and not self.start

    @property
    def shared(self) -> int:
        """Pages that decoding may read once for the whole group."""
        return self.sequence.prefix.whole if self.sequence.prefix and self.count == 1 else 0

    @property
    def own(self) -> int:
        """The number of pages after the shared ones."""
        return len(self.sequence.pages) - self.shared

    def own_pages(self) -> list[int]:
        return self.sequence.pages[self.shared :]


def order(runs: Sequence[Run]) -> list[Run]:
    """Decoding rows, then fresh prompts, both from long to short, then prompts that go on, from
    few tokens to many: so the short prompts of both kinds lie side by side."""
    decoding = [run for run in runs if run.count == 1]
    decoding.sort(key=lambda run: -run.own)
    fresh = [run for run in runs if run.is_fresh]
    fresh.sort(key=lambda run: -run.count)
    resumed = sorted((r for r in runs if r.count > 1 and r.start), key=lambda run: run.count)
    ordered, first = decoding + fresh + resumed, 0
    for run in ordered:
        run.first = first
        first += run.count
    return ordered


def slots_of(runs: Sequence[Run], size: int) -> Array:
    """[N] page · size + place of each token."""
    found = []
    for run in runs:
        positions = np.arange(run.start, run.end)
        pages = np.asarray(run.sequence.pages, dtype=np.int64)
        found.append(pages[positions // size] * size + positions % size)
    return np.concatenate(found)
