"""How tokens attend. The model is given an `Attend`; the learner's is `PackedAttention`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Attend(Protocol):
    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q [N, Hq, D], k and v [N, Hkv, D], normed and rotated -> [N, Hq, D]."""
        ...


@dataclass(frozen=True)
class _Block:
    """Segments of about one length that are attended in one call, all after the same prompt."""

    slots: Tensor
    """[B, L]; a shorter segment repeats its last slot, and those rows are dropped afterwards."""
    prompt: slice | None
    mask: Tensor | None
    """[L, P + L] bool, the causal mask after a prompt; None without one."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = scaled_dot_product_attention(
            q[self.slots].transpose(1, 2),
            self._context(k),
            self._context(v),
            attn_mask=self.mask,
            is_causal=self.mask is None,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2).flatten(0, 1)  # [B * L, Hq, D]

    def _context(self, x: Tensor) -> Tensor:
        """[N, H, D] -> [B, H, P + L, D]"""
        own = x[self.slots].transpose(1, 2)
        if self.prompt is None:
            return own
        prompt = x[self.prompt].transpose(0, 1)
        return torch.cat((prompt.expand(own.shape[0], -1, -1, -1), own), dim=2)


class PackedAttention:
    """Causal attention over a pack: prompt, response 1, response 2, …, prompt, response 1, …

    A response's tokens see the prompt before them and their own past. A prompt is attended once
    however many responses follow, and nothing is padded beyond the lengths within a block.
    """

    def __init__(self, segment_offsets: Tensor, segment_is_prompt: Tensor) -> None:
        """segment_offsets [segments + 1], segment_is_prompt [segments], as in `PackedBatch`."""
        offsets: list[int] = segment_offsets.tolist()
        device = segment_offsets.device
        prompts: list[slice] = []
        responses: list[list[slice]] = []
        for start, end, is_prompt in zip(
            offsets, offsets[1:], segment_is_prompt.tolist(), strict=False
        ):
            if is_prompt:
                prompts.append(slice(start, end))
                responses.append([])
            else:
                assert prompts, "a pack starts with a prompt"
                responses[-1].append(slice(start, end))
        self._blocks = [_block(run, None, device) for run in _runs(prompts)]
        for prompt, own in zip(prompts, responses, strict=True):
            self._blocks += [_block(run, prompt, device) for run in _runs(own)]
        self._rows = _rows([block.slots for block in self._blocks], offsets[-1], device)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.cat([block(q, k, v) for block in self._blocks])[self._rows]


def causal(lengths: Sequence[int], device: torch.device | str = "cpu") -> PackedAttention:
    """Plain sequences one after another, each seeing its own past."""
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    return PackedAttention(offsets, torch.ones(len(lengths), dtype=torch.bool))


def _runs(segments: list[slice]) -> list[list[slice]]:
    """Segments sorted by length and cut where padding to the longest would waste over a quarter."""
    runs: list[list[slice]] = []
    for segment in sorted(segments, key=lambda s: s.start - s.stop):
        length = segment.stop - segment.start
        if runs and 4 * length >= 3 * (runs[-1][0].stop - runs[-1][0].start):
            runs[-1].append(segment)
        elif length:
            runs.append([segment])
    return runs


def _block(run: list[slice], prompt: slice | None, device: torch.device) -> _Block:
    longest = run[0].stop - run[0].start
    starts = torch.tensor([[s.start] for s in run], device=device)
    last = torch.tensor([[s.stop - 1] for s in run], device=device)
    slots = torch.minimum(starts + torch.arange(longest, device=device), last)
    before = prompt.stop - prompt.start if prompt else 0
    if not before:
        return _Block(slots, None, None)
    mask = torch.ones(longest, before + longest, dtype=torch.bool, device=device).tril(before)
    return _Block(slots, prompt, mask)


def _rows(blocks: list[Tensor], total: int, device: torch.device) -> Tensor:
    """[N]: where each slot's row lies among the rows of all blocks, padding left out."""
    flat = torch.cat([slots.flatten() for slots in blocks])
    rows = torch.empty(total, dtype=torch.long, device=device)
    # A padded slot repeats at the end of its segment; the first of equal slots is the real one.
    fresh = torch.cat([torch.diff(s, prepend=s[:, :1] - 1).flatten() > 0 for s in blocks])
    rows[flat[fresh]] = torch.arange(flat.numel(), device=device)[fresh]
    return rows
