"""Keys and values in pages, and how a step's tokens attend to them.

Legend: N tokens of a step, S of them decoding rows, Hq and Hkv heads, D head width, R rows that
share a prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from burnish.engine import kernels
from burnish.engine.sequence import Prefix
from burnish.engine.sequence import Sequence as Sample
from burnish.model.products import attention
from burnish.model.transformer import ModelConfig

T = TypeVar("T")
Array = np.ndarray[Any, np.dtype[Any]]
SHORT = 32
"""Up to so many tokens of a prompt are attended to row by row on a CPU without tiles."""


class Cache:
    def __init__(
        self, config: ModelConfig, pages: int, size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.size, self.dtype, self.device = size, dtype, device
        self.heads, self.width = config.kv_heads, config.head_width
        # Zeros, not whatever memory holds: a masked slot is still multiplied, and NaN · 0 is NaN.
        shape = (config.n_layers, 2, pages, size * self.heads * self.width)
        self._pool = torch.zeros(shape, dtype=dtype, device=device)
        self._scratch = [torch.empty(0, shape[3], dtype=dtype, device=device) for _ in range(2)]
        slots = self._pool.view(config.n_layers, 2, pages * size, -1)
        self.arrays: list[tuple[Array, Array]] | None = None
        """By layer, keys and values [slots, Hkv · D]: the same memory for the CPU's kernels."""
        if kernels.fuses(device, dtype):
            self.arrays = [(keys, values) for keys, values in kernels.numbers(slots)]
        self.tiled = dtype == torch.bfloat16 and kernels.has_tiles(device, self.width, size)
        self.paged = kernels.has_paged(device, self.width)

    @staticmethod
    def page_bytes(config: ModelConfig, size: int, dtype: torch.dtype) -> int:
        return 2 * config.n_layers * size * config.kv_heads * config.head_width * dtype.itemsize

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        """All pages are read before any is written, so one may be both source and target."""
        source, target = torch.tensor(pairs, device=self.device).T
        self._pool[:, :, target] = self._pool[:, :, source]

    def clear(self, pages: Sequence[int]) -> None:
        self._pool[:, :, list(pages)] = 0

    def write(self, layer: int, slots: Tensor, k: Tensor, v: Tensor) -> None:
        """slots [N]: page · size + place, for k and v [N, Hkv, D]."""
        if self.paged:
            from burnish.engine import paged

            paged.write(*self.slots(layer), slots, k, v)
            return
        for pool, x in zip(self._pool[layer], (k, v), strict=True):
            pool.view(-1, self.heads * self.width).index_copy_(0, slots, x.reshape(len(x), -1))

    def slots(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [slots, Hkv, D] where they lie."""
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


@dataclass(slots=True)  # not frozen, which takes three times as long to make
class Run:
    """The tokens of one sequence that a step runs."""

    sequence: Sample
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count

    def own_pages(self) -> list[int]:
        """Those that decoding reads for this sequence alone."""
        return self.sequence.pages[self.shared :]

    @property
    def own(self) -> int:
        """How many those are."""
        return len(self.sequence.pages) - self.shared

    @property
    def shared(self) -> int:
        """Pages that decoding reads once for the whole group."""
        return self.sequence.prefix.whole if self.sequence.prefix and self.count == 1 else 0


@dataclass(frozen=True)
class _Block:
    """Rows of about one length that are attended in one call."""

    rows: slice
    pages: Tensor
    mask: Tensor


@dataclass(frozen=True)
class _Fresh:
    """Prompts of about one length, one after another, each seeing its own past."""

    tokens: int
    longest: int
    index: Tensor | None
    """[B · L] where each row of the padded block comes from; a shorter prompt repeats its last
    token. None: all have one length."""
    real: Tensor | None
    """[tokens] where the tokens lie in the padded block."""

    def attend(self, *qkv: Tensor) -> Tensor:
        """q [tokens, Hq, D], k and v [tokens, Hkv, D] -> [tokens, Hq, D]"""
        padded = qkv if self.index is None else (x.index_select(0, self.index) for x in qkv)
        q, k, v = (x.view(-1, self.longest, *x.shape[1:]).transpose(1, 2) for x in padded)
        out = attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)
        return out if self.real is None else out.index_select(0, self.real)


@dataclass(frozen=True)
class _Shared:
    """Groups whose samples read their prompt's pages once, as R rows of one query."""

    rows: Tensor
    """[groups, R]; a smaller group repeats its first row."""
    sizes: Array
    """[groups] samples of each."""
    pages: Tensor
    mask: Tensor


class CachedAttention:
    """The engine's `Attend`. Decoding rows come first, ordered by `order`."""

    def __init__(self, cache: Cache, runs: Sequence[Run]) -> None:
        self._cache = cache
        self._attention = kernels.attention_for(cache.device, cache.dtype)
        decoding = [run for run in runs if run.count == 1]
        ahead = [_slot(run, cache.size) for run in decoding]
        more = [_slots(run, cache.size) for run in runs[len(decoding) :]]
        self._slots = self._tensor(np.concatenate([np.array(ahead, np.int64), *more]))
        self._rows = len(decoding)
        self._decoding = decoding
        self._blocks: list[_Block] | None = None
        self._buffers: tuple[Tensor, Array, list[Any], Array] | None = None
        self._flat: list[Tensor] | None = None
        self._shared = [] if cache.tiled or cache.paged else self._prefixes(decoding)
        first = np.cumsum([0, *(run.count for run in runs)]).tolist()
        prompts = list(zip(runs, first, strict=False))[self._rows :]
        limit = 0 if cache.arrays is None or cache.tiled else SHORT
        self._short = [(run, row) for run, row in prompts if run.count <= limit]
        self._long = [(run, row) for run, row in prompts if run.count > limit]
        mine = [] if cache.tiled else self._long
        self._fresh = self._prompt_blocks([run.count for run, _ in mine if not run.start])
        self._resumed = [(r, row, self._tensor(r.sequence.pages)) for r, row in mine if r.start]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._cache.write(layer, self._slots, k, v)
        out = torch.empty_like(q)
        if self._rows and self._cache.paged:
            out[: self._rows] = self._paged_rows(layer, q[: self._rows])
        elif self._rows:
            totals = self._own_pages(layer, q[: self._rows], out[: self._rows])
            self._shared_pages(layer, q[: self._rows], out[: self._rows], totals)
        self._prompts(layer, q, k, v, out)
        return out

    def fused(self, layer: int, qkv: Tensor, turn: tuple[Array, Array]) -> Tensor:
        """The same from qkv [N, (Hq + 2 Hkv) D] as the model projects it -> [N, Hq D], on a CPU,
        until the next call.

        turn: cos and sin [N, D] by which q and k are rotated first, in place.
        """
        from burnish.engine import fused

        if self._buffers is None:
            self._buffers = self._prepare(qkv)
        cache, (out, slots, calls, totals) = self._cache, self._buffers
        assert cache.arrays is not None
        keys, values = cache.arrays[layer]
        array = kernels.numbers(qkv)
        fused.turn(array, *turn, slots, keys, values)
        for kernel, rows, *rest in calls:
            kernel(array[rows], keys, values, *rest)
        for shared in self._shared:
            table, heads = shared.rows.numpy(), out.shape[1] // cache.width
            query = qkv.new_empty(
                len(table), cache.heads, table.shape[1], heads // cache.heads, cache.width
            )
            fused.fold(array, table, kernels.numbers(query))
            k, v = (x.transpose(1, 2) for x in cache.read(layer, shared.pages, len(table)))
            part, total = self._attention(query.flatten(2, 3), k, v, shared.mask)
            found = (
                kernels.numbers(part.reshape(query.shape)),
                total.reshape(query.shape[:4]).numpy(),
            )
            fused.join(kernels.numbers(out), totals, table, shared.sizes, *found)
        if self._fresh or self._resumed:
            headed = qkv.view(len(qkv), -1, cache.width)
            q, k, v = headed.tensor_split((headed.shape[1] - 2 * cache.heads, -cache.heads), 1)
            self._prompts(layer, q, k, v, out.view(q.shape))
        return out

    def _prepare(self, qkv: Tensor) -> tuple[Tensor, Array, list[Any], Array]:
        """What every layer needs alike: its output, where keys go, kernels with their rows and
        arguments, and what decoding rows' log-sum-exp is written to."""
        from burnish.engine import fused

        cache = self._cache
        out = qkv.new_empty(len(qkv), qkv.shape[1] - 2 * cache.heads * cache.width)
        heads, array = out.shape[1] // cache.width, kernels.numbers(out)
        rest = np.float32(cache.width**-0.5), torch.get_num_threads()
        totals = np.empty((len(qkv), heads), np.float32)
        decode = fused.decode_kernel(cache.width, heads // cache.heads, cache.size)
        calls: list[Any] = []
        short = [run for run, _ in self._short]
        for runs, first in ((self._decoding, 0), (short, self._short[0][1] if short else 0)):
            if runs:
                table = self._flat_table(runs)
                rows = slice(first, first + len(table[1]))
                calls.append((decode, rows, *table, array[rows], totals[rows], *rest))
        if cache.tiled:
            from burnish.engine import tiles

            size, most = cache.size, max(1, 64 * cache.heads // heads)
            shared = [
                (rows, prefix.pages, [prefix.whole * size] * len(rows))
                for prefix, rows in _sharers(self._decoding).items()
            ]
            prompts = [
                (range(row, row + r.count), r.sequence.pages, range(r.start + 1, r.end + 1))
                for r, row in self._long
            ]
            for parts, old in ((shared, totals), (prompts, totals[:0])):
                if parts:
                    table = tiles.table(parts, most)
                    more = rest[0], tiles.SHAPES, rest[1]
                    kernel = tiles.kernel(cache.width, heads // cache.heads, size)
                    calls.append((kernel, slice(None), array, old, *table, *more))
        return out, self._slots.numpy(), calls, totals

    def _paged_rows(self, layer: int, q: Tensor) -> Tensor:
        """q [S, Hq, D] -> [S, Hq, D], over all that the rows see, on a GPU."""
        from burnish.engine import paged

        if self._flat is None:
            runs = self._decoding
            first = np.cumsum([0, *(len(run.sequence.pages) for run in runs)])[:-1]
            pages = list(chain.from_iterable(run.sequence.pages for run in runs))
            self._flat = [self._tensor(x) for x in (pages, first, [run.end for run in runs])]
        return paged.attend(q, *self._cache.slots(layer), self._flat, self._cache.size)

    def _own_pages(self, layer: int, q: Tensor, out: Tensor) -> Tensor:
        """q and out [S, Hq, D] -> the log-sum-exp of the scores [S, Hq]"""
        if self._blocks is None:
            self._blocks = self._private(self._decoding)
        cache, totals = self._cache, []
        folded = q.view(len(q), cache.heads, -1, cache.width)  # a key head's queries are its rows
        for block in self._blocks:
            mine = folded[block.rows]
            keys, values = (x.transpose(1, 2) for x in cache.read(layer, block.pages, len(mine)))
            part, total = self._attention(mine, keys, values, block.mask)
            out[block.rows] = part.reshape(len(mine), *q.shape[1:])
            totals.append(total.reshape(len(mine), -1))
        return torch.cat(totals)

    def _shared_pages(self, layer: int, q: Tensor, out: Tensor, own: Tensor) -> None:
        """Join what the prompts that samples share add to out [S, Hq, D]; own: its log-sum-exp."""
        cache, heads = self._cache, self._cache.heads
        for shared in self._shared:
            groups, samples = shared.rows.shape
            folded = q.reshape(len(q), heads, -1, cache.width)
            query = folded[shared.rows].transpose(1, 2).flatten(2, 3)  # [groups, Hkv, R · …, D]
            keys, values = (x.transpose(1, 2) for x in cache.read(layer, shared.pages, groups))
            part, total = self._attention(query, keys, values, shared.mask)
            part = part.view(groups, heads, samples, -1, cache.width).transpose(1, 2)
            part = part.reshape(-1, *q.shape[1:])
            total = total.reshape(groups, heads, samples, -1).transpose(1, 2).reshape(len(part), -1)
            real = self._tensor(np.flatnonzero(np.arange(samples) < shared.sizes[:, None]))
            rows = shared.rows.flatten()[real]
            _merge(out, own, rows, part[real], total[real])

    def _prompts(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        first = self._rows
        for fresh in self._fresh:
            at = slice(first, first + fresh.tokens)
            out[at] = fresh.attend(q[at], k[at], v[at])
            first = at.stop
        for run, row, pages in self._resumed:
            at = slice(row, row + run.count)
            keys, values = self._cache.read(layer, pages, 1)
            seen = keys[0, : run.end], values[0, : run.end]
            out[at] = kernels.causal_attention(q[at], *seen, run.start)

    def _flat_table(self, runs: Sequence[Run]) -> tuple[Array, Array, Array]:
        """Pages of the runs, where those of each token begin, and how many tokens it sees in them:
        itself and its past, but for the pages that the whole group reads at once."""
        size, counts = self._cache.size, [run.count for run in runs]
        first = np.cumsum([0, *(run.own for run in runs)])[:-1].repeat(counts)
        seen = [np.arange(run.start, run.end) + 1 - run.shared * size for run in runs]
        pages = np.concatenate([run.own_pages() for run in runs])
        return pages.astype(np.int64), first, np.concatenate(seen)

    def _prompt_blocks(self, lengths: list[int]) -> list[_Fresh]:
        """lengths: of fresh prompts, from long to short."""
        found = []
        for bucket in _buckets(lengths, lambda length: length):
            longest, ends = bucket[0], np.cumsum(bucket)
            place = np.arange(longest)
            index = np.minimum((ends - bucket)[:, None] + place, ends[:, None] - 1)
            real = np.flatnonzero(place < np.array(bucket)[:, None])
            even = bucket[-1] == longest
            both = (None, None) if even else (self._tensor(index.ravel()), self._tensor(real))
            found.append(_Fresh(int(ends[-1]), longest, *both))
        return found

    def _private(self, runs: Sequence[Run]) -> list[_Block]:
        blocks, first = [], 0
        for bucket in _buckets(runs, lambda run: run.own):
            tables = [run.own_pages() for run in bucket]
            lengths = [run.end - run.shared * self._cache.size for run in bucket]
            rows = slice(first, first + len(bucket))
            blocks.append(_Block(rows, *self._table(tables, lengths)))
            first = rows.stop
        return blocks

    def _prefixes(self, runs: Sequence[Run]) -> list[_Shared]:
        rows_of = _sharers(runs)
        ordered = sorted(rows_of, key=lambda prefix: -prefix.whole)
        found = []
        for bucket in _buckets(ordered, lambda prefix: prefix.whole):
            most = max(len(rows_of[prefix]) for prefix in bucket)
            rows = [rows_of[prefix] for prefix in bucket]
            padded = self._tensor([[*r, *r[:1] * (most - len(r))] for r in rows])
            tables = [list(prefix.pages[: prefix.whole]) for prefix in bucket]
            lengths = [len(table) * self._cache.size for table in tables]
            sizes = np.array(list(map(len, rows)))
            found.append(_Shared(padded, sizes, *self._table(tables, lengths)))
        return found

    def _table(self, tables: list[list[int]], lengths: list[int]) -> tuple[Tensor, Tensor]:
        """-> pages [rows · n], padded by repeating, and the mask [rows, 1, 1, n · size] of that."""
        most = max(map(len, tables))
        pages = [page for table in tables for page in [*table, *table[:1] * (most - len(table))]]
        place = np.arange(most * self._cache.size)
        beyond = place[None] >= np.array(lengths)[:, None]
        mask = torch.zeros(beyond.shape, dtype=self._cache.dtype)
        mask.masked_fill_(torch.from_numpy(beyond), -torch.inf)
        return self._tensor(pages), mask[:, None, None].to(self._cache.device)

    def _tensor(self, values: object) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self._cache.device)


def order(runs: Sequence[Run]) -> list[Run]:
    """Decoding rows and fresh prompts, each from long to short, then prompts that go on, from few
    tokens to many: so the short ones of both kinds of prompt lie side by side."""
    decoding = [run for run in runs if run.count == 1]
    decoding.sort(key=lambda run: -run.own)
    fresh = [run for run in runs if run.count > 1 and not run.start]
    fresh.sort(key=lambda run: -run.count)
    resumed = sorted((r for r in runs if r.count > 1 and r.start), key=lambda run: run.count)
    return decoding + fresh + resumed


def _slot(run: Run, size: int) -> int:
    page, place = divmod(run.start, size)
    return run.sequence.pages[page] * size + place


def _slots(run: Run, size: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    positions = np.arange(run.start, run.start + run.count)
    pages = np.asarray(run.sequence.pages, dtype=np.int64)
    return pages[positions // size] * size + positions % size


def _buckets(items: Sequence[T], length: Callable[[T], int]) -> list[list[T]]:
    """Items from long to short, cut where padding to the longest would waste over a quarter."""
    buckets: list[list[T]] = []
    for item in items:
        if buckets and 4 * length(item) >= 3 * length(buckets[-1][0]):
            buckets[-1].append(item)
        else:
            buckets.append([item])
    return buckets


def _sharers(runs: Sequence[Run]) -> dict[Prefix, list[int]]:
    """Decoding rows by the prompt that they share."""
    rows_of: dict[Prefix, list[int]] = {}
    for row, run in enumerate(runs):
        if run.sequence.prefix is not None and run.sequence.prefix.whole:
            rows_of.setdefault(run.sequence.prefix, []).append(row)
    return rows_of


def _merge(out: Tensor, total: Tensor, rows: Tensor, part: Tensor, part_total: Tensor) -> None:
    """Join attention over two sets of keys: into out [S, Hq, D] at rows goes part [r, Hq, D]."""
    share = torch.sigmoid(part_total - total[rows])[..., None]
    out[rows] = torch.lerp(out[rows].to(share.dtype), part.to(share.dtype), share).to(out.dtype)
