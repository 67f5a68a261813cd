"""A grader worker, and the supervisor that forks, watches and replaces it.

A ``GraderPool`` starts supervisors, which run ``run_supervisor``. A supervisor never calls a user's
reward, so it can always answer the pool. Its worker is a fork, which loads the reward and grades
responses within the limits below. The kernel kills a worker with SIGPROF when an item exceeds its
CPU time, whatever the worker is doing. A worker exits when it runs out of memory, because a reward
may never release what it has allocated. This module loads neither torch nor numpy.

    reward       one call has             cpu_seconds        wall_seconds
    a function   one response             per call           per call
    batched      all responses at once    × its responses    per call
    async def    one response             × all responses    per call, `AT_ONCE` calls at a time
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from burnish.errors import DataError, GraderError
from burnish.graders.rewards import (
    AT_ONCE,
    Cause,
    Outcome,
    Reward,
    Source,
    Style,
    load_reward,
    score,
    score_batch,
    score_concurrently,
    style_of,
)
from burnish.machine.process import bound_memory, exit_status

POLL_SECONDS = 0.05
"""Interval at which a supervisor checks whether a silent worker is alive."""
SEND_SECONDS = 0.1
"""Interval at which a supervisor sends the outcomes that are not failures."""
OUT_OF_MEMORY = 99
"""Exit code of a worker whose reward raised MemoryError."""
BLOCKED_SECONDS = 1.0
"""Time beyond a call's wall-clock limit after which an async reward blocks its event loop."""
Item = tuple[str, Mapping[str, Any]]
"""A response and the data row of its prompt."""
Outcomes = list[tuple[int, Outcome]]
"""Pairs of the index of an item and its outcome."""
Send = Callable[[Outcomes], None]
Run = Callable[[Any], Any]
"""Runs a coroutine and returns its result."""


@dataclass(frozen=True)
class GraderLimits:
    """The number of worker processes, and their limits of time and memory."""

    workers: int = 2
    cpu_seconds: float = 2.0
    """CPU time per item, so that other load on the machine changes no reward."""
    wall_seconds: float = 20.0
    """Wall-clock time per item, for a reward that sleeps or waits."""
    start_seconds: float = 120.0
    """Time to load the reward; the limits per item start after that."""
    memory_bytes: int = 1 << 30
    """Address space beyond what the loaded reward occupies; enforced on Linux only."""


def run_supervisor(descriptor: int) -> None:
    """Main function of a supervisor: grade the items that the pool sends over the connection
    ``descriptor``, and send the outcomes back, failures at once, until the pool closes the
    connection.

    Then kill the own process group: this process, its worker, and every process that the worker
    started.
    """
    pool = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    try:
        supervisor = WorkerSupervisor(pool, *pool.recv())
        pool.send(None)
        while True:
            done: Outcomes = []
            sent = time.monotonic()
            for outcomes in supervisor.grade(pool.recv()):
                done += outcomes
                has_failed = any(outcome.message is not None for _, outcome in outcomes)
                if has_failed or time.monotonic() - sent >= SEND_SECONDS:
                    pool.send(done)
                    done, sent = [], time.monotonic()
            if done:
                pool.send(done)
    except Exception as error:
        with contextlib.suppress(OSError):  # the pool has closed the connection
            pool.send(error)
    finally:
        os.killpg(0, signal.SIGKILL)


