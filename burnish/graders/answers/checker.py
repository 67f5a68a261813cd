"""Verdicts on many answers at once, with workers for the algebra."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import reprlib
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

from burnish.errors import MissingExtra
from burnish.graders.answers.comparison import Verdict, decide, readable
from burnish.graders.grader import Grader, InProcess
from burnish.graders.pool import INSIDE, GraderPool, Limits
from burnish.graders.rewards import Source
from burnish.types import Grade, Status

NUMBERS: tuple[type[Any], ...] = (Real, Decimal)
SYMBOLIC = Source(
    f"{Path(__file__).with_name('symbolic.py')}:reward",
    "burnish.graders.answers.symbolic",
    compares_answers=True,
)


def compare(answer: str, gold: Any) -> Verdict:
    """The verdict on an answer; UNDECIDED if it took too long.

    gold is text, a number, or several of them, each of which is right.
    """
    (grade,) = shared().check([(answer, gold)])
    if grade.status is Status.SCORED:
        return Verdict.EQUAL if grade.reward else Verdict.DIFFERENT
    verdicts = {Status.UNPARSED: Verdict.UNREADABLE, Status.ERROR: Verdict.BAD_GOLD}
    return verdicts.get(grade.status, Verdict.UNDECIDED)


@cache
def shared() -> AnswerChecker:
    """One for the process; its single worker starts with the first algebra and ends with it."""
    return AnswerChecker(Limits(workers=1))


class AnswerChecker:
    """Compares answers with gold answers in stages, from any thread; close it when done."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.counts: Counter[str] = Counter()
        """Grades by status, and how many of them were ``symbolic``: compared by workers."""
        self.pool: GraderPool | None = None
        """None before the first algebra."""
        self._owner = os.getpid()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return AnswerChecker, (self.limits,)

    def check(self, pairs: Sequence[tuple[str | None, Any]]) -> list[Grade]:
        """The grades of (answer, gold) pairs, in their order; an answer of None is missing."""
        at_once = [_at_once(answer, gold) for answer, gold in pairs]
        waiting = [pair for pair, grade in zip(pairs, at_once, strict=True) if grade is None]
        compared = iter(self._symbolic(waiting) if waiting else [])
        grades = [grade or next(compared) for grade in at_once]
        with self._lock:
            self.counts.update(str(grade.status) for grade in grades)
            self.counts["symbolic"] += len(waiting)
        return grades

    def _symbolic(self, pairs: list[tuple[str | None, Any]]) -> list[Grade]:
        """A gold answer that takes too long whatever the answer is as bad as an unreadable one."""
        workers = self._workers()
        golds = [gold_texts(gold) for _, gold in pairs]
        asked = [(str(a), {"golds": texts}) for (a, _), texts in zip(pairs, golds, strict=True)]
        grades = workers.grade(asked)
        late = {t for t, g in zip(golds, grades, strict=True) if g.status is Status.TIMEOUT}
        alone = workers.grade([("0", {"golds": texts}) for texts in late])
        hung = {t for t, g in zip(late, alone, strict=True) if g.status is Status.TIMEOUT}
        return [
            _grade(Verdict.BAD_GOLD, gold) if texts in hung else _translated(grade, gold)
            for (_, gold), texts, grade in zip(pairs, golds, grades, strict=True)
        ]

    def _workers(self) -> Grader:
        """The pool; another one if it was closed by an error, or belongs to a parent process."""
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtra("math", "comparing expressions")
        if INSIDE in os.environ:  # this is a worker, and is held to a deadline itself
            return InProcess(importlib.import_module(SYMBOLIC.module).reward)
        with self._lock:
            if self.pool is None or self.pool.closed or self._owner != os.getpid():
                self.pool, self._owner = GraderPool(SYMBOLIC, self.limits), os.getpid()
            return self.pool

    def close(self) -> None:
        """Ends the workers, if there are any."""
        if self.pool is not None:
            self.pool.close()


def gold_texts(gold: Any) -> tuple[str, ...]:
    """One gold answer, or those of a list, as text; any other value becomes "", a bad gold."""
    several = isinstance(gold, list | tuple | set | frozenset)
    return tuple(_gold_text(one) for one in (gold if several else [gold])) or ("",)


def _gold_text(gold: Any) -> str:
    try:
        text = str(gold) if isinstance(gold, NUMBERS) else ""
    except ValueError:  # Python writes no integer of more than 4,300 digits
        text = ""
    return gold if isinstance(gold, str) else text if text[-1:].isdigit() else ""


def _at_once(answer: str | None, gold: Any) -> Grade | None:
    """The grade; None if algebra has to be compared for it."""
    golds = gold_texts(gold)
    if answer is None and any(map(readable, golds)):
        return Grade(0.0, {"format": 0.0, "answer": 0.0}, Status.UNPARSED, "no answer")
    verdict = decide(answer or "", golds)
    return None if verdict is Verdict.UNDECIDED else _grade(verdict, gold)


def _translated(grade: Grade, gold: Any) -> Grade:
    """A worker's grade, whose reward is the number of a verdict, as the grade of the answer."""
    if grade.status is Status.TIMEOUT:
        return replace(grade, parts={"format": 1.0, "answer": 0.0})
    if grade.status is Status.ERROR:
        return grade
    return _grade(list(Verdict)[int(grade.reward)], gold)


def _grade(verdict: Verdict, gold: Any) -> Grade:
    if verdict is Verdict.BAD_GOLD:
        return Grade(math.nan, {}, Status.ERROR, _message(gold))
    reward = float(verdict is Verdict.EQUAL)
    unread = verdict is Verdict.UNREADABLE
    status, message = (
        (Status.UNPARSED, "the answer can't be parsed") if unread else (Status.SCORED, None)
    )
    return Grade(reward, {"format": 1.0, "answer": reward}, status, message)


def _message(gold: Any) -> str:
    try:
        shown = reprlib.repr(gold)
    except ValueError:
        shown = f"a huge {type(gold).__name__}"
    return f"a gold answer must be a number, words or an expression, got {shown}; correct the row"


if INSIDE in os.environ and importlib.util.find_spec("math_verify") is not None:
    importlib.import_module(SYMBOLIC.module)  # warm before a user's reward compares its first
