"""The GPU backend: Triton kernels over pages, and decoding with CUDA graphs.

A decoding step of a small model consists of hundreds of kernels that run for microseconds each;
launching them one by one takes several times as long as running them. A CUDA graph needs one
launch. Several steps run without the host: see `decoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from burnish.engine.native import decoding, sampler
from burnish.engine.native.cache import Cache, TokenRun, slots_of
from burnish.engine.native.decoding import Buffers, Rows
from burnish.engine.native.plain import RunAttention, last_states
from burnish.engine.native.sequence import Sequence as Sample
from burnish.model.attention import Attend
from burnish.model.matmul import linear
from burnish.model.transformer import Transformer

if TYPE_CHECKING:
    from burnish.engine.native.cuda_kernels import PageTable


LOOK = 4
"""Number of steps after which the host looks whether all rows have ended."""


def usable(width: int) -> bool:
    """Return whether Triton is installed and its kernels support heads of this width: a power of
    two, at least 16."""
    return find_spec("triton") is not None and width >= 16 and width & (width - 1) == 0


class Cuda:
    """Runs the model on a GPU. Steps that only decode replay recorded CUDA graphs; steps with
    prompts call the model.

    The graphs read the model's own weights, whose addresses do not change.
    """

    def __init__(self, model: Transformer, cache: Cache, most: int) -> None:
        """Allocate the graphs' inputs. ``most``: maximum number of samples that decode at the same
        time."""
        self._model, self._cache = model, cache
        self.weigh = sampler.plain_weigh
        weight = self._head_weight
        is_wide = model.config.fp32_head and weight.dtype.itemsize < 4
        self._wide_head = weight.float() if is_wide else None
        """The head in float32, if the model has such a head; converting it takes longer than a
        step's product."""
        pages = 1 + -(-model.config.context // cache.size)
        self._buffers = Buffers(padded(most), pages, cache.device)
        self._bodies: dict[tuple[int, bool], tuple[Callable[[], None], Tensor]] = {}
        """Functions that run the model on a number of rows, of which some share pages or none, and
        the hidden states that they write."""
        self._heads: dict[tuple[int, bool], Callable[[], None]] = {}
        """Functions that draw a token from these hidden states and advance the rows."""
        self._pool: Any = None

    def hidden(self, runs: Sequence[TokenRun]) -> Tensor:
        if all(run.count == 1 for run in runs):
            kind = self._give([run.sequence for run in runs])
            run_body, hidden = self._bodies[kind]
            run_body()
            return hidden[: len(runs)]
        return last_states(self._model, PagedAttention, self._cache, runs)

    def sample_ahead(
        self, samples: Sequence[Sample], steps: int
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Sample up to ``steps`` tokens of samples that all decode, without waiting for the device
        in between. Pages for these tokens must be allocated (`Scheduler.reserve`). The samples
        themselves are not changed. See `plain.SampleAhead`."""
        kind = self._give(samples)
        run_body, run_head = self._bodies[kind][0], self._heads[kind]
        rows = self._buffers.rows(kind[0])
        looks: list[Callable[[], bool]] = []
        for step in range(0, steps, LOOK):
            # The device still has `LOOK` steps to do. If all rows have ended, further steps would
            # change nothing.
            if len(looks) > 1 and not looks[-2]():
                break
            for _ in range(min(LOOK, steps - step)):
                run_body()
                run_head()
            looks.append(self._look(rows))
        drawn = rows.drawn[: len(samples)].tolist()
        tokens, logprobs = (x[: len(samples), :steps].tolist() for x in rows[-2:])
        return (
            [own[:count] for own, count in zip(tokens, drawn, strict=True)],
            [own[:count] for own, count in zip(logprobs, drawn, strict=True)],
        )

    def _look(self, rows: Rows) -> Callable[[], bool]:
        """Return a function that waits until the device has done all steps up to now, and returns
        whether a row had not ended then."""
        longest = rows.counts.amax().to("cpu", non_blocking=True)
        is_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        is_done.record()

        def look() -> bool:
            is_done.synchronize()
            return bool(longest)

        return look

    def logits(self, hidden: Tensor) -> Tensor:
        if self._wide_head is None:
            return self._model.logits(hidden)
        return linear(hidden.float(), self._wide_head)

    def update(self) -> None:
        if self._wide_head is not None:
            self._wide_head.copy_(self._head_weight)

    @property
    def _head_weight(self) -> Tensor:
        model = self._model
        return (model.embed if model.head is None else model.head).weight.detach()

    def _give(self, samples: Sequence[Sample]) -> tuple[int, bool]:
        """Write the state of the rows, and record the graphs of their kind if there are none yet.
        Return the kind: the number of rows, including padding, and whether some share pages."""
        rows = padded(len(samples))
        integers, floats, shares = decoding.state_of(samples, rows, self._cache.size)
        kind = rows, shares
        if kind not in self._bodies:  # recording overwrites the state
            self._record(kind)
        self._buffers.write(integers, floats)
        return kind

    def _record(self, kind: tuple[int, bool]) -> None:
        """Record a decoding step of this kind. All rows are empty meanwhile, so that no page is
        read or written."""
        rows = self._buffers.rows(kind[0])
        for field, empty in zip(rows, decoding.EMPTY, strict=False):
            field.fill_(empty)
        rows.items.zero_()
        rows.heat.fill_(1)
        run_body, hidden = self._graph(lambda: self._run(rows, shares=kind[1]))
        self._bodies[kind] = run_body, hidden
        self._heads[kind], _ = self._graph(lambda: self._draw(hidden, rows))

    def _graph(self, run: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        """Record a function; return a function that replays it, and the tensor that it writes."""
        current = torch.cuda.current_stream()
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(current)
        with torch.cuda.stream(aside):  # compile kernels and allocate memory before recording
            run()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            out = run()
        self._pool = graph.pool()
        return graph.replay, out

    def _run(self, rows: Rows, *, shares: bool) -> Tensor:
        """Run the model on the rows' tokens; return their hidden states [S, d]."""
        from burnish.engine.native.cuda_kernels import PageTable

        items = rows.items[: max(1, len(rows.items) // 2)] if shares else None
        table = PageTable(rows.pages, rows.firsts, rows.counts, rows.owns, items)
        attend = attention(self._cache, rows.slots, table)
        hidden: Tensor = self._model(rows.tokens, rows.positions, attend)
        return hidden

    def _draw(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Draw a token for each row and advance the rows; return their logits [S, V]."""
        from burnish.engine.native import sampling_kernels

        logits = self.logits(hidden)
        sampling_kernels.draw(logits, rows, self._cache.size)
        return logits


class PagedAttention:
    """The attention function of a step with prompts. It writes the new keys and values to their
    pages; decoding rows, which come first, use a Triton kernel, and prompts use `RunAttention`."""

    def __init__(self, cache: Cache, runs: Sequence[TokenRun]) -> None:
        from burnish.engine.native.cuda_kernels import PageTable

        first = [run for run in runs if run.count == 1]
        pages = list(chain.from_iterable(run.sequence.pages for run in first))
        places = np.cumsum([0, *(len(run.sequence.pages) for run in first)])[:-1]
        ends = [run.end for run in first]
        table = PageTable(*map(cache.tensor, (pages, places, ends, [0] * len(first))))
        self._decode = attention(cache, cache.tensor(slots_of(runs, cache.size)), table)
        self._rows, self._rest = len(first), RunAttention(cache, runs[len(first) :])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        out[: self._rows] = self._decode(layer, q[: self._rows], k, v)
        self._rest(layer, q, k, v, out)
        return out


def attention(cache: Cache, slots: Tensor, table: PageTable) -> Attend:
    """Return an attention function that writes k and v [N, Hkv, D] to their slots [N], and computes
    the attention of decoding rows q [S, Hq, D] to their pages."""
    from burnish.engine.native import cuda_kernels

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        pools = cache.slots(layer)
        cuda_kernels.write_pages(*pools, slots, k, v)
        return cuda_kernels.attend(q, *pools, table, cache.size) if len(q) else q

    return attend


def padded(rows: int) -> int:
    """Round a number of rows up to 8, 16, 32, 64 or a multiple of 128, so that there are few graphs
    and little padding."""
    return -(-rows // 128) * 128 if rows > 64 else max(8, 1 << (rows - 1).bit_length())
