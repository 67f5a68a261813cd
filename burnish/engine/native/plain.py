"""The plain backend: PyTorch's own operations, on any device and in any precision.

It is the reference for tests.

Legend: N tokens of a step, Hq and Hkv heads, D head width, d model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from burnish.engine.native import sampler
from burnish.engine.native.cache import Cache, TokenRun, order, positions_of, slots_of
from burnish.engine.native.sequence import Sequence as Sample
from burnish.model.attention import Attend, causal, has_flash
from burnish.model.matmul import attention
from burnish.model.transformer import Transformer


class Block(Protocol):
    """The next tokens of some samples, which a device draws while the host does other work."""

    @property
    def samples(self) -> Sequence[Sample]:
        """The samples that get tokens."""

    @property
    def steps(self) -> int:
        """Maximum number of tokens of each sample."""

    def pump(self) -> None:
        """Give the device more to do if it has little left, without waiting for it. Call this now
        and then, so that the device never waits for the host."""

    def queue(self) -> bool:
        """Give the device all that is left to do, and return whether a sample may go on after the
        block. False: all of them have ended."""

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Wait for the block. Return the tokens of each sample, up to an end id or its maximum
        length, and their log-probabilities; NaN, which is the last one, where the model overflowed.
        """


SampleAhead = Callable[[Sequence[Sample], int, Block | None], Block]
"""Function that begins a block. It takes the samples, whose limits `decoding.is_drawn_ahead`
allows; the maximum number of tokens of each; and the block that is to end before this one begins,
whose tokens the host has not read; None if there is none. Of two blocks in a row, the second may
only have samples of the first."""


class Backend(Protocol):
    """Implementation of the model's forward pass over pages, and of sampling, for one kind of
    device."""

    @property
    def weigh(self) -> sampler.Weigh:
        """The backend's implementation of `sampler.Weigh`."""

    @property
    def sample_ahead(self) -> SampleAhead | None:
        """Function that begins to sample several consecutive tokens of each sample; None if the
        backend has none."""

    def hidden(self, runs: Sequence[TokenRun]) -> Tensor:
        """Run the model over the tokens of all runs and write their keys and values to the cache.
        Return the hidden state of each run's last token, [runs, d], in the order of ``runs``; it is
        valid until the next call."""

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states [rows, d], over the vocabulary."""

    def update(self) -> None:
        """Adapt to new weights, after the model's tensors have been overwritten."""


class Plain:
    """The backend that runs the model itself, without kernels of its own."""

    sample_ahead: SampleAhead | None = None

    def __init__(self, model: Transformer, cache: Cache) -> None:
        self._model, self._cache = model, cache
        self.logits, self.weigh = model.logits, sampler.plain_weigh

    def hidden(self, runs: Sequence[TokenRun]) -> Tensor:
        return last_states(self._model, PlainAttention, self._cache, runs)

    def update(self) -> None:
        """Do nothing: this backend runs the model itself and caches nothing of its weights."""


def last_states(
    body: Callable[..., Tensor],
    attention: Callable[..., Any],
    cache: Cache,
    runs: Sequence[TokenRun],
) -> Tensor:
    """Run a model body over the tokens of all runs; return the hidden state of each run's last
    token, [runs, d], in the order of ``runs``.

    ``attention``: called with the cache and the runs, sorted by `order`; returns the step's
    attention function, which writes keys and values to the cache. ``body``: called with tokens [N],
    positions [N] and that function; returns hidden states [N, d].
    """
    ordered = order(runs)
    chunks = (run.sequence.tokens[run.start : run.end] for run in ordered)
    tokens = np.fromiter(chain.from_iterable(chunks), np.int64)
    given = cache.tensor(tokens), cache.tensor(positions_of(ordered))
    hidden = body(*given, attention(cache, ordered))
    return hidden[cache.tensor([run.rows.stop - 1 for run in runs])]


class PlainAttention:
    """The attention function of a step. It writes the new keys and values to their pages, and
    attends with `RunAttention`."""

    def __init__(self, cache: Cache, runs: Sequence[TokenRun]) -> None:
        self._cache, self._slots = cache, cache.tensor(slots_of(runs, cache.size))
        self._attend = RunAttention(cache, runs)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        for pool, fresh in zip(self._cache.slots(layer), (k, v), strict=True):
            pool[self._slots] = fresh
        out = torch.empty_like(q)
        self._attend(layer, q, k, v, out)
        return out


class RunAttention:
    """Attention of runs that are sorted by `order`: fresh prompts together, each to its own
    tokens; other runs one by one, to the tokens in their pages."""

    def __init__(self, cache: Cache, runs: Sequence[TokenRun]) -> None:
        self._cache = cache
        self._fresh: list[tuple[slice, Attend]] = []
        fresh = [run for run in runs if run.is_fresh]
        if fresh:
            attend = self._causal([run.count for run in fresh])
            self._fresh = [(slice(fresh[0].first, fresh[-1].rows.stop), attend)]
        others = [run for run in runs if not run.is_fresh]
        self._others = [(run, cache.tensor(run.sequence.pages)) for run in others]

    def _causal(self, lengths: Sequence[int]) -> Attend:
        cache = self._cache
        if has_flash(cache.device, cache.dtype, cache.width):
            starts, longest = cache.tensor(np.cumsum([0, *lengths])).int(), max(lengths)
            flash = torch.ops.aten._flash_attention_forward

            def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                found = flash(q, k, v, starts, starts, longest, longest, 0.0, True, False)
                out: Tensor = found[0]
                return out

            return attend
        return causal(lengths, cache.device, widens=False)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> None:
        """Compute the attention of the runs and write it to their rows of ``out``.

        q and out [N, Hq, D], k and v [N, Hkv, D] have a row for each token of the step. The pages
        must already contain k and v.
        """
        for rows, attend in self._fresh:
            out[rows] = attend(layer, q[rows], k[rows], v[rows])
        for run, pages in self._others:
            keys, values = self._cache.read(layer, pages, 1)
            seen = keys[0, : run.end], values[0, : run.end]
            out[run.rows] = causal_attention(q[run.rows], *seen, run.start)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """Compute the causal attention of queries q [L, Hq, D] at positions from ``start`` on to k and
    v [T, Hkv, D] at positions from 0 on; return [L, Hq, D]."""
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(start)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attention(q, k, v, mask=seen)[0].transpose(0, 1)
