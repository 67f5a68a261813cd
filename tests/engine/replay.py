"""Engines that sample several tokens before the host reads them, on any device, and engines that
sample one at a time.

On a CPU, the same forward pass, run as it is, stands in for the recorded graph of a GPU.
"""

from __future__ import annotations

from typing import Any

import tiny
import torch
from torch import Tensor

from burnish.engine.native import cuda, decoding
from burnish.engine.native.cuda import Look
from burnish.engine.native.decoding import Rows
from burnish.engine.native.engine import NativeEngine
from burnish.engine.native.plain import Plain, PlainAttention, causal_attention, last_states


class Counted(cuda.Cuda):
    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.steps: list[int] = []
        self.looks: list[bool] = []

    def sample_ahead(self, samples: Any, steps: int, before: Any = None) -> Any:
        self.steps.append(steps)
        return super().sample_ahead(samples, steps, before)


class Interpreted(Counted):
    """Runs what a graph would replay; its kernels need Triton's interpreter."""

    def _record(self, kind: Any) -> None:
        super()._record(kind)
        self._buffers._integers.fill_(-7)  # recording leaves nothing that may be relied on

    def look(self, kind: Any) -> Look:
        runs = bool(self._buffers.rows(kind[0]).counts.any())
        self.looks.append(runs)
        return Look(lambda: len(self.looks) % 3 > 0, lambda: runs)

    def copy_drawn(self, kind: Any) -> Any:
        rows = self._buffers.rows(kind[0])
        copies = [field.clone() for field in (rows.drawn, rows.found, rows.logprobs)]
        return lambda: copies

    def _graph(self, run: Any) -> Any:
        out = run()
        return lambda: out.copy_(run()), out


class Replayed(Interpreted):
    """Runs the plain versions of the kernels."""

    def hidden(self, runs: Any) -> Tensor:
        if all(run.count == 1 for run in runs):
            return super().hidden(runs)
        return last_states(self._model, PlainAttention, self._cache, runs)

    def _run(self, rows: Rows, *, shares: bool) -> Tensor:
        size = self._cache.size
        shared = {row: item for item in rows.items.tolist() for row in item[2:] if item[1]}
        assert bool(rows.owns.any()) == shares or not rows.counts.any()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            keys, values = self._cache.slots(layer)
            out = torch.zeros_like(q)
            for row, (slot, first, seen, own) in enumerate(torch.stack(rows[2:6], 1).tolist()):
                if slot < 0:
                    assert seen == 0
                    continue
                keys[slot], values[slot] = k[row], v[row]
                at = torch.arange(seen)
                page = rows.pages[first + at // size]
                if own:
                    start, count, *_ = shared[row]
                    assert count == own
                    assert torch.equal(page[:own], rows.pages[start + at[:own] // size])
                where = page * size + at % size
                assert where[-1] == slot
                past = q[row : row + 1], keys[where], values[where]
                out[row] = causal_attention(*past, seen - 1)[0]
            return out

        hidden: Tensor = self._model(rows.tokens, rows.positions, attend)
        return hidden

    def _draw(self, hidden: Tensor, rows: Rows) -> Tensor:
        logits = self.logits(hidden)
        decoding.draw_plainly(logits, rows, self._cache.size)
        return logits


def ahead(kind: type[Counted] | None = None, **settings: Any) -> tuple[NativeEngine, list[int]]:
    """An engine, and how many tokens each of its blocks has."""
    engine = tiny.engine(**settings)
    engine.scheduler.prompts_first = True
    kind = kind or (Replayed if tiny.DEVICE == "cpu" else Counted)
    engine._backend = backend = kind(
        engine._model, engine._cache, engine.scheduler.settings.max_running
    )
    return engine, backend.steps


def one_by_one(**settings: Any) -> NativeEngine:
    engine = tiny.engine(**settings)
    engine._backend = Plain(engine._model, engine._cache)
    return engine
