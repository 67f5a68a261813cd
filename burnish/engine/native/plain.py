"""The plain backend: PyTorch's own operations, on any device and in any precision.

Tests trust it. Legend: N tokens of a step, Hq and Hkv heads, D head width, d model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from burnish.engine import sampler
from burnish.engine.cache import Cache, Run, order, slots_of
from burnish.engine.sequence import Sequence as Sample
from burnish.model.attention import Attend, causal
from burnish.model.products import attention
from burnish.model.transformer import Transformer

SampleAhead = Callable[[Sequence[Sample], Tensor, Tensor, sampler.Limited], tuple[Tensor, Tensor]]
"""Samples, and for `sampler.sample`: points [samples, steps], temperatures [samples] and limited
rows -> tokens and log-probabilities, shaped like the points."""


class Backend(Protocol):
    """One device's way to run the model: body, attention over pages, sampling."""

    @property
    def weigh(self) -> sampler.Weigh: ...

    @property
    def sample_ahead(self) -> SampleAhead | None:
        """Samples several tokens of each sample in a row; None if the device does not."""

    def hidden(self, runs: Sequence[Run]) -> Tensor:
        """The state [runs, d] after each run's last token, until the next call."""

    def logits(self, hidden: Tensor) -> Tensor: ...

    def update(self) -> None:
        """The model's weights have changed."""


class Plain:
    sample_ahead: SampleAhead | None = None

    def __init__(self, model: Transformer, cache: Cache) -> None:
        self._model, self._cache = model, cache
        self.logits, self.weigh = model.logits, sampler.plain_weigh

    def hidden(self, runs: Sequence[Run]) -> Tensor:
        return last_states(self._model, PlainAttention, self._cache, runs)

    def update(self) -> None:
        """The model itself runs: nothing was prepared from its weights."""


def last_states(
    body: Callable[..., Tensor], attention: Callable[..., Any], cache: Cache, runs: Sequence[Run]
) -> Tensor:
    """Runs a body over the tokens of all runs, laid out by `order` -> see `Backend.hidden`.

    attention(cache, runs) is how the tokens attend.
    """
    ordered = order(runs)
    tokens = [t for run in ordered for t in run.sequence.tokens[run.start : run.end]]
    positions = [p for run in ordered for p in range(run.start, run.end)]
    hidden = body(cache.tensor(tokens), cache.tensor(positions), attention(cache, ordered))
    return hidden[cache.tensor([run.rows.stop - 1 for run in runs])]


class PlainAttention:
    """The model's `Attend` over pages, one run at a time."""

    def __init__(self, cache: Cache, runs: Sequence[Run]) -> None:
        self._cache, self._slots = cache, cache.tensor(slots_of(runs, cache.size))
        self._attend = RunAttention(cache, runs)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for pool, fresh in zip(self._cache.slots(layer), (k, v), strict=True):
            pool[self._slots] = fresh
        out = torch.empty_like(q)
        self._attend(layer, q, k, v, out)
        return out


class RunAttention:
    """Attention of runs laid out by `order`: fresh prompts together, other runs one by one."""

    def __init__(self, cache: Cache, runs: Sequence[Run]) -> None:
        self._cache = cache
        self._fresh: list[tuple[slice, Attend]] = []
        fresh = [run for run in runs if run.is_fresh]
        if fresh:
            attend = causal([run.count for run in fresh], cache.device, widens=False)
            self._fresh = [(slice(fresh[0].first, fresh[-1].rows.stop), attend)]
        others = [run for run in runs if not run.is_fresh]
        self._others = [(run, cache.tensor(run.sequence.pages)) for run in others]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """q and out [N, Hq, D], k and v [N, Hkv, D] of all the step's tokens."""
        for rows, attend in self._fresh:
            out[rows] = attend(layer, q[rows], k[rows], v[rows])
        for run, pages in self._others:
            keys, values = self._cache.read(layer, pages, 1)
            seen = keys[0, : run.end], values[0, : run.end]
            out[run.rows] = causal_attention(q[run.rows], *seen, run.start)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """q [L, Hq, D] at positions start …, k and v [T, Hkv, D] from position 0 on -> [L, Hq, D]."""
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(start)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attention(q, k, v, mask=seen)[0].transpose(0, 1)
