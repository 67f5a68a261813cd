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
    characters: int = 100_000
    """A longer response is not looked at: unparsed, reward 0."""


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
        outcome: Outcome | None = self._answer(self.limits.wall_seconds)
        return self._failure() if outcome is None else outcome

    def _start(self) -> None:
        self.connection, theirs = Pipe()
        self.process = multiprocessing.get_context("fork").Process(target=self._work, args=[theirs])
        self.process.start()
        theirs.close()
        said = self._answer(self.limits.start_seconds)
        if isinstance(said, DataError):
            raise said
        if said is None:
            late, ended = self._end()
            how = f"within {self.limits.start_seconds:g} s" if late else f"and {ended}"
            name = f"a grader worker (pid {self.process.pid})"
            raise GraderError(f"{name} did not load {self.source.spec} {how}")

    def _answer(self, seconds: float) -> Any:
        """What the worker says within so many seconds; None if it says nothing, or dies."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            alive = self.process.is_alive()
            heard = wait([self.pool, self.connection], SLICE if alive else 0)
            if self.pool in heard:  # it has hung up: it says nothing before it has its answer
                raise EOFError
            if heard:
                with contextlib.suppress(EOFError, OSError):
                    return self.connection.recv()
                self.process.join(1)
            if not alive:
                break
        return None

    def _end(self) -> tuple[bool, str]:
        """Ends a worker that says nothing: whether it was late, and how it ended if it was not."""
        late = self.process.is_alive()
        self.process.kill()
        self.process.join()
        code = self.process.exitcode or 0
        killed = f"was killed by {signal.Signals(-code).name}" if code < 0 else ""
        return late, killed or f"exited with {code}"

    def _failure(self) -> Outcome:
        """The outcome of an item after which the worker says nothing; this ends the worker."""
        late, ended = self._end()
        limits = self.limits
        bounds = {
            -signal.SIGPROF: f"{limits.cpu_seconds:g} s of CPU time (task.cpu_seconds)",
            OUT_OF_MEMORY: f"{limits.memory_bytes / 2**20:g} MB of memory (task.memory_mb)",
        }
        bound = bounds.get(self.process.exitcode or 0)
        if late:
            bound = f"{limits.wall_seconds:g} s (task.wall_seconds)"
        message = f"took more than {bound}" if bound else f"the worker {ended}"
        if bound and self.source.compares_answers:
            return Outcome("timeout", 0.0, {}, message)
        return Outcome("error", math.nan, {}, message)

    def _work(self, connection: Connection) -> None:
        """A worker's life, which the supervisor ends."""
        self.pool.close()
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
            response, row = connection.recv()
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
