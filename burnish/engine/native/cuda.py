"""The GPU backend: Triton's kernels over pages, and decoding recorded once, then replayed.

A decoding step of a small model is hundreds of kernels that run for microseconds each; launching
them one by one takes several times as long as running them. A CUDA graph is one launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.engine import sampler
from burnish.engine.cache import Cache, Run, slots_of
from burnish.engine.plain import RunAttention, last_states
from burnish.engine.sequence import Sequence as Sample
from burnish.model.attention import Attend
from burnish.model.transformer import Transformer

FIELDS = 5
"""Of each row: its token, position and slot, the first of its pages, and the tokens it sees."""


def usable(width: int) -> bool:
    """Whether Triton is here and its kernels can read heads of that width whole."""
    return find_spec("triton") is not None and width >= 16 and width & (width - 1) == 0


class Cuda:
    """Rows of one token each are decoded by recorded graphs, which write keys and values to pages.

    The graphs read the model's own weights, which stay where they are.
    """

    def __init__(self, model: Transformer, cache: Cache, most: int) -> None:
        """most: samples that decode at once, at most."""
        self._model, self._cache = model, cache
        self.logits, self.weigh = model.logits, sampler.plain_weigh
        pages = -(-model.config.context // cache.size)
        numbers = padded(most) * (FIELDS + pages)
        self._inputs = torch.zeros(numbers, dtype=torch.int64, device=cache.device)
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def hidden(self, runs: Sequence[Run]) -> Tensor:
        if all(run.count == 1 for run in runs):
            return self._replay(self._give([run.sequence for run in runs]))[: len(runs)]
        return last_states(self._model, PagedAttention, self._cache, runs)

    def sample_ahead(
        self, samples: Sequence[Sample], points: Tensor, heat: Tensor, limited: sampler.Limited
    ) -> tuple[Tensor, Tensor]:
        """The host does not wait for any of the tokens. Every sample has the pages for them."""
        count, steps = points.shape
        rows, size = self._give(samples), self._cache.size
        fields = self._inputs[: FIELDS * rows].view(FIELDS, rows)[:, :count]
        pages = self._inputs[FIELDS * rows :]
        token, at, slot, first, seen = fields
        found = []
        for step in range(steps):
            logits = self.logits(self._replay(rows)[:count])
            found.append(sampler.sample(logits, points[:, step], heat, limited))
            token.copy_(found[-1][0])
            at += 1
            seen += 1
            if step + 1 < steps:
                slot.copy_(pages[first + at // size] * size + at % size)
        tokens, logprobs = zip(*found, strict=True)
        return torch.stack(tokens, 1), torch.stack(logprobs, 1)

    def update(self) -> None:
        """Nothing was prepared from the weights."""

    def _give(self, samples: Sequence[Sample]) -> int:
        """Writes the rows down for the next replay -> how many there are."""
        rows = padded(len(samples))
        given = torch.from_numpy(inputs(samples, rows, self._cache.size))
        if rows not in self._recorded:  # which writes there too
            self._recorded[rows] = self._record(rows)
        self._inputs[: len(given)].copy_(given)
        return rows

    def _replay(self, rows: int) -> Tensor:
        """The next token of each row -> hidden states [rows, d], until the next call."""
        graph, hidden = self._recorded[rows]
        graph.replay()
        return hidden

    def _record(self, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """While it records, nothing is seen and nothing is written."""
        fields = self._inputs[: FIELDS * rows].view(FIELDS, rows)
        fields.copy_(torch.tensor(EMPTY, device=fields.device)[:, None])
        tokens, positions, slots, firsts, counts = fields
        table = self._inputs[FIELDS * rows :], firsts, counts
        attend = decoding(self._cache, slots, table)
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


class PagedAttention:
    """The model's `Attend` over pages. Decoding rows come first."""

    def __init__(self, cache: Cache, runs: Sequence[Run]) -> None:
        first = [run for run in runs if run.count == 1]
        pages = list(chain.from_iterable(run.sequence.pages for run in first))
        places = np.cumsum([0, *(len(run.sequence.pages) for run in first)])[:-1]
        table = [cache.tensor(x) for x in (pages, places, [run.end for run in first])]
        self._decode = decoding(cache, cache.tensor(slots_of(runs, cache.size)), table)
        self._rows, self._rest = len(first), RunAttention(cache, runs[len(first) :])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        out[: self._rows] = self._decode(layer, q[: self._rows], k, v)
        self._rest(layer, q, k, v, out)
        return out


def decoding(cache: Cache, slots: Tensor, table: Sequence[Tensor]) -> Attend:
    """k and v [N, Hkv, D] go to their slots [N]; q [S, Hq, D] of decoding rows attends to pages."""
    from burnish.engine import paged

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pools = cache.slots(layer)
        paged.write(*pools, slots, k, v)
        return paged.attend(q, *pools, table, cache.size) if len(q) else q

    return attend


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
