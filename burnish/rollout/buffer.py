"""A replay buffer: graded groups that wait to be learned from, some of them more than once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from burnish.draws import Stream, uniforms
from burnish.types import Group


@dataclass
class Kept:
    group: Group
    uses: int = 0
    """Steps that have learned from it."""


class Buffer:
    """Keeps the newest groups; the oldest leave first, and so do those that are used up."""

    def __init__(
        self,
        capacity: int,
        order: Literal["recent", "uniform", "weighted"] = "uniform",
        *,
        max_age: int | None = None,
        max_uses: int = 1,
        seed: int = 0,
    ) -> None:
        """``max_age``: versions that a group's oldest token may be behind; None if no bound."""
        self.capacity, self.order = capacity, order
        self.max_age, self.max_uses, self.seed = max_age, max_uses, seed
        self.kept: list[Kept] = []
        """By the number of the group."""

    def restore(self, groups: Sequence[Group], uses: Sequence[int]) -> None:
        self.kept = [Kept(group, used) for group, used in zip(groups, uses, strict=True)]

    def put(self, groups: Sequence[Group]) -> list[Kept]:
        """Adds groups, and returns the oldest ones, which had to leave."""
        self.kept = sorted([*self.kept, *map(Kept, groups)], key=lambda kept: kept.group.index)
        gone, self.kept = self.kept[: -self.capacity], self.kept[-self.capacity :]
        return gone

    def age(self, version: int) -> list[Kept]:
        """Removes the groups that are too old for a learner at ``version``, and returns them."""
        if self.max_age is None:
            return []
        limit = version - self.max_age
        old = [kept for kept in self.kept if kept.group.oldest_version < limit]
        self.kept = [kept for kept in self.kept if kept not in old]
        return old

    def take(self, count: int, step: int, version: int) -> list[Group]:
        """``count`` groups for a step, or all if there are fewer, by their numbers.

        A step draws each group at most once. Its draws depend on the run's seed, the step and the
        groups' numbers alone.
        """
        chosen = sorted(self.kept, key=lambda kept: -self._rank(kept.group, step, version))[:count]
        for kept in chosen:
            kept.uses += 1
        self.kept = [kept for kept in self.kept if kept.uses < self.max_uses]
        return sorted((kept.group for kept in chosen), key=lambda group: group.index)

    def _rank(self, group: Group, step: int, version: int) -> float:
        """Groups of the highest ranks are drawn.

        The largest u^(1/w) of uniform u are a draw without replacement by weights w (Efraimidis and
        Spirakis 2006).
        """
        if self.order == "recent":
            return float(group.index)
        drawn = float(uniforms(self.seed, Stream.BUFFER, group.index, step, 0))
        weight = 1.0 if self.order == "uniform" else 1.0 / (1 + version - group.oldest_version)
        return float(np.log(max(drawn, 1e-300)) / weight)
