"""Grades of answers that can be checked: taken from a response, compared with the gold answer.

What text and exact numbers decide is decided in the calling process, at a bounded cost; algebra is
compared by a pool of workers with deadlines, which starts when it is first needed.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import reprlib
import threading
import time
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from burnish.errors import DataError, MissingExtra
from burnish.graders.equivalence import Verdict, compare, readable
from burnish.graders.extract import EXTRACTORS
from burnish.graders.grader import Grader, InProcess
from burnish.graders.pool import INSIDE, GraderPool, Items, Limits
from burnish.graders.rewards import Source
from burnish.types import Grade, Status

Format = Literal["r1_zero", "boxed", "hash", "last_number"]
NUMBERS: tuple[type[Any], ...] = (Real, Decimal)
LARGEST = 10**300
SYMBOLIC = Source(
    f"{Path(__file__).with_name('symbolic.py')}:reward",
    "burnish.graders.symbolic",
    compares_answers=True,
)


class AnswerChecker:
    """Compares answers with gold answers in stages, from any thread; close it when done."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.counts: Counter[str] = Counter()
        """Grades by status, and how many of them were ``symbolic``: compared by workers."""
        self._seconds = 0.0
        self._pool: GraderPool | None = None
        self._owner = os.getpid()
        self._lock = threading.Lock()

    @property
    def cpu_seconds(self) -> float:
        """What all comparisons took, in the calling threads and in the workers."""
        return self._seconds + (self._pool.cpu_seconds if self._pool else 0.0)

    def check(self, pairs: Sequence[tuple[str | None, Any]]) -> list[Grade]:
        """The grades of (answer, gold) pairs, in their order.

        No answer is None; gold is text, a number, or several of them, each of which is right.
        """
        began = time.thread_time()
        at_once = [_at_once(answer, gold) for answer, gold in pairs]
        spent = time.thread_time() - began
        waiting = [pair for pair, grade in zip(pairs, at_once, strict=True) if grade is None]
        compared = iter(self._symbolic(waiting) if waiting else [])
        grades = [grade or next(compared) for grade in at_once]
        with self._lock:
            self._seconds += spent
            self.counts.update(str(grade.status) for grade in grades)
            self.counts["symbolic"] += len(waiting)
        return grades

    def _symbolic(self, pairs: list[tuple[str | None, Any]]) -> list[Grade]:
        """A gold answer that takes too long whatever the answer is as bad as an unreadable one."""
        golds = [gold_texts(gold) for _, gold in pairs]
        workers = self._workers()
        items = [(str(a), {"golds": texts}) for (a, _), texts in zip(pairs, golds, strict=True)]
        grades = workers.grade(items)
        late = Status.TIMEOUT
        suspects = list({t for t, grade in zip(golds, grades, strict=True) if grade.status is late})
        alone = workers.grade([("0", {"golds": texts}) for texts in suspects])
        hung = {t for t, grade in zip(suspects, alone, strict=True) if grade.status is late}
        return [
            _bad(gold) if texts in hung or grade.parts.get("bad_gold") else _with_parts(grade)
            for (_, gold), texts, grade in zip(pairs, golds, grades, strict=True)
        ]

    def _workers(self) -> Grader:
        """The pool; another one where it was closed by an error, or belongs to a parent process."""
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtra("math", "comparing expressions")
        if INSIDE in os.environ:  # this is a worker, and is held to a deadline itself
            return InProcess(importlib.import_module(SYMBOLIC.module).reward)
        with self._lock:
            if self._pool is None or self._pool.closed or self._owner != os.getpid():
                self._pool, self._owner = GraderPool(SYMBOLIC, self.limits), os.getpid()
            return self._pool

    def close(self) -> None:
        """Ends the workers, if there are any."""
        if self._pool is not None:
            self._pool.close()


class MathGrader:
    """A ``Grader`` of responses whose answer can be checked; parts: format and answer.

    reward = answer: 1 if the answer in the response is the row's gold answer, or one of its list,
    and 0 if not, or if the format is wrong. A response without an answer, or with one that can't be
    parsed, is unparsed; a comparison that missed its deadline is a timeout; a gold answer that
    can't be parsed makes an error, which is neither right nor wrong.
    """

    def __init__(
        self, format: Format = "r1_zero", limits: Limits | None = None, *, field: str = "answer"
    ) -> None:
        """field: where a row has its gold answer."""
        if format not in EXTRACTORS:
            raise DataError(f"format must be one of {', '.join(EXTRACTORS)}, got {format!r}")
        self.format = format
        self.field = field
        self.checker = AnswerChecker(limits)
        self.counts = self.checker.counts

    def grade(self, items: Items) -> list[Grade]:
        """The grades of (response, row) pairs, in their order."""
        try:
            pairs = [(self.answer(response), row[self.field]) for response, row in items]
        except KeyError as error:
            raise DataError(f"a row has no gold answer {error}; name its field") from None
        return self.checker.check(pairs)

    def answer(self, response: str) -> str | None:
        """The answer in a response, None if there is none or the response is too long."""
        if len(response) > self.checker.limits.characters:
            return None
        return EXTRACTORS[self.format](response)

    def close(self) -> None:
        self.checker.close()