class WorkerSupervisor:
    """Grades items with one reward in one worker, whose timeouts it enforces. It replaces a worker
    that has ended."""

    def __init__(
        self, pool: Connection, source: Source, limits: GraderLimits, path: list[str]
    ) -> None:
        """Start a worker and wait until it has loaded the reward.

        ``pool`` is the connection to the pool, and ``path`` the pool's ``sys.path``, whose entries
        are added to this process's. Raise a DataError if the reward can't be loaded, or a
        GraderError if the worker does not start.
        """
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self.pool = pool
        self.source = source
        self.limits = limits
        self.loaded = load_reward(source) if source.compares_answers else None
        self._start()

    def grade(self, items: Sequence[Item]) -> Iterator[Outcomes]:
        """Grade items; yield their outcomes with their indices as soon as they are known.

        If a worker fails, all of its calls that have begun fail, and another worker continues.
        """
        waiting = list(range(len(items)))
        while waiting:
            size = 1 if self.style == "single" else len(waiting)
            call, waiting = waiting[:size], waiting[size:]
            if not self.process.is_alive():
                self._start()
            self.connection.send([items[i] for i in call])
            left = dict(enumerate(call))
            while left:
                answer = self._answer(size)
                if isinstance(answer, Outcome):
                    begun = list(left)[: AT_ONCE if self.style == "async" else None]
                    yield [(left.pop(place), answer) for place in begun]
                    waiting = [*left.values(), *waiting]
                    break
                yield [(left.pop(place), outcome) for place, outcome in answer]

    def _answer(self, size: int) -> Any:
        """Return the worker's next outcomes for a call with ``size`` items, or the outcome of its
        failure."""
        limit = "task.wall_seconds"
        if self.style == "batched":
            limit += f", for a batch of {size}" if size > 1 else ""
        if self.style != "async":
            return self._receive(self.limits.wall_seconds, limit, size)
        limit += "; an async reward must not block, so await, or use asyncio.to_thread"
        return self._receive(self.limits.wall_seconds, limit, size, BLOCKED_SECONDS)

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=self._work, args=[theirs])
        self.process.start()
        theirs.close()
        answer = self._receive(self.limits.start_seconds, "to load it")
        if isinstance(answer, DataError):
            raise answer
        if isinstance(answer, Outcome):
            raise GraderError(f"the graders of {self.source.spec} do not start: {answer.message}")
        self.style: Style = answer

    def _receive(self, seconds: float, limit: str, size: int = 1, slack: float = 0.0) -> Any:
        """Return the worker's next message.

        If the worker ends or ``seconds`` and ``slack`` have passed, kill it and return the outcome
        of a failure, whose message names ``limit``. ``size`` is the number of items that the worker
        has. Raise EOFError if the pool has closed the connection.
        """
        deadline, alive = time.monotonic() + seconds + slack, True
        while alive and time.monotonic() < deadline:
            alive = self.process.is_alive()
            ready = wait([self.pool, self.connection], POLL_SECONDS if alive else 0)
            if self.pool in ready:  # the pool sends nothing while it waits: it has closed
                raise EOFError
            if ready:
                with contextlib.suppress(EOFError, OSError):
                    return self.connection.recv()
                self.process.join(1)
        late = f"{seconds:g} s ({limit})" if self.process.is_alive() else None
        self.process.kill()
        self.process.join()
        return self._failure(self.process.exitcode or 0, late, size)

    def _failure(self, code: int, late: str | None, size: int) -> Outcome:
        """Return the outcome of an item whose worker ended with the exit code ``code``.

        ``late`` describes the wall-clock limit; None if it was not exceeded. ``size`` is the number
        of items that the worker had. An exceeded limit is a timeout, which scores 0, in a
        comparison of answers; any other failure is an error.
        """
        cpu, per = self.limits.cpu_seconds * size, f" × {size}" if size > 1 else ""
        bounds: dict[int, tuple[str | None, Cause]] = {
            -signal.SIGPROF: (f"{cpu:g} s of CPU time (task.cpu_seconds{per})", "cpu"),
            OUT_OF_MEMORY: (
                f"{self.limits.memory_bytes / 2**20:g} MB of memory (task.memory_mb)",
                "memory",
            ),
        }
        bound, cause = bounds.get(code, (None, "exit"))
        if late:
            bound, cause = late, "wall"
        if bound and self.source.compares_answers:
            parts = dict(self.source.late_parts)
            return Outcome("timeout", 0.0, parts, f"took more than {bound}", correct=False)
        message = f"took more than {bound}" if bound else f"the worker {exit_status(code)}"
        return Outcome("error", math.nan, {}, message, cause=cause)

    def _work(self, connection: Connection) -> None:
        """Main function of a worker: load the reward, then grade the items that the supervisor
        sends, until the supervisor kills this process or has died."""
        self.pool.close()
        # Close the supervisor's end too: otherwise the worker would not notice that it has died.
        self.connection.close()
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent's SIG_IGN would be inherited
        try:
            reward = self.loaded or load_reward(self.source)
        except DataError as error:
            connection.send(error)
            return
        bound_memory(self.limits.memory_bytes)
        own, style, loops = os.getpid(), style_of(reward), list[Any]()
        connection.send(style)

        def send(outcomes: Outcomes) -> None:
            if os.getpid() != own:  # the reward has forked, and this is its child
                os._exit(0)
            connection.send(outcomes)

        def run(coroutine: Any) -> Any:
            # One loop for all calls: clients that a reward keeps between its calls belong to it.
            import asyncio

            if not loops:
                loops.append(asyncio.Runner())
            return loops[0].run(coroutine)

        grade = {"single": _grade_one, "batched": _grade_batch, "async": _grade_async}[style]
        while True:
            try:
                items = connection.recv()
            except EOFError:  # the supervisor was killed
                return
            signal.setitimer(signal.ITIMER_PROF, self.limits.cpu_seconds * len(items))
            try:
                grade(reward, items, self.limits.wall_seconds, send, run)
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            signal.setitimer(signal.ITIMER_PROF, 0)


def _grade_one(reward: Reward, items: Sequence[Item], seconds: float, send: Send, run: Run) -> None:
    (item,) = items
    outcome = score(reward, *item)
    signal.setitimer(signal.ITIMER_PROF, 0)
    send([(0, outcome)])


def _grade_batch(
    reward: Reward, items: Sequence[Item], seconds: float, send: Send, run: Run
) -> None:
    responses, rows = zip(*items, strict=True)
    outcomes = score_batch(reward, responses, rows, run)
    signal.setitimer(signal.ITIMER_PROF, 0)
    send(list(enumerate(outcomes)))


def _grade_async(
    reward: Reward, items: Sequence[Item], seconds: float, send: Send, run: Run
) -> None:
    run(score_concurrently(reward, items, seconds, lambda i, outcome: send([(i, outcome)])))
