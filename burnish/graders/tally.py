"""Counts grades while they are made: displays failures as they happen, and stops the grading as
soon as it is certain that too many grades are errors."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from reprlib import Repr
from typing import Any

from burnish.console.progress import tell_grading
from burnish.errors import GraderError
from burnish.graders.rewards import Outcome
from burnish.types import Grade, Status

QUOTED = 3
"""Maximum number of grader messages that an error quotes."""
REPORT_SECONDS = 0.5
"""Minimum interval between two progress reports, unless a grade has failed."""
_SHORT = Repr()
_SHORT.maxstring = 80


Items = Sequence[tuple[str, Mapping[str, Any]]]
"""Responses, each with the data row of its prompt."""


@dataclass
class _Limit:
    """How many of the grades that the code inside ``limiting_errors`` makes may be errors."""

    share: float
    responses: int
    errors: int = 0


_limit: ContextVar[_Limit | None] = ContextVar("_limit", default=None)


@contextmanager
def limiting_errors(share: float, responses: int) -> Iterator[None]:
    """Limit the errors among the ``responses`` responses that are graded in the block.

    Raise a GraderError inside the block as soon as more than ``share`` × ``responses`` of them have
    errors. ``share`` is between 0 and 1.
    """
    token = _limit.set(_Limit(share, responses))
    try:
        yield
    finally:
        _limit.reset(token)


def as_grade(outcome: Outcome) -> Grade:
    """Convert the outcome that a worker sends to a grade."""
    status, message, correct = Status(outcome.status), outcome.message, outcome.correct
    return Grade(outcome.reward, outcome.parts, status, message, correct=correct)


class Tally:
    """Counts the grades of one rollout or of a part of it. The limit of the `limiting_errors` block
    in which it is created applies; outside of such a block, there is none."""

    def __init__(self, items: Items, rewards: int = 1) -> None:
        """``items`` are responses and their rows; ``rewards`` is the number of grades that each
        item gets."""
        self._items, self._total = items, len(items) * rewards
        self._done = self._late = 0
        self._failed: dict[int, str] = {}
        """Messages of the errors, by the index of the item."""
        self._limit, self._reported = _limit.get(), time.monotonic()

    def add(self, index: int, status: str, message: str | None) -> None:
        """Count one grade of the item at ``index``, and display the progress.

        ``status`` is the value of a `Status`; ``message`` describes an error. Raise a GraderError
        if too many items have errors. An item with several failed grades counts as one.
        """
        is_late = status == "timeout"
        self._done += 1
        self._late += is_late
        is_new = status == "error" and index not in self._failed
        if is_new:
            self._failed[index] = message or "no message"
        now = time.monotonic()
        if is_new or is_late or now - self._reported >= REPORT_SECONDS:
            self._reported = now
            tell_grading(self._done, self._total, late=self._late, failed=len(self._failed))
        if is_new and (limit := self._limit) is not None:
            limit.errors += 1
            if limit.errors > limit.share * limit.responses:
                failures = ((f"response {i}", *self._items[i], m) for i, m in self._failed.items())
                raise GraderError(
                    f"{limit.errors} of {limit.responses} responses have no grade so far, more "
                    f"than a share of {limit.share:g}; {name_failures(failures)}"
                )


def name_failures(failures: Iterable[tuple[str, str, Any, str]]) -> str:
    """Return the end of an error about missing grades: the remedy, and up to `QUOTED` different
    messages, each with the first response that has it, and the response's data row.

    ``failures`` are tuples of the response's name, its text, its row and the message.
    """
    first: dict[str, str] = {}
    for name, text, row, said in failures:
        first.setdefault(said, f"{name} ({_SHORT.repr(text)}, row {_SHORT.repr(row)}): {said}")
    return (
        "mend what the messages name, or raise rollout.max_errors. "
        f"{'; '.join(list(first.values())[:QUOTED])}{'; …' if len(first) > QUOTED else ''}"
    )
