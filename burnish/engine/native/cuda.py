"""The GPU backend: Triton kernels over pages, and decoding with CUDA graphs.

A decoding step of a small model consists of hundreds of kernels that run for microseconds each;
launching them one by one takes several times as long as running them. A CUDA graph needs one
launch. Several steps run without the host: see `decoding`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from burnish.engine.native import decoding, sampler
from burnish.engine.native.cache import Cache, TokenRun, download, slots_of
from burnish.engine.native.cuda_layers import CudaLayers
from burnish.engine.native.decoding import Buffers, Rows
from burnish.engine.native.plain import Block, RunAttention, last_states
from burnish.engine.native.sequence import Sequence as Sample
from burnish.model.attention import Attend
from burnish.model.matmul import linear
from burnish.model.transformer import Transformer

if TYPE_CHECKING:
    from burnish.engine.native.cuda_kernels import PageTable


LOOK = 4
"""Number of steps after which the host looks whether all rows have ended. The device has one to two
times as many steps left to do."""


class Look(NamedTuple):
    """Whether any row went on after some of the steps, which the device tells later."""

    is_known: Callable[[], bool]
    """Function that returns whether the device has done these steps."""
    runs: Callable[[], bool]
    """Function that waits for these steps and returns whether any row went on."""


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
        self._layers = CudaLayers(model, cache)

    def hidden(self, runs: Sequence[TokenRun]) -> Tensor:
        if all(run.count == 1 for run in runs):
            kind = self._give([run.sequence for run in runs])
            run_body, hidden = self._bodies[kind]
            run_body()
            return hidden[: len(runs)]
        return last_states(self._run_prompts, PagedAttention, self._cache, runs)

    def sample_ahead(
        self, samples: Sequence[Sample], steps: int, before: Block | None = None
    ) -> CudaBlock:
        """Begin to sample up to ``steps`` tokens of samples that all decode. Pages for these tokens
        and those of the block before must be allocated (`Scheduler.reserve`). The samples
        themselves are not changed. See `plain.SampleAhead`."""
        if before is None:
            return CudaBlock(self, samples, steps, self._give(samples), [])
        assert isinstance(before, CudaBlock), "blocks of a backend follow each other"
        before.queue()  # all of its steps read the state that is overwritten here
        place = {sample: row for row, sample in enumerate(before.samples)}
        keep = self._cache.tensor([place[sample] for sample in samples])
        old = self._buffers.rows(before.kind[0])
        tokens, counts = old.tokens[keep], old.counts[keep]
        kind = self._give(samples, before.steps)
        decoding.go_on(self._buffers.rows(kind[0]), tokens, counts)
        return CudaBlock(self, samples, steps, kind, before.looks[-2:])

    def run_step(self, kind: tuple[int, bool]) -> None:
        """Compute and draw a token of each row, and advance the rows."""
        run_body, _ = self._bodies[kind]
        run_body()
        self._heads[kind]()

    def look(self, kind: tuple[int, bool]) -> Look:
        """Return whether a row has not ended after all steps up to now."""
        longest = self._buffers.rows(kind[0]).counts.amax().to("cpu", non_blocking=True)
        is_done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        is_done.record()

        def runs() -> bool:
            is_done.synchronize()
            return bool(longest)

        return Look(is_done.query, runs)

    def copy_drawn(self, kind: tuple[int, bool]) -> Callable[[], Sequence[Tensor]]:
        """Begin to copy the numbers of drawn tokens, the tokens and their log-probabilities. Return
        a function that waits for them."""
        rows = self._buffers.rows(kind[0])
        return download(rows.drawn, rows.found, rows.logprobs)

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

    def _give(self, samples: Sequence[Sample], drawn: int = 0) -> tuple[int, bool]:
        """Write the state of the rows, and record the graphs of their kind if there are none yet.
        Return the kind: the number of rows, including padding, and whether some share pages.
        ``drawn``: see `decoding.state_of`."""
        rows = padded(len(samples))
        integers, floats, shares = decoding.state_of(samples, rows, self._cache.size, drawn)
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
        attend = paged_attention(self._cache, table)
        return self._layers(rows.tokens, rows.positions, rows.slots, attend)

    def _run_prompts(self, tokens: Tensor, positions: Tensor, attend: PagedAttention) -> Tensor:
        """Run the model on the tokens [N] of a step with prompts; return their hidden states."""
        return self._layers(tokens, positions, attend.slots, attend)

    def _draw(self, hidden: Tensor, rows: Rows) -> Tensor:
        """Draw a token for each row and advance the rows; return their logits [S, V]."""
        from burnish.engine.native import sampling_kernels

        logits = self.logits(hidden)
        sampling_kernels.draw(logits, rows, self._cache.size)
        return logits


class CudaBlock:
    """A block of decoding steps on the GPU: see `plain.Block`.

    The host queues the next `LOOK` steps when it knows that a row went on at the last look but one.
    So the device has `LOOK` to twice as many steps left to do, and does few useless steps after all
    rows have ended.
    """

    def __init__(
        self,
        backend: Cuda,
        samples: Sequence[Sample],
        steps: int,
        kind: tuple[int, bool],
        looks: Sequence[Look],
    ) -> None:
        """Queue the first steps. The state of the rows is written. ``kind``: see `Cuda._give`.
        ``looks``: the last ones of the block before."""
        self.samples, self.steps, self.kind = samples, steps, kind
        self.looks = list(looks)
        self._backend, self._queued, self._is_over = backend, 0, False
        self._results: Callable[[], Sequence[Tensor]] | None = None
        self._queue_some()

    def pump(self) -> None:
        while self._results is None and (len(self.looks) < 2 or self.looks[-2].is_known()):
            self._queue_some()

    def queue(self) -> bool:
        while self._results is None:
            self._queue_some()
        return not self._is_over

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        self.queue()
        assert self._results is not None, "all steps are queued"
        drawn, tokens, logprobs = (field.tolist() for field in self._results())
        counts = drawn[: len(self.samples)]
        return (
            [own[:count] for own, count in zip(tokens, counts, strict=False)],
            [own[:count] for own, count in zip(logprobs, counts, strict=False)],
        )

    def _queue_some(self) -> None:
        """Wait for the last look but one. Queue the next `LOOK` steps, and copies of the results if
        no steps are left."""
        self._is_over = len(self.looks) > 1 and not self.looks[-2].runs()
        steps = 0 if self._is_over else min(LOOK, self.steps - self._queued)
        for _ in range(steps):
            self._backend.run_step(self.kind)
        self._queued += steps
        if steps:
            self.looks.append(self._backend.look(self.kind))
        if self._is_over or self._queued == self.steps:
            self._results = self._backend.copy_drawn(self.kind)


class PagedAttention:
    """The attention function of a step with prompts, whose keys and values are in their pages.
    Decoding rows, which come first, use a Triton kernel, and prompts use `RunAttention`."""

    def __init__(self, cache: Cache, runs: Sequence[TokenRun]) -> None:
        from burnish.engine.native.cuda_kernels import PageTable

        self.slots = cache.tensor(slots_of(runs, cache.size))
        """[N] slots of the keys and values."""
        first = [run for run in runs if run.count == 1]
        pages = list(chain.from_iterable(run.sequence.pages for run in first))
        places = np.cumsum([0, *(len(run.sequence.pages) for run in first)])[:-1]
        ends = [run.end for run in first]
        table = PageTable(*map(cache.tensor, (pages, places, ends, [0] * len(first))))
        self._decode = paged_attention(cache, table)
        self._rows, self._rest = len(first), RunAttention(cache, runs[len(first) :])

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = torch.empty_like(q)
        if self._rows:
            out[: self._rows] = self._decode(layer, q[: self._rows], k, v)
        self._rest(layer, q, k, v, out)
        return out


def paged_attention(cache: Cache, table: PageTable) -> Attend:
    """Return an attention function of decoding rows q [S, Hq, D] to the keys and values in their
    pages, among which are those of the rows."""
    from burnish.engine.native import cuda_kernels

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cuda_kernels.attend(q, *cache.slots(layer), table, cache.size)

    return attend


def padded(rows: int) -> int:
    """Round a number of rows up to 1, 8, 16, 32, a multiple of 64 up to 256, or a multiple of 128,
    so that there are few graphs and little padding."""
    if rows > 64:
        size = 64 if rows <= 256 else 128
        return -(-rows // size) * size
    return 1 if rows == 1 else max(8, 1 << (rows - 1).bit_length())
