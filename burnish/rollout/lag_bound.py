"""Which groups a free-running loop may begin, and which it learns from next.

Groups stand in a line in the order in which they began. The learner takes B groups at a time, the
first that are graded inside a window of W places, which begins at the first open group. A group
that is withdrawn (it was too old, or dead) leaves the line, and those behind it move up.
docs/architecture.md proves that no group which `may_begin` allows is learned from more than
``max_lag`` versions later, and that the loop never waits for itself.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass
class Pace:
    batch: int
    """B: groups of a rollout."""
    window: int
    """W, at least B."""
    gradient_steps: int
    """k: versions that a rollout adds at most."""
    max_lag: int
    line: list[int] = field(default_factory=list)
    """Numbers of groups that are open or were learned from, from the first open one on."""
    loaded: dict[int, int] = field(default_factory=dict)
    """The oldest version that a token of each open group can have."""

    def may_begin(self, loaded: int, next_version: int) -> bool:
        """Whether a generator with version ``loaded`` may begin another group.

        ``next_version`` is the highest version that the learner can have before its next rollout.
        It may not put the new group, or one that is open already, beyond the bound.
        """
        versions = [self.loaded.get(number) for number in self.line] + [loaded]
        before = rollouts_before(
            [version is not None for version in versions], self.batch, self.window
        )
        return all(
            next_version + count * self.gradient_steps - version <= self.max_lag
            for version, count in zip(versions, before, strict=True)
            if version is not None
        )

    def begin(self, number: int, loaded: int) -> None:
        """A generator with version ``loaded`` begins a group, at the end of the line."""
        self.line.append(number)
        self.loaded[number] = loaded

    def know(self, number: int, oldest: int) -> None:
        """An open group has no token before version ``oldest``."""
        self.loaded[number] = max(oldest, self.loaded[number])

    def learn(self, numbers: Iterable[int]) -> None:
        """The groups were learned from, and keep their places."""
        for number in numbers:
            del self.loaded[number]
        self._move_up()

    def withdraw(self, number: int) -> None:
        """Nobody will learn from the group: it leaves the line."""
        del self.loaded[number]
        self.line.remove(number)
        self._move_up()

    def ready(self, graded: Container[int]) -> list[int]:
        """The groups of the next rollout; empty if it is not complete.

        It waits if it would leave fewer than B places of the next window to the first group that
        stays open.
        """
        inside = [number for number in self.line[: self.window] if number in self.loaded]
        found = [number for number in inside if number in graded][: self.batch]
        if len(found) < self.batch:
            return []
        is_open = [number in self.loaded and number not in found for number in self.line]
        if True in is_open:
            first = is_open.index(True)
            if is_open[first : first + self.window].count(False) > self.window - self.batch:
                return []
        return found

    def _move_up(self) -> None:
        taken = next(
            (place for place, number in enumerate(self.line) if number in self.loaded),
            len(self.line),
        )
        del self.line[:taken]


def rollouts_before(is_open: Sequence[bool], batch: int, window: int) -> list[int]:
    """For each place of a line, how many rollouts of the open groups in the line may come before
    that of an open group there.

    They may take all open groups before it. Of the W − 1 places behind it, B − 1 are left for its
    own rollout at least.
    """
    opened = [0, *accumulate(map(int, is_open))]  # in the places before
    found = []
    for place in range(len(is_open)):
        end = min(place + window, len(is_open))
        behind = opened[end] - opened[place + 1]
        taken = end - place - 1 - behind
        found.append((opened[place] + max(0, min(behind, window - batch - taken))) // batch)
    return found
