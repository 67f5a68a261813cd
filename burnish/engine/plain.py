"""The plain backend: PyTorch's own operations, on any device and in any precision.

Tests trust it. Legend: N tokens of a step, Hq and Hkv heads, D head width, d model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from burnish.engine import sampler
from burnish.engine.cache import Cache, Run, order, padded_tables, slots_of
from burnish.engine.sampler import Draw
from burnish.engine.sequence import Sequence as Sample
from burnish.model.products import attention
from burnish.model.transformer import Transformer

T = TypeVar("T")
Sampled = tuple[list[int], list[float]]
SampleAhead = Callable[[Sequence[Sample], Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""Samples, points [samples, steps] in [0, 1), temperature [samples] or None for greedy -> tokens
and log-probabilities, shaped like the points."""


class Backend(Protocol):
    """One device's way to run the model: body, attention over pages, sampling."""

    @property
    def sample_ahead(self) -> SampleAhead | None:
        """Samples several tokens of each sample in a row; None if the device does not."""
        ...

    def hidden(self, runs: Sequence[Run]) -> Tensor:
        """The state [runs, d] after each run's last token, until the next call."""
        ...

    def logits(self, hidden: Tensor) -> Tensor: ...

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> Sampled: ...

    def update(self) -> None:
        """The model's weights have changed."""
        ...


class Plain:
    sample_ahead: SampleAhead | None = None

    def __init__(self, model: Transformer, cache: Cache) -> None:
        self._model, self._cache = model, cache

    def hidden(self, runs: Sequence[Run]) -> Tensor:
        return last_states(self._model, PlainAttention, self._cache, runs)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> Sampled:
        return sampler.sample(logits, draws)

    def update(self) -> None:
        """The model itself runs: nothing was prepared from its weights."""


def last_states(
    body: Callable[..., Tensor],
    attention: Callable[[Cache, Sequence[Run]], Any],
    cache: Cache,
    runs: Sequence[Run],
) -> Tensor:
    """Runs a body over the tokens of all runs, laid out by `order` -> see `Backend.hidden`."""
    ordered = order(runs)
    tokens = [t for r in ordered for t in r.sequence.tokens[r.start : r.end]]
    starts, counts = np.array([(r.start, r.count) for r in ordered]).T
    before = np.cumsum(counts) - counts
    positions = np.arange(counts.sum()) + (starts - before).repeat(counts)
    hidden = body(
        torch.tensor(tokens, device=cache.device),
        torch.from_numpy(positions).to(cache.device),
        attention(cache, ordered),
    )
    ends = (before + counts - 1).tolist()
    last = {run.sequence: end for run, end in zip(ordered, ends, strict=True)}
    return hidden[cache.tensor([last[run.sequence] for run in runs])]


class PlainAttention:
    """The model's `Attend` over pages. Decoding rows come first, as `order` has them."""

    def __init__(self, cache: Cache, runs: Sequence[Run]) -> None:
        self._cache, self._slots = cache, cache.tensor(slots_of(runs, cache.size))
        decoding = [run for run in runs if run.count == 1]
        self._rows = len(decoding)
        if decoding:
            tables = [run.sequence.pages for run in decoding]
            self._pages = cache.tensor(padded_tables(tables))
            place = torch.arange(max(map(len, tables)) * cache.size, device=cache.device)
            seen = place < cache.tensor([run.end for run in decoding])[:, None]
            self._seen = seen[:, None, None]
        self._prompts = Prompts(cache, placed(runs)[self._rows :])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self._cache.write(layer, self._slots, k, v)
        out = torch.empty_like(q)
        if self._rows:
            past = self._cache.read(layer, self._pages, self._rows)
            keys, values = (x.transpose(1, 2) for x in past)
            query = q[: self._rows, :, None]
            out[: self._rows] = attention(query, keys, values, mask=self._seen)[:, :, 0]
        self._prompts(layer, q, k, v, out)
        return out


def placed(runs: Sequence[Run]) -> list[tuple[Run, int]]:
    """Each run with the row of its first token."""
    first = np.cumsum([0, *(run.count for run in runs)]).tolist()
    return list(zip(runs, first, strict=False))


class Prompts:
    """Attention of runs of several tokens, laid out by `order`: fresh prompts, then others."""

    def __init__(self, cache: Cache, runs: Sequence[tuple[Run, int]]) -> None:
        self._cache = cache
        self._first = runs[0][1] if runs else 0
        lengths = [run.count for run, _ in runs if not run.start]
        self._fresh = [_fresh(cache, bucket) for bucket in buckets(lengths, lambda n: n)]
        self._resumed = [(r, row, cache.tensor(r.sequence.pages)) for r, row in runs if r.start]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """q and out [N, Hq, D], k and v [N, Hkv, D] of all the step's tokens."""
        first = self._first
        for fresh in self._fresh:
            at = slice(first, first + fresh.tokens)
            out[at] = fresh.attend(q[at], k[at], v[at])
            first = at.stop
        for run, row, pages in self._resumed:
            at = slice(row, row + run.count)
            keys, values = self._cache.read(layer, pages, 1)
            seen = keys[0, : run.end], values[0, : run.end]
            out[at] = causal_attention(q[at], *seen, run.start)


@dataclass(frozen=True)
class _Fresh:
    """Prompts of about one length, one after another, each seeing its own past."""

    tokens: int
    longest: int
    index: Tensor | None
    """[B · L] the source of each row of the padded block; a shorter prompt repeats its last
    token. None if all have one length."""
    real: Tensor | None
    """[tokens] the place of each token in the padded block; None if all have one length."""

    def attend(self, *qkv: Tensor) -> Tensor:
        """q [tokens, Hq, D], k and v [tokens, Hkv, D] -> [tokens, Hq, D]"""
        padded = qkv if self.index is None else (x.index_select(0, self.index) for x in qkv)
        q, k, v = (x.view(-1, self.longest, *x.shape[1:]).transpose(1, 2) for x in padded)
        out = attention(q, k, v, is_causal=True).transpose(1, 2).flatten(0, 1)
        return out if self.real is None else out.index_select(0, self.real)


def _fresh(cache: Cache, lengths: list[int]) -> _Fresh:
    """lengths: from long to short."""
    longest, ends = lengths[0], np.cumsum(lengths)
    if lengths[-1] == longest:
        return _Fresh(int(ends[-1]), longest, None, None)
    place = np.arange(longest)
    index = np.minimum((ends - lengths)[:, None] + place, ends[:, None] - 1)
    real = np.flatnonzero(place < np.array(lengths)[:, None])
    return _Fresh(int(ends[-1]), longest, cache.tensor(index.ravel()), cache.tensor(real))


def buckets(items: Sequence[T], length: Callable[[T], int]) -> list[list[T]]:
    """Items from long to short, cut where padding to the longest would waste over a quarter."""
    found: list[list[T]] = []
    for item in items:
        if found and 4 * length(item) >= 3 * length(found[-1][0]):
            found[-1].append(item)
        else:
            found.append([item])
    return found


def causal_attention(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """q [L, Hq, D] at positions start …, k and v [T, Hkv, D] from position 0 on -> [L, Hq, D]."""
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(start)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attention(q, k, v, mask=seen)[0].transpose(0, 1)
