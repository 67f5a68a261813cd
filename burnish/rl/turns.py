"""Sums over the turns of episodes, and values of turns assigned to tokens, for padded tensors
[B, T] and packed tensors [N] with sequence ids.

A turn is a run of an episode's actions that ends with a marked token. In the results, [S, K], the
column k is turn k of each episode, and K is the largest number of turns.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.rl.sequences import Rows, sum_by


class Turns:
    """The turns of episodes. ``reached`` [S, K] tells which turns each episode has."""

    def __init__(self, ends: Tensor, mask: Tensor, sequence_ids: Tensor | None = None) -> None:
        """``ends``: the last token of each turn; shape of the mask. Outside the mask they mark the
        turns of episodes that are not in the loss.

        Raises a ValueError if an action follows the last turn of its episode.
        """
        self._mask = mask.bool()
        self._rows = rows = Rows(self._mask | ends.bool(), sequence_ids)
        is_end = rows.pack(ends.bool())
        counts = is_end.sum(1)
        column = torch.arange(rows.width, device=mask.device)
        if (
            not is_end[rows.lengths > 0]
            .gather(1, (rows.lengths[rows.lengths > 0] - 1)[:, None])
            .all()
        ):
            raise ValueError("turns must end at the last action of each episode")
        self._width = int(counts.max()) if rows.count else 0
        self.reached = torch.arange(self._width, device=mask.device) < counts[:, None]
        before = is_end.cumsum(1) - is_end.long()
        self._turn = before.clamp(max=max(self._width - 1, 0))
        self._place = (
            self._turn + self._width * torch.arange(rows.count, device=mask.device)[:, None]
        )
        inside = column < rows.lengths[:, None]
        first = torch.cat([is_end.new_ones(rows.count, 1), is_end[:, :-1]], 1)[:, : rows.width]
        self._starts = inside & first

    def sums(self, x: Tensor) -> Tensor:
        """The sum of x over each turn, [S, K]. x has the shape of the mask."""
        return self._by_turn(self._rows.pack(x))

    def firsts(self, x: Tensor) -> Tensor:
        """The value of x at each turn's first action, [S, K]. x has the shape of the mask."""
        own = self._rows.pack(x)
        return self._by_turn(torch.where(self._starts, own, torch.zeros_like(own)))

    def to_tokens(self, per_turn: Tensor) -> Tensor:
        """The value of each turn, [S, K], assigned to all its actions: a new tensor with the shape
        of the mask, 0 outside it."""
        spread = self._rows.unpack(per_turn.gather(1, self._turn))
        return torch.where(self._mask, spread, torch.zeros_like(spread))

    def _by_turn(self, rows: Tensor) -> Tensor:
        count = self._rows.count
        return sum_by(rows, self._place, count * self._width).view(count, self._width)