def r1_zero_reward_fn(response: str, ground_truth: Any) -> dict[str, float]:
    """reward, format_reward and answer_reward of "… </think> <answer>ANSWER</answer>".

    format_reward is 1 if the thinking is closed once, then comes the only pair of answer tags, and
    nothing but white space between and after them; reward = answer_reward is 1 if the answer is
    also the ground truth: text, a number, or a list of accepted ones. A ground truth that can't be
    parsed is a DataError; a comparison that takes too long scores 0.

    Differs from the published grader, which looks for "</think> <answer>" and "</answer>" anywhere
    and takes the last answer: there tags may be repeated, and text may follow. The comparison is
    another one too.
    """
    return _rewards("r1_zero", response, ground_truth)


def question_only_reward_fn(response: str, ground_truth: Any) -> dict[str, float]:
    r"""The same three rewards of the last \boxed{ANSWER}, whatever stands around it.

    format_reward is 1 if there is one. Differs from the published grader in the comparison alone.
    """
    return _rewards("boxed", response, ground_truth)


def equivalent(answer: str, gold: Any) -> bool:
    """Whether an answer is the gold answer, or one of several; one that takes too long is not."""
    (grade,) = _shared("boxed").checker.check([(answer, gold)])
    return bool(_sound(grade).reward)


def gold_texts(gold: Any, within: frozenset[int] = frozenset()) -> tuple[str, ...]:
    """Gold answers as text; what is none becomes "", which can't be parsed.

    within: the identities of the lists that it is in; one that contains itself is none.
    """
    if isinstance(gold, str):
        return (gold,)
    if isinstance(gold, list | tuple | set | frozenset):
        within |= {id(gold)}
        return tuple(
            text
            for one in gold
            for text in ([""] if id(one) in within else gold_texts(one, within))
        ) or ("",)
    try:
        a_number = isinstance(gold, NUMBERS) and -LARGEST < gold < LARGEST
        return (str(gold),) if a_number else ("",)
    except (ArithmeticError, ValueError):  # Decimal's NaN; a fraction of thousands of digits
        return ("",)


def _at_once(answer: str | None, gold: Any) -> Grade | None:
    """The grade, if no algebra has to be compared for it."""
    golds = gold_texts(gold)
    if answer is None:
        sound = any(map(readable, golds))
        return _grade(0.0, Status.UNPARSED, "no answer", has_answer=False) if sound else _bad(gold)
    verdicts = [compare(answer, gold) for gold in golds]
    if Verdict.EQUAL in verdicts:
        return _grade(1.0)
    if Verdict.UNDECIDED in verdicts:
        return None
    if Verdict.BAD_GOLD in verdicts:
        return _bad(gold)
    if Verdict.DIFFERENT in verdicts:
        return _grade(0.0)
    return _grade(0.0, Status.UNPARSED, "the answer can't be parsed")


def _with_parts(grade: Grade) -> Grade:
    if grade.status is Status.ERROR:
        return grade
    return _grade(grade.reward, grade.status, grade.message)


def _grade(
    reward: float,
    status: Status = Status.SCORED,
    message: str | None = None,
    *,
    has_answer: bool = True,
) -> Grade:
    return Grade(reward, {"format": float(has_answer), "answer": reward}, status, message)


def _bad(gold: Any) -> Grade:
    try:
        shown = reprlib.repr(gold)
    except ValueError:  # Python shows no integer of more than 4,300 digits
        shown = f"a huge {type(gold).__name__}"
    rule = f"a gold answer must be a number, words or an expression, got {shown}"
    return Grade(math.nan, {}, Status.ERROR, f"{rule}; correct the row")


def _rewards(format: Format, response: str, ground_truth: Any) -> dict[str, float]:
    (grade,) = _shared(format).grade([(response, {"answer": ground_truth})])
    parts = _sound(grade).parts
    return {
        "reward": grade.reward,
        "format_reward": parts["format"],
        "answer_reward": parts["answer"],
    }


def _sound(grade: Grade) -> Grade:
    if grade.status is Status.ERROR:
        raise DataError(grade.message)
    return grade


@cache
def _shared(format: Format) -> MathGrader:
    """One for the process; its single worker starts with the first algebra and ends with it."""
    grader = MathGrader(format, Limits(workers=1))
    if format != "boxed":
        grader.checker = _shared("boxed").checker
    return grader


if INSIDE in os.environ and importlib.util.find_spec("math_verify") is not None:
    importlib.import_module(SYMBOLIC.module)  # warm before a user's reward compares its first
