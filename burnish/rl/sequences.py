"""Sums over sequences, and values of sequences assigned to tokens, for padded tensors [B, T] and
packed tensors [N] with sequence ids.

A sequence is all actions of a response or of an episode, in the order of slots. In a packed batch
its slots need not be adjacent.
"""

from __future__ import annotations

import torch
from torch import Tensor


def ids_like(mask: Tensor, sequence_ids: Tensor | None) -> Tensor:
    """The sequence id of each slot of ``mask``: ``sequence_ids`` in a packed layout; the number of
    the slot's row in a padded layout, where ``sequence_ids`` is None."""
    if sequence_ids is not None:
        return sequence_ids
    assert mask.dim() == 2, "packed tensors need sequence_ids"
    return torch.arange(mask.shape[0], device=mask.device)[:, None].expand_as(mask)


def count_sequences(mask: Tensor, sequence_ids: Tensor | None) -> int:
    """The number of sequences, including sequences without actions: the rows of a padded mask, or
    the largest sequence id plus 1."""
    if sequence_ids is None:
        return int(mask.shape[0])
    return int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0


def sum_by(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """For each id in [0, count), the sum of the values with this id: values and ids of equal shape
    -> [count]. The sum for an id that does not occur is 0."""
    zeros = torch.zeros(count, dtype=values.dtype, device=values.device)
    return zeros.index_add(0, ids.reshape(-1), values.reshape(-1))


def finite_gradient(x: Tensor, *others: Tensor) -> Tensor:
    """x with the same values, but detached from the gradient in slots where x or one of the others
    is not finite.

    This keeps NaN out of gradients: a slot outside the mask may have any value, and although
    ``reduce.weighted_sum`` leaves its loss out, its gradient would be 0 × NaN = NaN. A NaN inside
    the mask still appears in the loss. The gradient of x is computed from x and ``others``.
    """
    finite = x.isfinite()
    for other in others:
        finite = finite & other.isfinite()
    return torch.where(finite, x, x.detach())


def sequence_sum(x: Tensor, mask: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """The sum of x over the actions of each sequence, [S]; other slots may be inf or NaN."""
    ids = ids_like(mask, sequence_ids)
    kept = torch.where(mask.bool(), x, torch.zeros_like(x))
    return sum_by(kept, ids, count_sequences(mask, sequence_ids))


def sequence_lengths(mask: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """The number of actions of each sequence, [S] int64."""
    ids = ids_like(mask, sequence_ids)
    return sum_by(mask.bool().long(), ids, count_sequences(mask, sequence_ids))


def to_tokens(per_sequence: Tensor, mask: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """The value of each sequence, [S], assigned to all its actions: a new tensor with the shape of
    the mask, 0 outside it."""
    ids = ids_like(mask, sequence_ids)
    spread = per_sequence.index_select(0, ids.reshape(-1)).view(mask.shape)
    return torch.where(mask.bool(), spread, torch.zeros_like(spread))


def on_last_action(values: Tensor, mask: Tensor, sequence_ids: Tensor | None = None) -> Tensor:
    """The value of each sequence, [S], assigned to its last action: a new tensor with the shape of
    the mask, 0 in all other slots. The value of a sequence without actions is left out."""
    rows = Rows(mask, sequence_ids)
    placed = values.new_zeros(rows.count, rows.width)
    acted = rows.lengths > 0
    placed[acted, rows.lengths[acted] - 1] = values[: rows.count][acted]
    return rows.unpack(placed)


class Rows:
    """Converts tensors with the shape of a mask to left-aligned rows of actions and back.

    There is one row per sequence: [S, L], where L is the largest number of actions. Recursions over
    time run on these rows, so only this class handles padding, gaps and packing. ``count`` is S,
    ``width`` is L, and ``lengths`` [S] are the numbers of actions.
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
        """Copy the actions of x, which has the shape of the mask, to rows [S, L]; 0 after the end
        of a row."""
        rows = x.new_zeros(self.count, self.width)
        return rows.index_put((self.row, self.column), x.reshape(-1)[self.slots])

    def unpack(self, rows: Tensor) -> Tensor:
        """Copy rows [S, L] back to a tensor with the shape of the mask; 0 outside it."""
        flat = rows.new_zeros(self.mask.numel())
        return flat.index_put((self.slots,), rows[self.row, self.column]).view(self.mask.shape)
