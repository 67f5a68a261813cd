"""A grader worker, and the supervisor that forks, watches and replaces it.

A ``GraderPool`` starts supervisors, which run ``main``. A supervisor never calls a user's reward,
so it can always answer the pool. Its worker is a fork, which loads the reward and grades one item
at a time. The kernel kills a worker by SIGPROF when the CPU deadline of its item has passed,
whatever it is doing. A worker exits when it runs out of memory, because a reward may never give
back what it took. No torch, no numpy.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from burnish.errors import DataError, GraderError
from burnish.graders.rewards import Outcome, Source, load, score

SLICE = 0.05
"""Seconds between two looks at a worker that says nothing."""
OUT_OF_MEMORY = 99
"""The exit status of a worker whose reward raised MemoryError."""


@dataclass(frozen=True)
class Limits:
    workers: int = 2
    cpu_seconds: float = 2.0
    """Per item, in the worker's own CPU time, so that a busy machine changes no reward."""
    wall_seconds: float = 20.0
    """Per item; for a reward that sleeps or waits."""
    start_seconds: float = 120.0
    """To load the reward; no item's deadline runs before that."""
    memory_bytes: int = 1 << 30
    """Beyond what the loaded reward takes; Linux only."""


def main(descriptor: int) -> None:
    """Answers the pool at the other end of the descriptor until the pool hangs up.

    Then it ends its process group: itself, its worker, and all processes that this one started.
    """
    pool = Connection(descriptor)
    os.set_inheritable(descriptor, False)
    try:
        supervisor = Supervisor(pool, *pool.recv())
        pool.send(None)
        while True:
            pool.send([supervisor.grade(*item) for item in pool.recv()])
    except Exception as error:
        with contextlib.suppress(OSError):  # the pool has hung up
            pool.send(error)
    finally:
        os.killpg(0, signal.SIGKILL)


class Supervisor:
    """One worker after the other for one reward."""

    def __init__(self, pool: Connection, source: Source, limits: Limits, path: list[str]) -> None:
        """Returns when a worker has loaded the reward. path: the pool's ``sys.path``."""
        sys.path.extend(entry for entry in path if entry not in sys.path)
        self.pool = pool
        self.source = source
        self.limits = limits
        self.loaded = load(source) if source.compares_answers else None
        self._start()

    def grade(self, response: str, row: Mapping[str, Any]) -> Outcome:
        if not self.process.is_alive():
            self._start()
        self.connection.send((response, row))
        outcome: Outcome = self._hear(self.limits.wall_seconds, "task.wall_seconds")
        return outcome

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=self._work, args=[theirs])
        self.process.start()
        theirs.close()
        said = self._hear(self.limits.start_seconds, "to load it")
        if isinstance(said, DataError):
            raise said
        if isinstance(said, Outcome):
            raise GraderError(f"the graders of {self.source.spec} do not start: {said.message}")

    def _hear(self, seconds: float, limit: str) -> Any:
        """What the worker says within so many seconds; if it says nothing, that is a failure."""
        deadline, alive = time.monotonic() + seconds, True
        while alive and time.monotonic() < deadline:
            alive = self.process.is_alive()
            heard = wait([self.pool, self.connection], SLICE if alive else 0)
            if self.pool in heard:  # it has hung up: it says nothing before it has its answer
                raise EOFError
            if heard:
                with contextlib.suppress(EOFError, OSError):
                    return self.connection.recv()
                self.process.join(1)
        late = f"{seconds:g} s ({limit})" if self.process.is_alive() else None
        self.process.kill()
        self.process.join()
        return self._failure(self.process.exitcode or 0, late)

    def _failure(self, code: int, late: str | None) -> Outcome:
        """The outcome of an item on which its worker ended. late: a time that was exceeded."""
        bounds = {
            -signal.SIGPROF: f"{self.limits.cpu_seconds:g} s of CPU time (task.cpu_seconds)",
            OUT_OF_MEMORY: f"{self.limits.memory_bytes / 2**20:g} MB of memory (task.memory_mb)",
        }
        bound = late or bounds.get(code)
        if bound and self.source.compares_answers:
            parts = dict(self.source.late_parts)
            return Outcome("timeout", 0.0, parts, f"took more than {bound}", correct=False)
        ended = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
        message = f"took more than {bound}" if bound else f"the worker {ended}"
        return Outcome("error", math.nan, {}, message)

    def _work(self, connection: Connection) -> None:
        """A worker's life, which the supervisor ends."""
        self.pool.close()
        self.connection.close()  # the supervisor's end; without it a dead supervisor is noticed
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent's SIG_IGN would be inherited
        try:
            reward = self.loaded or load(self.source)
        except DataError as error:
            connection.send(error)
            return
        _bound_memory(self.limits.memory_bytes)
        own = os.getpid()
        connection.send(True)
        while True:
            try:
                response, row = connection.recv()
            except EOFError:  # somebody has killed the supervisor
                return
            signal.setitimer(signal.ITIMER_PROF, self.limits.cpu_seconds)
            try:
                outcome = score(reward, response, row)
            except MemoryError:
                os._exit(OUT_OF_MEMORY)
            signal.setitimer(signal.ITIMER_PROF, 0)
            if os.getpid() != own:  # the reward forked, and this is its child coming back
                os._exit(0)
            connection.send(outcome)


def _bound_memory(extra: int) -> None:
    """At most so many bytes of address space beyond what the loaded reward takes."""
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # only Linux says what is taken, and only Linux keeps such a bound
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + extra if hard == resource.RLIM_INFINITY else min(now + extra, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
