"""Attention over packed sequences. A model receives its attention function, an `Attend`, as an
argument; `packed` builds the learner's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from burnish.model import kernels
from burnish.model.gather import RowGather
from burnish.model.matmul import widened

Item = TypeVar("Item")
SHORT = 512
"""Longest context, in tokens, for which gathered keys and values are kept for the backward pass.
With longer contexts gathering takes a negligible share of the time, so it is repeated instead."""
FEW = 2
"""Up to this many segments the memory-efficient kernel is slower than plain matrix products: to be
deterministic, its backward pass handles the queries of a segment and head one after another."""
BOTTOM_RIGHT = 2
"""PyTorch's constant for a causal mask that is aligned to the ends of queries and keys."""
_Segment = tuple[range, range]
"""Slots of a segment, and slots of the prompt before it (empty if the segment is a prompt)."""


class Attend(Protocol):
    """An attention function for given sequences. A model calls it once per layer."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Compute the attention of a layer: q [N, Hq, D], k and v [N, Hkv, D], normed and rotated
        -> [N, Hq, D]. ``layer`` is the index of the layer, for functions that read a KV cache."""
        ...


class _Pack(Protocol):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Compute attention; return the result [N, Hq, D] and the tensors that the backward pass
        needs."""
        ...

    def backward(self, up: Tensor, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v, given the gradient of the result and the saved
        tensors."""
        ...


