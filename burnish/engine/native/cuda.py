"""The GPU backend: Triton kernels over pages, and decoding with CUDA graphs.

A decoding step of a small model consists of hundreds of kernels that run for microseconds each;
launching them one by one takes several times as long as running them. A CUDA graph needs one
launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.engine.native import sampler
from burnish.engine.native.cache import Cache, TokenRun, slots_of
from burnish.engine.native.plain import RunAttention, last_states
from burnish.engine.native.sequence import Sequence as Sample
from burnish.model.attention import Attend
from burnish.model.transformer import Transformer

FIELDS = 5
"""Number of fields of a row in the graphs' inputs: token, position, slot, index of its first page,
number of tokens that it attends to."""


def usable(width: int) -> bool:
    """Return whether Triton is installed and its kernels support heads of this width: a power of
    two, at least 16."""
    return find_spec("triton") is not None and width >= 16 and width & (width - 1) == 0


class Cuda:
    """Runs the model on a GPU. Steps that only decode replay a recorded CUDA graph; steps with
    prompts call the model.

    The graphs read the model's own weights, whose addresses do not change.
    """

    def __init__(self, model: Transformer, cache: Cache, most: int) -> None:
        """Allocate the graphs' inputs. ``most``: maximum number of samples that decode at the same
        time."""
        self._model, self._cache = model, cache
        self.logits, self.weigh = model.logits, sampler.plain_weigh
        pages = -(-model.config.context // cache.size)
        numbers = padded(most) * (FIELDS + pages)
        self._inputs = torch.zeros(numbers, dtype=torch.int64, device=cache.device)
        self._recorded: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None

    def hidden(self, runs: Sequence[TokenRun]) -> Tensor:
        if all(run.count == 1 for run in runs):
            return self._replay(self._give([run.sequence for run in runs]))[: len(runs)]
        return last_states(self._model, PagedAttention, self._cache, runs)

    def sample_ahead(
        self, samples: Sequence[Sample], points: Tensor, heat: Tensor, limited: sampler.Limited
    ) -> tuple[Tensor, Tensor]:
        """Sample the next tokens of samples that all decode, one graph replay per token, without
        waiting for the device. Pages for all these tokens must be allocated (`Scheduler.reserve`).
        The samples themselves are not changed. See `plain.SampleAhead`."""
        count, steps = points.shape
        rows, size = self._give(samples), self._cache.size
        fields = self._inputs[: FIELDS * rows].view(FIELDS, rows)[:, :count]
        pages = self._inputs[FIELDS * rows :]
        token, at, slot, first, seen = fields
        found = []
        for step in range(steps):
            logits = self.logits(self._replay(rows)[:count])
            found.append(sampler.sample_tokens(logits, points[:, step], heat, limited))
            token.copy_(found[-1][0])
            at += 1
            seen += 1
            if step + 1 < steps:
                slot.copy_(pages[first + at // size] * size + at % size)
        tokens, logprobs = zip(*found, strict=True)
        return torch.stack(tokens, 1), torch.stack(logprobs, 1)

    def update(self) -> None:
        """Do nothing: this backend caches nothing of the weights."""

    def _give(self, samples: Sequence[Sample]) -> int:
        """Write the inputs of the next replay, and record its graph if there is none yet. Return
        the graph's number of rows, including padding."""
        rows = padded(len(samples))
        given = torch.from_numpy(inputs(samples, rows, self._cache.size))
        if rows not in self._recorded:  # recording overwrites the inputs
            self._recorded[rows] = self._record(rows)
        self._inputs[: len(given)].copy_(given)
        return rows

    def _replay(self, rows: int) -> Tensor:
        """Replay the graph for this number of rows; return hidden states [rows, d], valid until the
        next call."""
        graph, hidden = self._recorded[rows]
        graph.replay()
        return hidden

    def _record(self, rows: int) -> tuple[torch.cuda.CUDAGraph, Tensor]:
        """Record a decoding step of this number of rows; return the graph and the tensor that it
        writes hidden states to. All rows are empty meanwhile, so that no page is read or
        written."""
        fields = self._inputs[: FIELDS * rows].view(FIELDS, rows)
        fields.copy_(torch.tensor(EMPTY, device=fields.device)[:, None])
        tokens, positions, slots, firsts, counts = fields
        table = self._inputs[FIELDS * rows :], firsts, counts
        attend = decoding(self._cache, slots, table)
        current = torch.cuda.current_stream()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):  # compile kernels and allocate memory before recording
            self._model(tokens, positions, attend)
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            hidden = self._model(tokens, positions, attend)
        self._pool = graph.pool()
        return graph, hidden


class PagedAttention:
    """The attention function of a step with prompts. It writes the new keys and values to their
    pages; decoding rows, which come first, use a Triton kernel, and prompts use `RunAttention`."""

    def __init__(self, cache: Cache, runs: Sequence[TokenRun]) -> None:
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
    """Return an attention function that writes k and v [N, Hkv, D] to their slots [N], and computes
    the attention of decoding rows q [S, Hq, D] to their pages. ``table``: see
    `cuda_kernels.attend`."""
    from burnish.engine.native import cuda_kernels

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pools = cache.slots(layer)
        cuda_kernels.write_pages(*pools, slots, k, v)
        return cuda_kernels.attend(q, *pools, table, cache.size) if len(q) else q

    return attend


EMPTY = (0, 0, -1, 0, 0)
"""Fields of a padding row, which attends to nothing and writes nothing."""


def padded(rows: int) -> int:
    """Round a number of rows up to 8, 16, 32, 64 or a multiple of 128, so that there are few graphs
    and little padding."""
    return -(-rows // 128) * 128 if rows > 64 else max(8, 1 << (rows - 1).bit_length())


def inputs(samples: Sequence[Sample], rows: int, size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a graph's inputs as one flat array: the fields [FIELDS, rows], with empty rows after
    the samples, and then the pages of all samples."""
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
