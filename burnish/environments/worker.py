"""The guardian of a supervisor, which ends the processes that a killed supervisor leaves.

An ``EnvironmentPool`` starts the guardian, which runs ``run_environments``: it forks the supervisor
and waits for its end. Neither runs code of the user after the user's file has been loaded.

    pool ──calls──► supervisor ──► an episode's process ──► processes that the environment starts
                        ▲
                     guardian

The guardian kills all of them when the supervisor dies or the pool closes the connection. If the
guardian is killed, the supervisor does the same. The connection closes when both have ended, so a
pool that finds it closed can start another supervisor.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from multiprocessing.connection import Connection

from burnish.environments.descendants import (
    adopt_orphans,
    die_with_parent,
    kill_descendants,
    reap,
)
from burnish.environments.supervisor import EnvironmentFacts, EpisodeSupervisor

GUARD_SECONDS = 0.1
"""Interval at which the guardian looks for the end of the supervisor."""
GRACE_SECONDS = 2.0
"""Time that a supervisor has to exit after the pool has closed the connection."""


def run_environments(descriptor: int) -> None:
    """Main function of the guardian: fork the supervisor, which serves the pool at the connection
    ``descriptor``, wait for its end, kill all processes that it leaves, and end like it."""
    adopt_orphans()
    guardian = os.getpid()
    supervisor = os.fork()
    if not supervisor:
        os.setsid()
        try:
            _supervise(Connection(descriptor), guardian)
        finally:
            os._exit(1)
    code, poll = None, select.poll()
    poll.register(descriptor, 0)  # without reading: reports only that the pool has closed it
    while code is None and not poll.poll(GUARD_SECONDS * 1000):
        code = reap().get(supervisor)
    deadline = time.monotonic() + GRACE_SECONDS
    while code is None and time.monotonic() < deadline:
        time.sleep(0.005)
        code = reap().get(supervisor)
    left = kill_descendants(())
    if code == -signal.SIGKILL:
        os.kill(os.getpid(), signal.SIGKILL)
    os._exit(left.get(supervisor, 1) if code is None else abs(code))


def _supervise(pool: Connection, guardian: int) -> None:
    """Load the environment, and serve the pool until it closes the connection or the guardian has
    died; then kill all episodes."""
    adopt_orphans()
    die_with_parent()  # while a user's file is executed, which may hang
    try:
        spec, limits, path, tools, script = pool.recv()
        sys.path.extend(entry for entry in path if entry not in sys.path)
        supervisor = EpisodeSupervisor(pool, limits, spec, tools, script)
        die_with_parent(False)
        pool.send(EnvironmentFacts(supervisor.loaded.deterministic, supervisor.loaded.tools))
        supervisor.serve(guardian)
    except (EOFError, ConnectionError):
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            pool.send(error)
    kill_descendants(())
    os._exit(0)
