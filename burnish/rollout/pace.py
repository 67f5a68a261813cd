"""Which groups a free-running loop may issue, and which it learns from next.

Groups are numbered. The learner takes B groups at a time, the lowest that are graded inside a
window of W numbers, which begins at the lowest open group. docs/architecture.md proves that no
group which `may_issue` allows is learned from more than ``max_lag`` versions later, and that the
loop never waits for itself.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Container, Iterable
from dataclasses import dataclass, field


@dataclass
class Pace:
    batch: int
    """B: groups of a rollout."""
    window: int
    """W, at least B."""
    gradient_steps: int
    """k: versions that a rollout adds at most."""
    max_lag: int
    open: list[int] = field(default_factory=list)
    """Numbers of groups that are neither learned from nor dropped, in order."""
    loaded: dict[int, int] = field(default_factory=dict)
    """The version of the generator that began each open group, when it began."""
    next: int = 0
    """The number of the next new group."""

    def may_issue(self, number: int, loaded: int, next_version: int) -> bool:
        """Whether a generator with version ``loaded`` may begin group ``number``.

        ``next_version`` is the highest version that the learner can have before its next rollout.
        It may not put this group, or one that is open already, beyond the bound.
        """
        after = Pace(self.batch, self.window, self.gradient_steps, self.max_lag, [*self.open])
        after.loaded, after.next = dict(self.loaded), self.next
        after.begin(number, loaded)
        return all(
            next_version + after.rollouts_before(group) * self.gradient_steps - version
            <= self.max_lag
            for group, version in after.loaded.items()
        )

    def rollouts_before(self, number: int) -> int:
        """How many rollouts of the groups that are open now may come before an open group's.

        They may take all groups below it. Of the W − 1 numbers above it, B − 1 are left for its own
        rollout at least.
        """
        place = bisect_left(self.open, number)
        above = bisect_left(self.open, number + self.window) - place - 1
        taken = min(number + self.window, self.next) - number - 1 - above
        left = self.window - self.batch - taken
        return (place + max(0, min(above, left))) // self.batch

    def reopen(self, numbers: Iterable[int], next_number: int) -> None:
        """Goes on with groups that were open when a run stopped; they have to begin again."""
        self.open, self.loaded, self.next = sorted(numbers), {}, next_number

    def begin(self, number: int, loaded: int) -> None:
        if number not in self.open:
            insort(self.open, number)
        self.loaded[number] = loaded
        self.next = max(self.next, number + 1)

    def close(self, number: int) -> None:
        """The group was learned from or dropped."""
        self.open.remove(number)
        self.loaded.pop(number, None)

    def ready(self, graded: Container[int]) -> list[int]:
        """The groups of the next rollout; empty if it is not complete.

        It waits if it would leave fewer than B numbers of the next window to the lowest group that
        stays open.
        """
        if not self.open:
            return []
        inside = self.open[: bisect_left(self.open, self.open[0] + self.window)]
        found = [number for number in inside if number in graded][: self.batch]
        left = [number for number in self.open if number not in found]
        if len(found) < self.batch or (left and self._taken(left) > self.window - self.batch):
            return []
        return found

    def _taken(self, left: list[int]) -> int:
        """Numbers of the window that begins at the lowest of the open groups, and are not open."""
        end = min(left[0] + self.window, self.next)
        return end - left[0] - bisect_left(left, end)
