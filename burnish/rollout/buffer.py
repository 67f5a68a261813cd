"""A replay buffer: it keeps graded groups, and each step learns from some of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from burnish.randomness import Stream, uniforms
from burnish.types import Group


@dataclass
class Kept:
    """A group in the buffer."""

    group: Group
    uses: int = 0
    """Number of steps that have learned from the group."""


class Buffer:
    """Keeps at most ``capacity`` groups. If it is full, the groups with the lowest numbers are
    removed. A group is also removed after ``max_uses`` uses, and when it is too old."""

    def __init__(
        self,
        capacity: int,
        order: Literal["recent", "uniform", "weighted"] = "uniform",
        *,
        max_age: int | None = None,
        max_uses: int = 1,
        seed: int = 0,
    ) -> None:
        """``order``: which groups a step takes: "recent" (the highest numbers), or a random choice,
        "uniform" or "weighted" by 1 / (1 + age). The age of a group is the learner's version minus
        the version of the group's oldest token. ``max_age``: largest age, which only `age`
        enforces; None if there is no limit."""
        self.capacity, self.order = capacity, order
        self.max_age, self.max_uses, self.seed = max_age, max_uses, seed
        self.kept: list[Kept] = []
        """The groups in the buffer, sorted by number."""

    def restore(self, groups: Sequence[Group], uses: Sequence[int]) -> None:
        """Replace the content of the buffer by a checkpoint's groups, sorted by number, and the
        number of steps that have learned from each."""
        self.kept = [Kept(group, used) for group, used in zip(groups, uses, strict=True)]

    def put(self, groups: Sequence[Group]) -> list[Kept]:
        """Add groups to the buffer. If it then holds more groups than its capacity, remove the
        groups with the lowest numbers, new ones included, and return them."""
        self.kept = sorted([*self.kept, *map(Kept, groups)], key=lambda kept: kept.group.index)
        gone, self.kept = self.kept[: -self.capacity], self.kept[-self.capacity :]
        return gone

    def age(self, version: int) -> list[Kept]:
        """Remove and return the groups that are too old for a learner at ``version``."""
        if self.max_age is None:
            return []
        limit = version - self.max_age
        old = [kept for kept in self.kept if kept.group.oldest_version < limit]
        self.kept = [kept for kept in self.kept if kept not in old]
        return old

    def take(self, count: int, step: int, version: int) -> list[Group]:
        """Choose ``count`` groups for a step, or all if there are fewer; return them sorted by
        number. Their uses are counted, and groups that are used up leave the buffer.

        A step takes each group at most once. Its random draws depend only on the run's seed, the
        step and the groups' numbers.
        """
        chosen = sorted(self.kept, key=lambda kept: -self._rank(kept.group, step, version))[:count]
        for kept in chosen:
            kept.uses += 1
        self.kept = [kept for kept in self.kept if kept.uses < self.max_uses]
        return sorted((kept.group for kept in chosen), key=lambda group: group.index)

    def _rank(self, group: Group, step: int, version: int) -> float:
        """Return the sort key of a group: `take` chooses the groups with the highest keys.

        For a random order it is log(u) / w with u uniform in [0, 1) and w the group's weight: the
        groups with the largest u^(1/w) are a sample without replacement with weights w (Efraimidis
        and Spirakis 2006).
        """
        if self.order == "recent":
            return float(group.index)
        drawn = float(uniforms(self.seed, Stream.BUFFER, group.index, step, 0))
        weight = 1.0 if self.order == "uniform" else 1.0 / (1 + version - group.oldest_version)
        return float(np.log(max(drawn, 1e-300)) / weight)
