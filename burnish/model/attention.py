"""How tokens attend. The model is given an `Attend`; the learner's is made by `packed`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from burnish.model.products import attention

Item = TypeVar("Item")
_Segment = tuple[range, range]
"""Slots of a segment, and of the prompt before it; none are before a prompt."""


class Attend(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, Hq, D], k and v [N, Hkv, D], normed and rotated -> [N, Hq, D]."""
        ...


@dataclass(frozen=True)
class _Block:
    """Segments of about one length, after prompts of one length, attended in one call."""

    queries: Tensor
    """[B, L] slots; a shorter segment repeats its last slot, and the repeated rows are dropped."""
    context: Tensor
    """[B, P + L] slots: the prompt's, then the segment's own."""
    mask: Tensor | None
    """[L, P + L] bool, the causal mask after a prompt; None without one."""

    @classmethod
    def of(cls, run: list[_Segment], device: torch.device) -> _Block:
        """From segments, the longest first."""
        longest, before = map(len, run[0])
        padded = [[*own, *[own[-1]] * (longest - len(own))] for own, _ in run]
        slots = torch.tensor(padded, device=device)
        if not before:
            return cls(slots, slots, None)
        prompt = torch.tensor([[*prompt] for _, prompt in run], device=device)
        mask = torch.ones(longest, before + longest, dtype=torch.bool, device=device).tril(before)
        return cls(slots, torch.cat((prompt, slots), dim=1), mask)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [B · L, Hq, D], k and v [B · (P + L), Hkv, D] -> [B · L, Hq, D]"""
        q = q.view(*self.queries.shape, *q.shape[1:]).transpose(1, 2)
        k, v = (x.view(*self.context.shape, *x.shape[1:]).transpose(1, 2) for x in (k, v))
        out = attention(q, k, v, mask=self.mask, is_causal=self.mask is None)
        return out.transpose(1, 2).flatten(0, 1)


class PackedAttention:
    """Causal attention over a pack: prompt, response 1, response 2, …, prompt, response 1, …

    A response's tokens see the prompt before them and their own past. A prompt is attended once
    however many responses follow, and nothing is padded beyond the lengths within a block.
    """

    def __init__(
        self, segment_offsets: Tensor, segment_is_prompt: Tensor, *, widens: bool = True
    ) -> None:
        """segment_offsets [segments + 1], segment_is_prompt [segments], as in `PackedBatch`.

        widens: on a CPU, 16-bit numbers are attended to in float32.
        """
        self._widens = widens
        offsets, device = segment_offsets.tolist(), segment_offsets.device
        prompt = range(0)
        after: dict[int, list[_Segment]] = {0: []}  # by the length of the prompt
        for start, end, is_prompt in zip(
            offsets, offsets[1:], segment_is_prompt.tolist(), strict=False
        ):
            own = range(start, end)
            prompt = own if is_prompt else prompt
            before = range(0) if is_prompt else prompt
            after.setdefault(len(before), []).append((own, before))
        self._blocks = [
            _Block.of(run, device)
            for segments in after.values()
            for run in alike(segments, lambda segment: len(segment[0]))
        ]
        # One gather for all blocks, not one each: the backward pass of a gather writes a tensor
        # as large as the tensor that was gathered from.
        self._queries = torch.cat([block.queries.flatten() for block in self._blocks])
        self._context = torch.cat([block.context.flatten() for block in self._blocks])
        self._sizes = [block.queries.numel() for block in self._blocks]
        self._context_sizes = [block.context.numel() for block in self._blocks]
        # The row of each slot. A padded slot repeats, and the first of equal slots is the real one.
        slots, order = self._queries.sort(stable=True)
        self._rows = order[torch.searchsorted(slots, torch.arange(offsets[-1], device=device))]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dtype = q.dtype
        if self._widens and q.device.type == "cpu" and dtype.itemsize < 4:
            # A CPU's attention over 16-bit numbers takes three times as long in the backward pass.
            q, k, v = q.float(), k.float(), v.float()
        queries = torch.split(q.index_select(0, self._queries), self._sizes)
        keys = torch.split(k.index_select(0, self._context), self._context_sizes)
        values = torch.split(v.index_select(0, self._context), self._context_sizes)
        done = [
            block(*rows) for block, *rows in zip(self._blocks, queries, keys, values, strict=True)
        ]
        return torch.cat(done).to(dtype).index_select(0, self._rows)


class FlashPackedAttention:
    """The same attention by one varlen flash kernel, on a GPU in 16 bits. The kernel aligns its
    causal mask to the ends of queries and keys, as a response after its prompt needs it."""

    def __init__(self, segment_offsets: Tensor, segment_is_prompt: Tensor) -> None:
        """segment_offsets [segments + 1], segment_is_prompt [segments], as in `PackedBatch`."""
        device, starts = segment_offsets.device, segment_offsets[:-1]
        own, numbers = segment_offsets.diff(), torch.arange(len(starts), device=device)
        prompt = torch.where(segment_is_prompt, numbers, 0).cummax(0).values
        before = torch.where(segment_is_prompt, 0, own[prompt])
        ends = F.pad((before + own).cumsum(0), (1, 0))
        segment = numbers.repeat_interleave(before + own)
        within = torch.arange(len(segment), device=device) - ends[segment]
        self._context = within + torch.where(
            within < before[segment], starts[prompt[segment]], (starts - before)[segment]
        )
        self._arguments = (
            *(x.to(torch.int32) for x in (segment_offsets, ends)),
            *(int(x.max()) for x in (own, before + own)),
        )

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.index_select(0, self._context) for x in (k, v))
        flash = torch.ops.aten._flash_attention_forward
        out: Tensor = flash(q, k, v, *self._arguments, 0.0, True, False)[0]
        return out


def packed(
    segment_offsets: Tensor, segment_is_prompt: Tensor, dtype: torch.dtype, width: int
) -> Attend:
    """How the segments of a pack attend, given the precision and width of their heads."""
    device = segment_offsets.device
    fits = device.type == "cuda" and dtype.itemsize == 2 and width % 8 == 0 and width <= 256
    flash = fits and torch.cuda.get_device_capability(device) >= (8, 0)
    kind = FlashPackedAttention if flash else PackedAttention
    return kind(segment_offsets, segment_is_prompt)


def causal(
    lengths: Sequence[int], device: torch.device | str = "cpu", *, widens: bool = True
) -> PackedAttention:
    """Plain sequences one after another, each seeing its own past."""
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    return PackedAttention(offsets, torch.ones(len(lengths), dtype=torch.bool), widens=widens)


def alike(items: Iterable[Item], length: Callable[[Item], int]) -> list[list[Item]]:
    """Items from long to short, cut where padding to the longest would waste over a quarter; items
    of length 0 are left out."""
    runs: list[list[Item]] = []
    for item in sorted(filter(length, items), key=length, reverse=True):
        if runs and 4 * length(item) >= 3 * length(runs[-1][0]):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs
