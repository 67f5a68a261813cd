"""Grade responses in a pool of worker processes, or in this process by the same rules.

A pool has hard timeouts and bounded memory, and returns grades in the order of its items. Each
worker has a supervisor, a process that never calls the reward and enforces the timeouts:

    wait for                  timeout          on timeout
    a worker to start         start_seconds    GraderError
    a grade                   cpu_seconds      the kernel kills the worker
    a grade                   wall_seconds     the supervisor kills the worker
    a supervisor's outcome    the sum of start_seconds, wall_seconds and SLACK: GraderError

An item that exceeds its time or memory is an error. In a comparison of answers it is a timeout,
which scores 0. A worker that exits by itself makes its item an error. In each case a new worker
continues with the next item. This process starts no threads and does not fork, so a pool works from
any thread, and from a script without a main guard.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

from burnish.console.text import printable
from burnish.errors import ChildError, GraderError
from burnish.graders.in_process import InProcess
from burnish.graders.rewards import BUILT_IN, Outcome, Reward, Source, check_signature, find_source
from burnish.graders.tally import Items, Tally, as_grade
from burnish.graders.worker import GraderLimits as GraderLimits
from burnish.machine.process import LONGEST_WAIT, ChildProcess
from burnish.types import Completion, Finish, Grade, Prompt, Status

INSIDE = "BURNISH_GRADER_WORKER"
"""Environment variable that is set in supervisors and workers."""
SLACK = 60.0
"""Seconds that a supervisor may take beyond the timeouts of its worker."""
LOG_BYTES = 1 << 20
"""Size at which the log of a supervisor is emptied."""


class _Supervisor(NamedTuple):
    process: ChildProcess
    connection: Connection


class GraderPool:
    """Grades responses with one reward in worker processes. Close it after use.

    Workers start with the first call of ``grade``, and again after ``close`` or in a fork of this
    process.
    """

    def __init__(self, source: Source, limits: GraderLimits | None = None) -> None:
        """``source`` is where the workers find the reward. If ``limits`` is None, the defaults of
        `GraderLimits` apply."""
        self.source = source
        self.limits = limits or GraderLimits()
        self._lock = threading.Lock()
        self._owner = 0
        self._supervisors: list[_Supervisor] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return GraderPool, (self.source, self.limits)

    def start(self) -> Self:
        """Start the workers unless they are running; return this pool when they have loaded the
        reward.

        Raise a DataError if they can't load it, or a GraderError if they do not start.
        """
        if self._supervisors and self._owner == os.getpid():
            return self
        if INSIDE in os.environ:
            raise GraderError(
                "a file that starts graders was loaded by a grader; move the code that starts them "
                'below if __name__ == "__main__":'
            )
        self._owner = os.getpid()
        self._supervisors = [_start(self.source) for _ in range(self.limits.workers)]
        path = [os.path.abspath(entry) for entry in sys.path]
        # A supervisor may load the reward itself, and then waits for a worker.
        timeout = 2 * self.limits.start_seconds + SLACK
        self._call([(self.source, self.limits, path)] * self.limits.workers, timeout)
        return self

    def close(self) -> None:
        """End the workers and all processes that they started. Closing again does nothing."""
        while self._supervisors:
            supervisor = self._supervisors.pop()
            supervisor.connection.close()
            supervisor.process.close()

    def grade(self, items: Items) -> list[Grade]:
        """Return one grade per item, in the order of the items; start the workers if necessary.

        An item whose reward fails or exceeds a limit has a grade with the status ERROR; in a
        comparison of answers, an exceeded limit has the status TIMEOUT. Raise a GraderError if a
        supervisor fails, or if too many items have errors (see `limiting_errors`).
        """
        return [as_grade(outcome) for outcome in self.outcomes(items, Tally(items))]

    def outcomes(self, items: Items, tally: Tally) -> list[Outcome]:
        """Return one outcome per item, in the order of the items, like `GraderPool.grade`.

        ``tally`` counts each outcome as soon as it is known.
        """
        workers, found = self.limits.workers, dict[int, Outcome]()

        def take(number: int, answer: Sequence[tuple[int, Outcome]]) -> None:
            for place, outcome in answer:
                index = number + place * workers
                found[index] = outcome
                tally.add(index, outcome.status, outcome.message)

        with self._lock:
            self.start()
            self._stream([items[k::workers] for k in range(workers)], take)
        return [found[i] for i in range(len(items))]

    def _stream(self, shares: Sequence[Items], take: Callable[[int, Any], None]) -> None:
        """Send each supervisor its share of the items, and call ``take`` with the supervisor's
        number and the outcomes of items of its share, until all are known.

        If a supervisor fails, exceeds the timeout or answers with an exception, or if ``take``
        raises, close the pool and raise.
        """
        timeout = self.limits.wall_seconds + self.limits.start_seconds + SLACK
        with self._closed_on_failure():
            for supervisor, share in zip(self._supervisors, shares, strict=True):
                supervisor.process.limit_log(LOG_BYTES)
                _send(supervisor, share)
            left = {number: len(share) for number, share in enumerate(shares) if share}
            deadlines = dict.fromkeys(left, time.monotonic() + timeout)
            while left:
                waiting = {self._supervisors[number].connection: number for number in left}
                seconds = min(deadlines.values()) - time.monotonic()
                ready: list[Any] = wait(list(waiting), min(max(seconds, 0.0), LONGEST_WAIT))
                for number in [waiting[connection] for connection in ready]:
                    answer = _receive(self._supervisors[number], timeout)
                    take(number, answer)
                    left[number] -= len(answer)
                    deadlines[number] = time.monotonic() + timeout
                    if not left[number]:
                        del left[number], deadlines[number]
                if not ready and seconds <= 0:
                    late = min(deadlines, key=lambda number: deadlines[number])
                    process = self._supervisors[late].process
                    said = f"{process.name} did not respond within {timeout:g} s"
                    raise ChildError(process.with_tail(said))

    def _call(self, messages: Sequence[Any], timeout: float) -> None:
        """Send one message to each supervisor and wait for their answers.

        If a supervisor fails, exceeds the timeout or answers with an exception, close the pool and
        raise.
        """
        with self._closed_on_failure():
            for supervisor, message in zip(self._supervisors, messages, strict=True):
                _send(supervisor, message)
            for supervisor in self._supervisors:
                _receive(supervisor, timeout)

    @contextmanager
    def _closed_on_failure(self) -> Iterator[None]:
        try:
            yield
        except ChildError as error:
            self.close()
            raise GraderError(printable(str(error))) from None  # its log may quote responses
        except BaseException:
            self.close()  # otherwise the next call would receive the answers to these messages
            raise


def _start(source: Source) -> _Supervisor:
    ours, theirs = Pipe()
    is_ours = source.spec in BUILT_IN or source.module.startswith("burnish.")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from burnish.graders import worker"
    arguments = [
        f"{code}; worker.run_supervisor({theirs.fileno()})",
        str(Path(__file__).parents[2]),
    ]
    # Grades must not depend on the order of sets, which otherwise differs between processes.
    env = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        process = ChildProcess(
            [sys.executable, "-P", "-u", "-c", *arguments],
            name=f"the grader of {source.spec}",
            inherited=[theirs],
            env=env | {INSIDE: "1"},
            # Users see the output of their own rewards. The output of burnish's rewards goes to a
            # log, because the libraries that they call print warnings that may quote a response.
            is_shown=not is_ours,
        )
    except ChildError as error:
        ours.close()
        theirs.close()
        raise GraderError(str(error)) from None
    return _Supervisor(process, ours)


def _send(supervisor: _Supervisor, message: Any) -> None:
    try:
        supervisor.connection.send(message)
    except OSError:
        raise supervisor.process.failure() from None


def _receive(supervisor: _Supervisor, timeout: float) -> Any:
    answer = supervisor.process.receive(supervisor.connection, timeout)
    if isinstance(answer, Exception):
        raise answer
    return answer


class Grader(Protocol):
    """Grades responses. ``grade`` returns one grade per (response, row) pair, in the order of the
    pairs; ``close`` ends the processes that the grader has started."""

    def grade(self, items: Items) -> list[Grade]: ...

    def close(self) -> None: ...


def make_grader(reward: str | Reward, limits: GraderLimits | None = None) -> GraderPool | InProcess:
    """Return a grader for ``reward``: FILE.py:NAME, the name of a built-in reward, or a function.

    A function that a file defines runs in workers, which load it from the file before the grader is
    returned. They do not see changes that this process has made to the module since it was loaded.
    From a running script they load only the imports, functions, classes and constants. Any other
    function (a lambda, a closure, a function typed into a prompt: see ``rewards.find_source``) is
    called in this process by an ``InProcess`` grader, whose limits are weaker. Raise a DataError if
    the reward can't be loaded or called. If ``limits`` is None, the defaults of `GraderLimits`
    apply.
    """
    source = find_source(reward)
    if source is not None:
        return GraderPool(source, limits).start()
    assert not isinstance(reward, str)
    check_signature(reward, getattr(reward, "__name__", type(reward).__name__))
    return InProcess(reward, (limits or GraderLimits()).wall_seconds)


def grade_pairs(
    grader: Grader, pairs: Sequence[tuple[Prompt, Completion]], *, must_end: bool
) -> list[Grade]:
    """Grade each response by its text and its prompt's row, ``Prompt.reference``; return one grade
    per pair.

    The part "ended" is 1 if the model ended the response by itself, otherwise 0. If ``must_end``, a
    response that the model did not end earns at most 0 and is not correct.
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
