"""The paged cache of keys and values, and the runs of tokens that a step computes, on any device.

Legend: N tokens of a step, Hkv key and value heads, D head width; `queries` query heads share a key
head.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from burnish.engine.native.sequence import Sequence as Sample
from burnish.model.transformer import Transformer

Array = np.ndarray[Any, np.dtype[Any]]
ALIGNED = 64
"""Alignment of a cache's memory in bytes: a line of the processor's cache."""


class Cache:
    """A pool of pages on the model's device, which holds keys and values of all layers. `Pages`
    allocates the pages."""

    def __init__(self, model: Transformer, kv_bytes: int, size: int) -> None:
        """Allocate as many pages as fit into ``kv_bytes`` bytes, on the model's device and in its
        precision. A page has room for ``size`` tokens in every layer."""
        config, weight = model.config, model.embed.weight
        self.size, self.dtype, self.device = size, weight.dtype, weight.device
        self.heads, self.width = config.kv_heads, config.head_width
        self.queries = config.n_heads // config.kv_heads
        numbers = size * self.heads * self.width
        self.count = kv_bytes // (2 * config.n_layers * numbers * weight.dtype.itemsize)
        """Number of pages that fit into `kv_bytes`."""
        # Zeros instead of uninitialised memory: masked slots are multiplied, and NaN · 0 is NaN.
        self._pool = _zeros(weight, (config.n_layers, 2, self.count, numbers))
        self._scratch = [weight.new_empty(0, numbers) for _ in range(2)]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy pages in all layers, given (source, target) pairs. All sources are read before any
        target is written, so a page may be both."""
        source, target = self.tensor(pairs).T
        self._pool[:, :, target] = self._pool[:, :, source]

    def clear(self, pages: Sequence[int]) -> None:
        """Set all keys and values in the pages to 0, in all layers."""
        self._pool[:, :, list(pages)] = 0

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return views of a layer's keys and values [slots, Hkv, D], which callers may write to.
        The slot of a token is page · size + offset."""
        keys, values = self._pool[layer].view(2, -1, self.heads, self.width)
        return keys, values

    def read(self, layer: int, pages: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Copy pages of a layer into contiguous keys and values [rows, n · size, Hkv, D] and return
        both. ``pages`` [rows · n] lists n pages for each of the ``rows`` rows.

        The result is valid until the next read, which reuses its memory. This halves the time of a
        read, because the system need not map new memory.
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
        """Return integers as an int64 tensor on the cache's device."""
        return upload(np.asarray(values, dtype=np.int64), self.device)


def upload(numbers: Array, device: torch.device | str) -> Tensor:
    """Copy an array to a device. The host does not wait for a GPU, which reads pinned memory by
    itself."""
    given = torch.from_numpy(numbers)
    if torch.device(device).type == "cuda":
        given = given.pin_memory()
    return given.to(device, non_blocking=True)


def download(*tensors: Tensor) -> Callable[[], Sequence[Tensor]]:
    """Begin to copy tensors to main memory. Return a function that waits for the copies, but not
    for what the device does after them, and returns them."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    if not tensors[0].is_cuda:
        return lambda: copies
    is_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    is_done.record()

    def read() -> Sequence[Tensor]:
        is_done.synchronize()
        return copies

    return read


def _zeros(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return zeros with the type and the device of ``like``.

    On a CPU they occupy no memory until they are used: numpy asks the system for zeros, while torch
    writes them.
    """
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    size = math.prod(shape) * like.dtype.itemsize
    found = torch.from_numpy(np.zeros(size + ALIGNED, np.uint8))
    first = -found.data_ptr() % ALIGNED
    return found[first : first + size].view(like.dtype).view(shape)


@dataclass(slots=True)  # creating a frozen one takes three times as long
class TokenRun:
    """Consecutive tokens of one sequence that a step computes: one token of a response, or a chunk
    of a prompt."""

    sequence: Sample
    start: int
    """Index of the first token in the sequence."""
    count: int
    first: int = 0
    """Row of the run's first token among all tokens of the step; `order` sets it."""
    shared: int = 0
    """Number of the sequence's first pages that a backend reads once for all samples of a group."""

    @property
    def rows(self) -> slice:
        """Rows of the run's tokens among all tokens of the step."""
        return slice(self.first, self.first + self.count)

    @property
    def end(self) -> int:
        """Index in the sequence after the run's last token."""
        return self.start + self.count

    @property
    def is_fresh(self) -> bool:
        """Whether the run has several tokens and begins its sequence, so that it attends only to
        itself and the cache contributes nothing."""
        return self.count > 1 and not self.start

    @property
    def own(self) -> list[int]:
        """The sequence's pages after the `shared` ones."""
        return self.sequence.pages[self.shared :]


def order(runs: Sequence[TokenRun]) -> list[TokenRun]:
    """Return the runs in the order of their rows in the step, and set `first` of each run.

    Decoding runs come first, then fresh prompts, both from long to short, then continued prompts
    from short to long, so that the short prompts of both kinds are adjacent.
    """

    def place(run: TokenRun) -> tuple[int, int]:
        if run.count == 1:
            return 0, -len(run.own)
        return (1, -run.count) if run.is_fresh else (2, run.count)

    ordered, first = sorted(runs, key=place), 0
    for run in ordered:
        run.first = first
        first += run.count
    return ordered


def positions_of(runs: Sequence[TokenRun]) -> Array:
    """Return the position in its sequence of each token of the runs, as [N]."""
    starts, counts = np.array([(run.start, run.count) for run in runs], np.int64).reshape(-1, 2).T
    first = counts.cumsum() - counts
    positions: Array = np.arange(counts.sum()) + (starts - first).repeat(counts)
    return positions


def slots_of(runs: Sequence[TokenRun], size: int) -> Array:
    """Return the slot of each token of the runs in the cache, page · size + offset, as [N]."""
    positions = positions_of(runs)
    lengths = np.array([len(run.sequence.pages) for run in runs], np.int64)
    first = (lengths.cumsum() - lengths).repeat([run.count for run in runs])
    pages = np.fromiter(chain.from_iterable(run.sequence.pages for run in runs), np.int64)
    slots: Array = pages[first + positions // size] * size + positions % size
    return slots
