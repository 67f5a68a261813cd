"""Decides which groups a free-running loop may begin, and which it learns from next.

Groups form a queue in the order in which they began. A group is open until it is learned from or
withdrawn. The learner takes B groups at a time: the first graded ones in a window of W places,
which begins at the first open group. A group that is learned from keeps its place. A group that is
withdrawn (because it is too old, or dead) leaves the queue, and the groups behind it move up.
docs/architecture.md proves that no group that `may_begin` allows is learned from more than
``max_lag`` versions later, and that the loop can't deadlock.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate


@dataclass
class Pace:
    """The queue of groups of a free-running loop, which enforces the bound on the lag."""

    batch: int
    """B: number of groups of a rollout."""
    window: int
    """W: number of places in the window, at least B."""
    gradient_steps: int
    """k: number of gradient steps of a rollout, and the most by which it raises the version."""
    max_lag: int
    """Largest allowed lag of a token, in versions."""
    line: list[int] = field(default_factory=list)
    """The queue: numbers of the groups from the first open one on, open or learned from."""
    loaded: dict[int, int] = field(default_factory=dict)
    """For each open group, by number, the oldest version that one of its tokens can have."""

    def may_begin(self, loaded: int, next_version: int) -> bool:
        """Return whether a generator with version ``loaded`` may begin another group: neither the
        new group nor an open one may then exceed ``max_lag`` when it is learned from.

        ``next_version`` is the highest version that the learner can have before its next rollout.
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
        """Append a new open group to the queue; a generator with version ``loaded`` begins it. Call
        `may_begin` first, which is not repeated here."""
        self.line.append(number)
        self.loaded[number] = loaded

    def know(self, number: int, oldest: int) -> None:
        """Record that no token of the open group ``number`` is older than version ``oldest``. An
        earlier, higher bound remains."""
        self.loaded[number] = max(oldest, self.loaded[number])

    def learn(self, numbers: Iterable[int]) -> None:
        """Mark groups as learned from. They keep their places in the queue while an open group is
        before them."""
        for number in numbers:
            del self.loaded[number]
        self._move_up()

    def withdraw(self, number: int) -> None:
        """Remove an open group that will not be learned from; the groups behind it move up."""
        del self.loaded[number]
        self.line.remove(number)
        self._move_up()

    def ready(self, graded: Container[int]) -> list[int]:
        """Return the numbers of the groups of the next rollout: the first B groups in the window
        that are ``graded``. Return an empty list if the learner has to wait. Nothing is changed;
        call `learn` when the learner takes the groups.

        The learner has to wait if fewer than B groups in the window are graded, or if, in the
        window of the group that is the first open one afterwards, more than W − B places would be
        learned from.
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
    """For each place of a queue, return the largest number of rollouts that the learner can learn
    from before the rollout that contains the group at this place. ``is_open`` says which places
    have open groups; results of other places have no meaning.

    These rollouts may take all open groups before it. Of the W − 1 places behind it, at least B − 1
    remain for its own rollout.
    """
    opened = [0, *accumulate(map(int, is_open))]  # number of open groups before each place
    found = []
    for place in range(len(is_open)):
        end = min(place + window, len(is_open))
        behind = opened[end] - opened[place + 1]
        taken = end - place - 1 - behind
        found.append((opened[place] + max(0, min(behind, window - batch - taken))) // batch)
    return found
