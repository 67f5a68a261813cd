"""Decoding on a GPU, recorded once for a number of rows and then replayed.

A decoding step of a small model is hundreds of kernels that run for microseconds each; launching
them one by one takes several times as long as running them. A CUDA graph is one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.engine import sampler
from burnish.engine.cache import Cache
from burnish.engine.sequence import Sequence as Sample
from burnish.model.transformer import Transformer

Logits = Callable[[Tensor], Tensor]
FIELDS = 5
"""Of each row: its token, position and slot, where its pages begin, and how many tokens it sees."""


class Decoding:
    """The model over rows of one token each, whose keys and values go to pages as they come."""

    def __init__(self, model: Transformer, cache: Cache, most: int) -> None:
        """most: rows that a step has at most."""
        self._model, self._cache = model, cache
        pages = -(-model.config.context // cache.size)
        numbers = padded(most) * (FIELDS + pages)
        self._inputs = torch.zeros(numbers, dtype=torch.int64, device=cache.device)
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def __call__(self, samples: Sequence[Sample]) -> Tensor:
        """The next token of each -> hidden states [samples, d], until the next call."""
        return self._replay(self._give(samples))[: len(samples)]

    def several(
        self, samples: Sequence[Sample], points: Tensor, temperature: Tensor | None, logits: Logits
    ) -> tuple[Tensor, Tensor]:
        """points [samples, steps] -> the tokens that are sampled one after another and their
        log-probabilities, shaped alike; the host does not wait for any of them.

        temperature [samples]; None: greedy. logits: of hidden states. Every sample has the pages.
        """
        count, steps = points.shape
        rows, size = self._give(samples), self._cache.size
        fields = self._inputs[: FIELDS * rows].view(FIELDS, rows)[:, :count]
        pages = self._inputs[FIELDS * rows :]
        token, at, slot, first, seen = fields
        found = []
        for step in range(steps):
            hidden = self._replay(rows)[:count]
            found.append(sampler.sample_whole(logits(hidden), points[:, step], temperature))
            token.copy_(found[-1][0])
            at += 1
            seen += 1
            if step + 1 < steps:
                slot.copy_(pages[first + at // size] * size + at % size)
        tokens, logprobs = zip(*found, strict=True)
        return torch.stack(tokens, 1), torch.stack(logprobs, 1)

    def _give(self, samples: Sequence[Sample]) -> int:
        """Writes the rows down for the next replay -> how many there are."""
        rows = padded(len(samples))
        given = torch.from_numpy(inputs(samples, rows, self._cache.size))
        if rows not in self._recorded:  # which writes there too
            self._recorded[rows] = self._record(rows)
        self._inputs[: len(given)].copy_(given)
        return rows

    def _replay(self, rows: int) -> Tensor:
        graph, hidden = self._recorded[rows]
        graph.replay()
        return hidden

    def _record(self, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """While it records, nothing is seen and nothing is written."""
        fields = self._inputs[: FIELDS * rows].view(FIELDS, rows)
        fields.copy_(torch.tensor(EMPTY, device=fields.device)[:, None])
        tokens, positions, slots, firsts, counts = fields
        table = self._inputs[FIELDS * rows :], firsts, counts
        attend = _Attend(self._cache, slots, table)
        current = torch.cuda.current_stream()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):  # kernels are compiled and memory is found before
            self._model(tokens, positions, attend)
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = self._model(tokens, positions, attend)
        self._pool = graph.pool()
        return graph, hidden


class _Attend:
    def __init__(self, cache: Cache, slots: Tensor, table: tuple[Tensor, Tensor, Tensor]) -> None:
        self._cache, self._slots, self._table = cache, slots, table

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from burnish.engine import paged

        self._cache.write(layer, self._slots, k, v)
        return paged.attend(q, *self._cache.slots(layer), self._table, self._cache.size)


EMPTY = (0, 0, -1, 0, 0)
"""A row that is there to make their number round: it sees nothing and writes nowhere."""


def padded(rows: int) -> int:
    """Powers of two, then multiples of 128: few graphs, and few rows for nothing."""
    return -(-rows // 128) * 128 if rows > 64 else max(8, 1 << (rows - 1).bit_length())


def inputs(samples: Sequence[Sample], rows: int, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The fields [FIELDS, rows], then the samples' pages, one sample's after another's."""
    pages = np.fromiter(chain.from_iterable(s.pages for s in samples), np.int64)
    at = np.array([s.computed for s in samples])
    first = np.cumsum([0, *(len(s.pages) for s in samples)])[:-1]
    fields = np.tile(np.array(EMPTY)[:, None], rows)
    fields[:, : len(samples)] = (
        [s.tokens[s.computed] for s in samples],
        at,
        pages[first + at // size] * size + at % size,
        first,
        at + 1,
    )
    return np.concatenate((fields.ravel(), pages))
