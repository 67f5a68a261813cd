"""Responses are graded by a pool of workers, or in this process by the same rules.

A pool has hard deadlines and bounded memory, and answers in order. ``GraderPool.grade`` returns
when it has every answer. Each worker has a supervisor, a process that never calls the reward and
keeps the deadlines:

    waits for                 at most          then
    a worker that starts      start_seconds    GraderError
    an answer                 cpu_seconds      the kernel kills the worker
    an answer                 wall_seconds     the supervisor kills the worker

A late item, and one for which memory runs out, is an error; in a comparison of answers it is a
timeout, which scores 0. A worker that dies by itself makes its item an error. In each case another
worker goes on with the next item. There are no threads and no forks in this process, so a pool
works from any thread, and from a script without a main guard.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from burnish.errors import GraderError
from burnish.graders.rewards import BUILT_IN, Outcome, Reward, Source, find, score
from burnish.graders.worker import Limits as Limits
from burnish.types import Completion, Finish, Grade, Prompt, Status

Items = Sequence[tuple[str, Mapping[str, Any]]]
"""Responses, each with the row that its prompt was made from."""
INSIDE = "BURNISH_GRADER_WORKER"


class _Supervisor(NamedTuple):
    process: subprocess.Popen[bytes]
    connection: Connection


class GraderPool:
    """Grades by one reward in worker processes; close it when done.

    Workers start with the first grade, and again after ``close`` or in a fork of this process.
    """

    def __init__(self, source: Source, limits: Limits | None = None) -> None:
        self.source = source
        self.limits = limits or Limits()
        self._lock = threading.Lock()
        self._owner = 0
        self._supervisors: list[_Supervisor] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return GraderPool, (self.source, self.limits)

    def start(self) -> Self:
        """Starts the workers unless they run; returns when they have loaded the reward."""
        if self._supervisors and self._owner == os.getpid():
            return self
        if INSIDE in os.environ:
            raise GraderError(
                "a file that starts graders was loaded by a grader; put what the file does under "
                'if __name__ == "__main__":'
            )
        self._owner = os.getpid()
        self._supervisors = [_start(self.source) for _ in range(self.limits.workers)]
        self._end = weakref.finalize(self, _end, self._supervisors, self._owner)
        path = [os.path.abspath(entry) for entry in sys.path]
        self._ask([(self.source, self.limits, path)] * self.limits.workers)
        return self

    def close(self) -> None:
        """Ends the workers and all that they started; a pool may be closed twice."""
        if self._supervisors:
            self._end()

    def grade(self, items: Items) -> list[Grade]:
        """The grades in the items' order."""
        workers = self.limits.workers
        outcomes: list[Any] = [None] * len(items)
        with self._lock:
            self.start()
            answers = self._ask([items[k::workers] for k in range(workers)])
        for k, answer in enumerate(answers):
            outcomes[k::workers] = answer
        return [as_grade(outcome) for outcome in outcomes]

    def _ask(self, contents: Sequence[Any]) -> list[Any]:
        """The supervisors' answers, each to its own content."""
        try:
            for supervisor, content in zip(self._supervisors, contents, strict=True):
                supervisor.connection.send(content)
            answers = [supervisor.connection.recv() for supervisor in self._supervisors]
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
            return answers
        except (EOFError, OSError):
            self.close()
            raise GraderError(f"the graders of {self.source.spec} were killed") from None
        except BaseException:
            self.close()  # an answer to what was already sent would be taken for the next call's
            raise


def as_grade(outcome: Outcome) -> Grade:
    status, message, correct = Status(outcome.status), outcome.message, outcome.correct
    return Grade(outcome.reward, outcome.parts, status, message, correct=correct)


def _start(source: Source) -> _Supervisor:
    ours, theirs = Pipe()
    is_ours = source.spec in BUILT_IN or source.module.startswith("burnish.")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from burnish.graders import worker"
    arguments = [f"{code}; worker.main({theirs.fileno()})", str(Path(__file__).parents[2])]
    process = subprocess.Popen(
        [sys.executable, "-P", "-u", "-c", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=2,
        # What a user's reward prints is theirs to see; a library's warnings may quote a model.
        stderr=subprocess.DEVNULL if is_ours else None,
        pass_fds=[theirs.fileno()],
        env={"OMP_NUM_THREADS": "1", **os.environ, INSIDE: "1"},
        start_new_session=True,
    )
    theirs.close()
    return _Supervisor(process, ours)


def _end(supervisors: list[_Supervisor], owner: int) -> None:
    """Ends the supervisors' process groups: workers, and all processes that these started."""
    if os.getpid() != owner:  # a fork of the owner exits; the workers are not its own
        return
    while supervisors:
        process, connection = supervisors.pop()
        connection.close()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)


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

    The part "ended" is 1 if the response ended by itself. If ``must_end``, other responses earn at
    most 0.
    """
    grades = grader.grade([(c.text, p.reference) for p, c in pairs])
    return [_with_end(g, c, must_end) for g, (_, c) in zip(grades, pairs, strict=True)]


def _with_end(grade: Grade, completion: Completion, must_end: bool) -> Grade:
    if grade.status is Status.ERROR:
        return grade
    ended = completion.finish is Finish.STOP
    grade = replace(grade, parts=grade.parts | {"ended": float(ended)})
    if ended or not must_end:
        return grade
    correct = None if grade.correct is None else False
    return replace(grade, reward=min(0.0, grade.reward), correct=correct)
