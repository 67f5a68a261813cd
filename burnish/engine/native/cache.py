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
from burnish.model.transformer import Transformer

Array = np.ndarray[Any, np.dtype[Any]]


class Cache:
    def __init__(self, model: Transformer, kv_bytes: int, size: int) -> None:
        """size: tokens per page."""
        config, weight = model.config, model.embed.weight
        self.size, self.dtype, self.device = size, weight.dtype, weight.device
        self.heads, self.width = config.kv_heads, config.head_width
        self.queries = config.n_heads // config.kv_heads
        numbers = size * self.heads * self.width
        self.count = kv_bytes // (2 * config.n_layers * numbers * weight.dtype.itemsize)
        """Pages that fit into `kv_bytes`."""
        # Zeros, not whatever memory holds: a masked slot is still multiplied, and NaN · 0 is NaN.
        self._pool = weight.new_zeros(config.n_layers, 2, self.count, numbers)
        self._scratch = [weight.new_empty(0, numbers) for _ in range(2)]

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
        prefix = self.sequence.prefix
        return len(prefix.pages) if prefix and self.count == 1 else 0

    @property
    def own(self) -> list[int]:
        """The pages after the shared ones."""
        return self.sequence.pages[self.shared :]


def order(runs: Sequence[Run]) -> list[Run]:
    """Decoding rows, then fresh prompts, both from long to short, then prompts that go on, from
    few tokens to many: so the short prompts of both kinds lie side by side."""

    def place(run: Run) -> tuple[int, int]:
        if run.count == 1:
            return 0, -len(run.own)
        return (1, -run.count) if run.is_fresh else (2, run.count)

    ordered, first = sorted(runs, key=place), 0
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
