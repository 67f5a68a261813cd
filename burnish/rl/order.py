"""Order statistics: the best of k responses of a group, over all sets of k responses."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def best_of_k(rewards: Tensor, k: int, eps: float) -> Tensor:
    """The advantages of ``advantages.pass_at_k`` for one group of n > k rewards: [n] -> [n].

    Each is the expected best reward of k drawn responses if this response is drawn, minus the
    expected best reward, divided by its std + ε. With rewards in ascending order, response j is the
    best in C(j − 1, k − 1) sets of k. Of the sets that contain i, C(i − 1, k − 1) have i as their
    best, and C(j − 2, k − 2) have j, for each j > i.
    """
    n, (ordered, order) = len(rewards), (rewards - rewards.min()).sort()
    if ordered[k - 1] == ordered[-1]:  # all sets of k have the same best reward: exactly 0
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
    """The advantages of ``advantages.max_at_k`` for one group of n ≥ k ≥ 2 rewards, without its
    division by the std: [n] -> [n].

    Each is the decrease of the best reward of a set of k if this response is removed, averaged over
    all sets of k, where sets without this response count as 0. With rewards in ascending order,
    C(j − 1, k − 2) sets of k have i as their best and j < i as their second best response. Removing
    a response that is not the best does not change the maximum of a set.
    """
    n, (ordered, order) = len(rewards), rewards.sort()
    sets = ordered.new_tensor([math.comb(j, k - 2) for j in range(n)]) / math.comb(n, k)
    gain = ((ordered[:, None] - ordered) * sets).tril().sum(1)
    return torch.empty_like(rewards).index_copy(0, order, gain)
