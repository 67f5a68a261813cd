"""The published reward functions of responses whose answer can be checked."""

from __future__ import annotations

from typing import Any

from burnish.errors import DataError
from burnish.graders.answers import Format, shared
from burnish.graders.extract import EXTRACTORS
from burnish.types import Status


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


def _rewards(format: Format, response: str, ground_truth: Any) -> dict[str, float]:
    (grade,) = shared().check([(EXTRACTORS[format](response), ground_truth)])
    if grade.status is Status.ERROR:
        raise DataError(grade.message)
    parts = {f"{name}_reward": grade.parts[name] for name in ("format", "answer")}
    return {"reward": grade.reward, **parts}
