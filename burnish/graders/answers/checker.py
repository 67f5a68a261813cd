"""Grades of responses whose answer can be checked, with workers for the algebra."""

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
from burnish.graders.pool import INSIDE, Grader, GraderPool, InProcess, Items, Limits
from burnish.graders.rewards import Source
from burnish.types import Grade, Status

SYMBOLIC = Source(
    f"{Path(__file__).with_name('symbolic.py')}:reward",
    "burnish.graders.answers.symbolic",
    compares_answers=True,
)


def compare(answer: str, gold: Any) -> Verdict:
    """The verdict on an answer; UNDECIDED if it took too long.

    ``gold`` is a text, a number, or a list of them, each of which is right.
    """
    (grade,) = shared().check([(answer, gold)])
    if grade.status is Status.SCORED:
        return Verdict.EQUAL if grade.reward else Verdict.DIFFERENT
    verdicts = {Status.UNPARSED: Verdict.UNREADABLE, Status.ERROR: Verdict.BAD_GOLD}
    return verdicts.get(grade.status, Verdict.UNDECIDED)


@cache
def shared() -> MathGrader:
    """The process's own grader. Its one worker starts with the first algebra that is compared."""
    return MathGrader(limits=Limits(workers=1))


class MathGrader:
    """A ``Grader`` of responses whose answer can be checked; parts: format and answer.

    reward = answer: 1 if the answer in the response is the row's gold answer, or one of its list,
    and 0 if not, or if the format is wrong. A response without an answer, or with one that can't be
    parsed, is unparsed; a comparison that missed its deadline is a timeout; a gold answer that
    can't be parsed makes an error, which is neither right nor wrong.
    """

    def __init__(self, format: str = "r1_zero", limits: Limits | None = None) -> None:
        self.extract = EXTRACTORS[format]
        self.pool = GraderPool(SYMBOLIC, limits)

    def grade(self, items: Items) -> list[Grade]:
        """The grades of (response, row) pairs, in their order; a row has its gold in "answer"."""
        return self.check([(self.extract(text), row["answer"]) for text, row in items])

    def check(self, pairs: Sequence[tuple[str | None, Any]]) -> list[Grade]:
        """The grades of (answer, gold) pairs, in their order; an answer of None is missing."""
        golds = [gold_texts(gold) for _, gold in pairs]
        verdicts = [decide(a, texts) for (a, _), texts in zip(pairs, golds, strict=True)]
        grades = [_grade(v, *pair) for v, pair in zip(verdicts, pairs, strict=True)]
        waiting = [i for i, verdict in enumerate(verdicts) if verdict is Verdict.UNDECIDED]
        asked = [(pairs[i][0] or "", {"golds": golds[i]}) for i in waiting]
        for i, found in zip(waiting, self._workers().grade(asked) if asked else [], strict=True):
            if found.status is Status.SCORED:
                grades[i] = _grade(Verdict(int(found.reward)), *pairs[i])
            else:
                grades[i] = replace(found, parts=grades[i].parts)
        return grades

    def _workers(self) -> Grader:
        if importlib.util.find_spec("math_verify") is None:
            raise MissingExtra("math", "comparing expressions")
        if INSIDE in os.environ:  # this is a worker, and is held to a deadline itself
            return InProcess(importlib.import_module(SYMBOLIC.module).reward)
        return self.pool

    def close(self) -> None:
        self.pool.close()


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


def _rewards(format: str, response: str, ground_truth: Any) -> dict[str, float]:
    (grade,) = shared().check([(EXTRACTORS[format](response), ground_truth)])
    if grade.status is Status.ERROR:
        raise DataError(grade.message)
    parts = {f"{name}_reward": grade.parts[name] for name in ("format", "answer")}
    return {"reward": grade.reward, **parts}


def gold_texts(gold: Any) -> tuple[str, ...]:
    """One gold answer, or those of a list, as text; any other value becomes "", a bad gold."""
    several = gold if isinstance(gold, list | tuple | set | frozenset) else [gold]
    return tuple(map(_gold_text, several)) or ("",)


def _gold_text(gold: Any) -> str:
    text = str(gold) if isinstance(gold, str | Real | Decimal) else ""
    return text if isinstance(gold, str) or text[-1:].isdigit() else ""  # no infinity, no NaN


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
    importlib.import_module(SYMBOLIC.module)  # warm before a user's reward compares its first