class _Attention(torch.autograd.Function):
    """Autograd function that calls a `_Pack`, which chooses the tensors to save. Autograd itself
    would save a mask and, for each response, a copy of the prompt's keys and values in every
    layer."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, pack: _Pack) -> Tensor:
        out, kept = pack.forward(q, k, v)
        ctx.save_for_backward(*kept)
        ctx.pack = pack
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        return *ctx.pack.backward(up, ctx.saved_tensors), None


@dataclass(frozen=True)
class _Block:
    """B segments of similar length after prompts of equal length, computed in one call."""

    queries: Tensor
    """[B, L] slots. A shorter segment repeats its last slot, and the repeated rows are dropped."""
    context: Tensor
    """[B, P + L] slots: those of the prompt, then those of the segment."""

    @classmethod
    def of(cls, run: list[_Segment], device: torch.device) -> _Block:
        """Build a block from segments, which are sorted from long to short."""
        longest, before = map(len, run[0])
        padded = [[*own, *[own[-1]] * (longest - len(own))] for own, _ in run]
        slots = torch.tensor(padded, device=device)
        if not before:
            return cls(slots, slots)
        prompt = torch.tensor([[*prompt] for _, prompt in run], device=device)
        return cls(slots, torch.cat((prompt, slots), dim=1))

    @property
    def length(self) -> int:
        """L, the number of queries per segment, including repeated ones."""
        return self.queries.shape[1]

    @property
    def before(self) -> int:
        """P, the length of the prompt before each segment; 0 if the segments are prompts."""
        return self.context.shape[1] - self.length

    @property
    def has_mask(self) -> bool:
        """Whether the kernel needs a mask: on a CPU, for a short segment after a prompt."""
        on_cpu = self.queries.device.type == "cpu"
        return on_cpu and self.before > 0 and self.length <= kernels.MASKED


class PackedAttention:
    """Causal attention over a pack: prompt, response 1, response 2, …, prompt, response 1, …

    A response's token attends to the prompt and to the tokens before it in the response. A prompt
    is computed once, however many responses follow. Segments are padded only to the longest one in
    their block.
    """

    def __init__(
        self, segment_offsets: Tensor, segment_is_prompt: Tensor, *, widens: bool = True
    ) -> None:
        """Divide the pack's segments, each a prompt or a response, into blocks.

        ``segment_offsets`` [segments + 1] are the first slot of each segment, and the end of the
        last; ``segment_is_prompt`` [segments]. With ``widens``, a CPU computes the attention of
        16-bit tensors in float32; without, only if it has no fast 16-bit products. Other devices
        always compute it in float32.
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
        # One gather for all blocks: with short segments, the number of operations sets the time.
        self._queries = torch.cat([block.queries.flatten() for block in self._blocks])
        self._context = torch.cat([block.context.flatten() for block in self._blocks])
        # The row of each slot. Padding repeats a slot; the first of equal slots is the real one.
        slots, order = self._queries.sort(stable=True)
        self._rows = order[torch.searchsorted(slots, torch.arange(offsets[-1], device=device))]
        is_repeated = torch.ones_like(self._queries).index_fill_(0, self._rows, 0)
        self._repeated = is_repeated.nonzero()[:, 0]
        longest = max((block.context.shape[1] for block in self._blocks), default=0)
        self._keeps = longest <= SHORT and len(self._context) <= 2 * offsets[-1]
        masked = [(block.length, block.before) for block in self._blocks if block.has_mask]
        self._largest = [max(sizes) for sizes in zip(*masked, strict=True)]
        """L and P of the mask that all blocks share; empty if no block needs a mask."""
        self._mask: Tensor | None = None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Attention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        """Compute attention block by block; return the result [N, Hq, D] and the tensors to save:
        the inputs and outputs of each block if contexts are short, otherwise q, k, v, the result
        and its logsumexp [N, Hq]."""
        given = self._gather(q, k, v)
        found = [
            kernels.forward(*rows, seen=self._mask_of(block, rows[0]))
            for block, rows in zip(self._blocks, given, strict=True)
        ]
        out = _joined([x for x, _ in found]).index_select(0, self._rows).to(q.dtype)
        if self._keeps:
            return out, [x for pair in zip(given, found, strict=True) for x in chain(*pair)]
        lse = _joined([x for _, x in found]).index_select(0, self._rows)
        # v is a view of a larger tensor, which would otherwise stay in memory.
        return out, (q, k, v.contiguous(), out, lse)

    def backward(self, up: Tensor, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        if self._keeps:
            given: list[Any] = [kept[i : i + 5] for i in range(0, len(kept), 5)]
        else:
            results = (self._cut(x.index_select(0, self._queries)) for x in kept[3:])
            given = [
                (*rows, *more)
                for rows, *more in zip(self._gather(*kept[:3]), *results, strict=True)
            ]
        # Repeated rows have no gradient.
        padded = up.index_select(0, self._queries).index_fill_(0, self._repeated, 0)
        found = [
            kernels.backward(high, *rows, seen=self._mask_of(block, high))
            for block, high, rows in zip(self._blocks, self._cut(padded), given, strict=True)
        ]
        to_q, *others = (_joined(x) for x in zip(*found, strict=True))
        to_k, to_v = (
            x.new_zeros(len(up), *x.shape[1:]).index_add_(0, self._context, x).to(up.dtype)
            for x in others
        )
        return to_q.index_select(0, self._rows).to(up.dtype), to_k, to_v

    def _gather(self, q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
        """Gather the inputs of each block: q [B, Hq, L, D], k and v [B, Hkv, P + L, D]."""
        own = self._cut(q.index_select(0, self._queries))
        seen = (self._cut(x.index_select(0, self._context), seen=True) for x in (k, v))
        return list(zip(own, *seen, strict=True))

    def _cut(self, rows: Tensor, *, seen: bool = False) -> list[Tensor]:
        """Split the rows of all queries (with ``seen``, of all contexts) into blocks of shape [B,
        H, L or P + L, …], and widen them to float32 if the kernel needs it."""
        if rows.dtype.itemsize < 4 and (self._widens or rows.device.type != "cpu"):
            # On a CPU, the backward pass takes three times as long in 16 bits. On other devices,
            # the products used here would not accumulate in float32.
            rows = rows.float()
        (rows,) = widened(rows)
        shapes = [(block.context if seen else block.queries).shape for block in self._blocks]
        parts = torch.split(rows, [shape.numel() for shape in shapes])
        return [
            part.view(*shape, *part.shape[1:]).transpose(1, 2)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def _mask_of(self, block: _Block, like: Tensor) -> Tensor | None:
        """Return the block's view of the mask that all blocks and layers share; None if the block
        needs no mask."""
        if not block.has_mask:
            return None
        if self._mask is None or self._mask.dtype != like.dtype:
            self._mask = kernels.mask(self._largest[0], self._largest[1], like)
        return kernels.part(self._mask, block.length, block.before)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    """Concatenate the rows of all blocks: [B, H, L, …] each -> [rows, H, …]."""
    return torch.cat([part.transpose(1, 2).flatten(0, 1) for part in parts])


def _varlen(segment_offsets: Tensor, segment_is_prompt: Tensor) -> tuple[Tensor, Any]:
    """Return the arguments of kernels for sequences of different lengths: the concatenated slots of
    all contexts (a segment and its prompt), and (starts of queries, starts of contexts, longest
    segment, longest context)."""
    device, starts = segment_offsets.device, segment_offsets[:-1]
    own, numbers = segment_offsets.diff(), torch.arange(len(starts), device=device)
    prompt = torch.where(segment_is_prompt, numbers, 0).cummax(0).values
    before = torch.where(segment_is_prompt | (own == 0), 0, own[prompt])
    ends = F.pad((before + own).cumsum(0), (1, 0))
    segment = numbers.repeat_interleave(before + own)
    within = torch.arange(len(segment), device=device) - ends[segment]
    context = within + torch.where(
        within < before[segment], starts[prompt[segment]], (starts - before)[segment]
    )
    bounds = (x.to(torch.int32) for x in (segment_offsets, ends))
    return context, (*bounds, *(int(x.max()) for x in (own, before + own)))


class FlashPackedAttention:
    """The attention of `PackedAttention` in one call of the varlen flash kernel, on a GPU in 16
    bits. The kernel aligns its causal mask to the ends of queries and keys, as a response after a
    prompt needs."""

    def __init__(self, segment_offsets: Tensor, segment_is_prompt: Tensor) -> None:
        """segment_offsets [segments + 1]: first slot of each segment, and the end of the last;
        segment_is_prompt [segments]."""
        context, self._arguments = _varlen(segment_offsets, segment_is_prompt)
        self._context = RowGather(context, int(segment_offsets[-1]))
        self._is_whole = bool(segment_is_prompt.all())

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if not self._is_whole:
            k, v = (self._context(x) for x in (k, v))
        flash = torch.ops.aten._flash_attention_forward
        out: Tensor = flash(q, k, v, *self._arguments, 0.0, True, False)[0]
        return out


class EfficientPackedAttention:
    """The attention of `PackedAttention` in one call of the varlen memory-efficient kernel, on a
    GPU, also in float32. The kernel does not support grouped heads, so keys and values are repeated
    for it; the repeated tensors are not saved."""

    def __init__(self, segment_offsets: Tensor, segment_is_prompt: Tensor) -> None:
        """segment_offsets [segments + 1]: first slot of each segment, and the end of the last;
        segment_is_prompt [segments]."""
        self._context, (queries, keys, *longest) = _varlen(segment_offsets, segment_is_prompt)
        has_rows = F.pad(segment_offsets.diff() > 0, (1, 0), value=True)
        self._bounds, self._longest = (queries[has_rows], keys[has_rows]), longest

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out: Tensor = _Attention.apply(q, k, v, self)  # type: ignore[no-untyped-call]
        return out

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Sequence[Tensor]]:
        rows, scale = self._rows(q, k, v), q.shape[-1] ** -0.5
        run = torch.ops.aten._efficient_attention_forward
        given = *rows, None, *self._bounds, *self._longest, 0.0, BOTTOM_RIGHT, True
        out, lse, *state = run(*given, scale=scale)[:4]
        out = out[0, ..., : q.shape[-1]].contiguous()
        # v is a view of a larger tensor, which would otherwise stay in memory.
        return out, (q, k, v.contiguous(), out, lse, *state)

    def backward(self, up: Tensor, kept: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, out, lse, *state = kept
        width = q.shape[-1]
        result, high = (_padded(x)[None] for x in (out, up))
        run = torch.ops.aten._efficient_attention_backward
        more = *self._bounds, *self._longest, lse, 0.0, *state, BOTTOM_RIGHT, False
        found = run(high, *self._rows(q, k, v), None, result, *more, scale=width**-0.5)[:3]
        to_q, *others = (x[0, ..., :width] for x in found)
        to_k, to_v = (
            torch.zeros_like(k).index_add_(
                0, self._context, x.reshape(len(x), k.shape[1], -1, width).sum(2)
            )
            for x in others
        )
        return to_q, to_k, to_v

    def _rows(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        """Prepare the kernel's inputs: q [1, N, Hq, D], k and v [1, rows of all contexts, Hq, D],
        with D padded."""
        repeats = q.shape[1] // k.shape[1]
        seen = (x.index_select(0, self._context).repeat_interleave(repeats, 1) for x in (k, v))
        return tuple(_padded(x)[None] for x in (q, *seen))


def _padded(x: Tensor) -> Tensor:
    """Pad the heads' width with zeros to a multiple of 16 bytes, which the kernel needs."""
    return F.pad(x, (0, -x.shape[-1] % (16 // x.dtype.itemsize))).contiguous()


def has_flash(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Return whether a device has the varlen flash kernel for heads of this width and dtype."""
    if device.type != "cuda" or dtype.itemsize != 2 or width % 8 or width > 256:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def packed(
    segment_offsets: Tensor, segment_is_prompt: Tensor, dtype: torch.dtype, width: int
) -> Attend:
    """Build the fastest attention function for a pack's segments on their device, given the dtype
    of queries and keys and the head width. For the segments see `PackedAttention`."""
    device = segment_offsets.device
    if has_flash(device, dtype, width):
        return FlashPackedAttention(segment_offsets, segment_is_prompt)
    if device.type == "cuda":
        is_recent = torch.cuda.get_device_capability(device) >= (8, 0)
        has_kernel = dtype in (torch.float32, torch.float16) or (is_recent and dtype.itemsize == 2)
        if has_kernel and len(segment_is_prompt) > FEW:
            return EfficientPackedAttention(segment_offsets, segment_is_prompt)
    return PackedAttention(segment_offsets, segment_is_prompt)


def causal(
    lengths: Sequence[int], device: torch.device | str = "cpu", *, widens: bool = True
) -> PackedAttention:
    """Build the causal attention function for concatenated sequences of these lengths, each of
    which attends only to itself. For ``widens`` see `PackedAttention`."""
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    return PackedAttention(offsets, torch.ones(len(lengths), dtype=torch.bool), widens=widens)


def alike(items: Iterable[Item], length: Callable[[Item], int]) -> list[list[Item]]:
    """Sort items from long to short and divide them into lists of items of similar length.

    ``length`` returns the length of an item. Padding the items of a list to its longest item adds
    at most a quarter of the longest to each. Items of length 0 are left out.
    """
    runs: list[list[Item]] = []
    for item in sorted(filter(length, items), key=length, reverse=True):
        if runs and 4 * length(item) >= 3 * length(runs[-1][0]):
            runs[-1].append(item)
        else:
            runs.append([item])
    return runs
