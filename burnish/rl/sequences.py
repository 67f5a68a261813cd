"""Sums over sequences and groups, for padded [B, T] and packed [N] + ids alike; masked slots."""

from __future__ import annotations

import torch
from torch import Tensor


def ids_like(mask: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """The sequence each slot of ``mask`` belongs to: its row if padded, else the given ids."""
    if sequence_ids is not None:
        return sequence_ids
    assert mask.dim() == 2, "packed tensors need sequence_ids"
    return torch.arange(mask.shape[0], device=mask.device)[:, None].expand_as(mask)


def count_sequences(mask: Tensor, sequence_ids: Tensor | None) -> int:
    """S, which counts sequences without any action too."""
    if sequence_ids is None:
        return int(mask.shape[0])
    return int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0


def sum_by(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """[count]: the values added up by id."""
    zeros = torch.zeros(count, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, ids.reshape(-1), values.reshape(-1))


def finite_gradient(x: Tensor, *others: Tensor) -> Tensor:
    """x, as a constant in the slots where it or one of the others is not finite.

    A slot outside the mask may hold anything. ``reduce.weighted_sum`` leaves its loss out, but the
    gradient is a product, and 0 × NaN is NaN. Inside the mask a NaN still shows in the loss.
    """
    finite = x.isfinite()
    for other in others:
        finite = finite & other.isfinite()
    return torch.where(finite, x, x.detach())


def sequence_sum(x: Tensor, mask: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """[S]: x added up over each sequence's actions. An inf or nan outside the mask does no harm."""
    ids = ids_like(mask, sequence_ids)
    kept = torch.where(mask.bool(), x, torch.zeros_like(x))
    return sum_by(kept, ids, count_sequences(mask, sequence_ids))


def sequence_lengths(mask: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """[S] int64: each sequence's number of actions."""
    ids = ids_like(mask, sequence_ids)
    return sum_by(mask.bool().long(), ids, count_sequences(mask, sequence_ids))


def to_tokens(per_sequence: Tensor, mask: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """One value per sequence [S], written on each of its actions; 0 elsewhere. Shaped like mask."""
    ids = ids_like(mask, sequence_ids)
    spread = per_sequence.index_select(0, ids.reshape(-1)).view(mask.shape)
    return torch.where(mask.bool(), spread, torch.zeros_like(spread))


def on_last_action(values: Tensor, mask: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """One value per sequence [S], written on its last action; 0 elsewhere. Shaped like mask."""
    rows = Rows(mask, sequence_ids)
    placed = values.new_zeros(rows.count, rows.width)
    acted = rows.lengths > 0
    placed[acted, rows.lengths[acted] - 1] = values[: rows.count][acted]
    return rows.unpack(placed)


class Rows:
    """The actions alone, one row per sequence and left-aligned: [S, L] with L the longest.

    Recursions over time run on rows, so that padding, holes and packing are dealt with once, here.
    """

    def __init__(self, mask: Tensor, sequence_ids: Tensor | None = None) -> None:
        self.mask = mask.bool()
        self.count = count_sequences(mask, sequence_ids)
        slots = self.mask.reshape(-1).nonzero().squeeze(1)
        ids = ids_like(mask, sequence_ids).reshape(-1)[slots]
        order = torch.argsort(ids, stable=True)
        self.slots, self.row = slots[order], ids[order]
        self.lengths = sequence_lengths(mask, sequence_ids)
        start = self.lengths.cumsum(0) - self.lengths
        self.column = torch.arange(len(self.row), device=mask.device) - start[self.row]
        self.width = int(self.lengths.max()) if self.count else 0

    def pack(self, x: Tensor) -> Tensor:
        """x shaped like the mask → [S, L], 0 past a row's end."""
        rows = x.new_zeros(self.count, self.width)
        return rows.index_put((self.row, self.column), x.reshape(-1)[self.slots])

    def unpack(self, rows: Tensor) -> Tensor:
        """[S, L] → shaped like the mask, 0 outside it."""
        flat = rows.new_zeros(self.mask.numel())
        return flat.index_put((self.slots,), rows[self.row, self.column]).view(self.mask.shape)
