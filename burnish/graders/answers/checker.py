"""Grading of responses whose answers can be checked, with worker processes for algebra."""

from __future__ import annotations

import importlib
import importlib.util
import math
import os
import reprlib
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any

from burnish.errors import DataError, MissingExtra
from burnish.graders.answers.comparison import Verdict, decide
from burnish.graders.extract import EXTRACTORS
from burnish.graders.in_process import InProcess
from burnish.graders.pool import INSIDE, Grader, GraderLimits, GraderPool
from burnish.graders.rewards import Source
from burnish.graders.tally import Items
from burnish.types import Grade, Status

SYMBOLIC = Source(
    f"{Path(__file__).with_name('symbolic.py')}:symbolic_reward",
    "burnish.graders.answers.symbolic",
    compares_answers=True,
)


def compare(answer: str, gold: Any) -> Verdict:
    """Return the verdict on an answer, given a gold answer; UNDECIDED if the comparison timed out,
    and BAD_GOLD also if it failed.

    ``gold`` is a text, a number, or a list of texts and numbers, any of which is right. If algebra
    has to be compared, a worker is started and kept for further calls.
    """
    (grade,) = shared().check([(answer, gold)])
    if grade.status is Status.SCORED:
        return Verdict.EQUAL if grade.reward else Verdict.DIFFERENT
    verdicts = {Status.UNPARSED: Verdict.UNREADABLE, Status.ERROR: Verdict.BAD_GOLD}
    return verdicts.get(grade.status, Verdict.UNDECIDED)


@cache
def shared() -> MathGrader:
    """Return the grader that all calls in this process share. It starts its only worker when it
    first compares algebra."""
    return MathGrader(limits=GraderLimits(workers=1))


class MathGrader:
    """A ``Grader`` that compares the answer in each response with the row's gold answer.

    The reward, which is also the part "answer", is 1 if they are equal (if the gold answer is a
    list, to one of its items), otherwise 0. The part "format" is 1 if the response has an answer in
    the right format. The status is UNPARSED if the response has no answer that can be parsed,
    TIMEOUT if the comparison timed out, and ERROR if the gold answer can't be parsed; an error is
    neither right nor wrong.
    """

    def __init__(self, format: str = "r1_zero", limits: GraderLimits | None = None) -> None:
        """``format`` is the format of the answers in responses, a key of `EXTRACTORS`. If
        ``limits`` is None, the defaults of `GraderLimits` apply."""
        self.extract = EXTRACTORS[format]
        self.pool = GraderPool(SYMBOLIC, limits)

    def grade(self, items: Items) -> list[Grade]:
        """Grade (response, row) pairs, in order; a row has its gold answer in "answer"."""
        return self.check([(self.extract(text), row["answer"]) for text, row in items])

    def check(self, pairs: Sequence[tuple[str | None, Any]]) -> list[Grade]:
        """Grade (answer, gold) pairs, in order; an answer is None if it is missing.

        Workers are started only if algebra has to be compared. Raise MissingExtra if that needs a
        package that is not installed.
        """
        golds = [gold_texts(gold) for _, gold in pairs]
        verdicts = [decide(a, texts) for (a, _), texts in zip(pairs, golds, strict=True)]
        grades = [_grade(v, *pair) for v, pair in zip(verdicts, pairs, strict=True)]
        waiting = [i for i, verdict in enumerate(verdicts) if verdict is Verdict.UNDECIDED]
        items = [(pairs[i][0] or "", {"golds": golds[i]}) for i in waiting]
        for i, found in zip(waiting, self._workers().grade(items) if items else [], strict=True):
            if found.status is Status.SCORED:
                grades[i] = _grade(Verdict(int(found.reward)), *pairs[i])
            else:
                grades[i] = replace(found, parts=grades[i].parts)
        return grades

    def _workers(self) -> Grader:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtra("math", "comparing expressions")
        if INSIDE in os.environ:  # this process is a worker, which has a timeout
            from burnish.graders.answers.symbolic import symbolic_reward

            return InProcess(symbolic_reward)
        return self.pool

    def close(self) -> None:
        self.pool.close()


def r1_zero_reward_fn(response: str, ground_truth: Any) -> dict[str, float]:
    """Grade a response in the format "… </think> <answer>ANSWER</answer>"; return its reward,
    format_reward and answer_reward, each 0 or 1.

    format_reward is 1 if each of the three tags occurs exactly once, only white space stands
    between </think> and <answer> and after </answer>, and the answer is not empty. answer_reward is
    1 if, in addition, the answer equals ``ground_truth``: a text, a number, or any item of a list
    of them. reward is the same number as answer_reward. Raise a DataError if the ground truth can't
    be parsed. A comparison that times out gives an answer_reward of 0.

    Differs from the published grader in the comparison of answers and in the format: the published
    grader finds "</think> <answer>" and "</answer>" anywhere and uses the last answer, so tags may
    be repeated and text may follow.
    """
    return _rewards("r1_zero", response, ground_truth)


def question_only_reward_fn(response: str, ground_truth: Any) -> dict[str, float]:
    r"""Return the rewards of `r1_zero_reward_fn` for the last \boxed{ANSWER} in any text.

    format_reward is 1 if there is a box. Differs from the published grader only in the comparison.
    """
    return _rewards("boxed", response, ground_truth)


def _rewards(format: str, response: str, ground_truth: Any) -> dict[str, float]:
    (grade,) = shared().check([(EXTRACTORS[format](response), ground_truth)])
    if grade.status is Status.ERROR:
        raise DataError(grade.message)
    parts = {f"{name}_reward": grade.parts[name] for name in ("format", "answer")}
    return {"reward": grade.reward, **parts}


def gold_texts(gold: Any) -> tuple[str, ...]:
    """Return the text of a gold answer or, if it is a list, the text of each item. A value that is
    neither a text nor a finite number becomes "", and so does an empty list; "" is a bad gold
    answer."""
    several = gold if isinstance(gold, list | tuple | set | frozenset) else [gold]
    return tuple(map(_gold_text, several)) or ("",)


def _gold_text(gold: Any) -> str:
    text = str(gold) if isinstance(gold, str | Real | Decimal) else ""
    return text if isinstance(gold, str) or text[-1:].isdigit() else ""  # excludes inf and NaN


def _grade(verdict: Verdict, answer: str | None, gold: Any) -> Grade:
    if verdict is Verdict.BAD_GOLD:
        rule = "a gold answer must be a number, words or an expression"
        message = f"{rule}, got {reprlib.repr(gold)}; correct the row"
        return Grade(math.nan, {}, Status.ERROR, message)
    reward = float(verdict is Verdict.EQUAL)
    parts = {"format": float(answer is not None), "answer": reward}
    if verdict is Verdict.UNREADABLE:
        message = "there is no answer that can be parsed"
        return Grade(0.0, parts, Status.UNPARSED, message, correct=False)
    return Grade(reward, parts, correct=verdict is Verdict.EQUAL)


if INSIDE in os.environ and importlib.util.find_spec("math_verify") is not None:
    import burnish.graders.answers.symbolic  # noqa: F401 - loads it before the first comparison
