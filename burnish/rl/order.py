"""The best of k responses of a group, over all sets of k, by the order of their rewards."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def best_of_k(rewards: Tensor, k: int, eps: float) -> Tensor:
    """``advantages.pass_at_k`` in one group of n > k rewards.

    With rewards in rising order, C(j − 1, k − 1) sets of k have response j as their best; of the
    sets that hold i, C(i − 1, k − 1) have i as their best, and C(j − 2, k − 2) each j > i.
    """
    n, (ordered, order) = len(rewards), (rewards - rewards.min()).sort()
    if ordered[k - 1] == ordered[-1]:  # the best of any k is the same: exactly 0, without rounding
        return torch.zeros_like(rewards)
    alone = ordered.new_tensor([math.comb(j, k - 1) for j in range(n)])
    beside = ordered.new_tensor([math.comb(j - 1, k - 2) if j and k > 1 else 0 for j in range(n)])
    share = alone / math.comb(n, k)
    mean = (share * ordered).sum()
    std = (share * (ordered - mean) ** 2).sum().sqrt()
    later = (beside * ordered).flip(0).cumsum(0).flip(0) - beside * ordered
    drawn = (alone * ordered + later) / math.comb(n - 1, k - 1)
    return torch.empty_like(rewards).index_copy(0, order, (drawn - mean) / (std + eps))


def gain_of_k(rewards: Tensor, k: int) -> Tensor:
    """``advantages.max_at_k`` in one group of n ≥ k ≥ 2 rewards.

    With rewards in rising order, C(j − 1, k − 2) sets of k have i as their best and j < i as their
    second best; a response that is not the best of a set adds nothing to it.
    """
    n, (ordered, order) = len(rewards), rewards.sort()
    sets = ordered.new_tensor([math.comb(j, k - 2) for j in range(n)]) / math.comb(n, k)
    gain = ((ordered[:, None] - ordered) * sets).tril().sum(1)
    return torch.empty_like(rewards).index_copy(0, order, gain)
