"""A task's responses are graded by a pool of workers, or in this process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

from burnish.graders.pool import GraderPool, Items, Limits, as_grade
from burnish.graders.rewards import Reward, find, score
from burnish.types import Completion, Finish, Grade, Prompt, Status


class Grader(Protocol):
    def grade(self, items: Items) -> list[Grade]: ...

    def close(self) -> None: ...


class InProcess:
    """Grades in this process by the same rules, but without deadlines and bounds on memory."""

    def __init__(self, reward: Reward) -> None:
        self.reward = reward

    def grade(self, items: Items) -> list[Grade]:
        return [as_grade(score(self.reward, response, row)) for response, row in items]

    def close(self) -> None:
        """Nothing to end."""


def make_grader(reward: str | Reward, limits: Limits | None = None) -> Grader:
    """Workers for FILE.py:NAME, for a built-in name, and for a function that a file defines.

    A worker loads the function from its file: what this process changed in the module since then is
    not seen there. Of a running script it takes the imports, functions, classes and constants. Any
    other function (a lambda, a closure, one typed into a prompt: see ``rewards.find``) is called in
    this process, where a reward that hangs hangs the run; `isinstance(grader, InProcess)` tells.
    """
    source = find(reward)
    if source is not None:
        return GraderPool(source, limits).start()
    assert not isinstance(reward, str)
    return InProcess(reward)


def grade_pairs(
    grader: Grader, pairs: Sequence[tuple[Prompt, Completion]], *, must_end: bool
) -> list[Grade]:
    """Grades each response by its text and its prompt's row, ``Prompt.reference``.

    The part "ended" is 1 if the response ended by itself; must_end: it earns 0 otherwise.
    """
    grades = grader.grade([(c.text, p.reference) for p, c in pairs])
    return [_with_end(g, c, must_end) for g, (_, c) in zip(grades, pairs, strict=True)]


def _with_end(grade: Grade, completion: Completion, must_end: bool) -> Grade:
    if grade.status is Status.ERROR:
        return grade
    ended = completion.finish is Finish.STOP
    reward = grade.reward if ended or not must_end else 0.0
    return replace(grade, reward=reward, parts=grade.parts | {"ended": float(ended)})
