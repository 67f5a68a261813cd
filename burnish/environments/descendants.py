"""Find and kill all processes that a process has started, including those that left its session.

On Linux, an orphaned process becomes a child of its nearest ancestor that adopts orphans (a
subreaper). The supervisor of environments and each episode's process adopt orphans. A child of the
supervisor that is no live episode was therefore started by an episode that has ended.

Other systems adopt no orphans there and have no /proc: only process groups are killed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Collection
from contextlib import suppress

from burnish.machine.process import exit_status

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
"""Options of the system call prctl, from linux/prctl.h."""
KILL_SECONDS = 5.0
"""Seconds after which `kill_descendants` gives up, for example because of a process that waits for
a broken disk."""
ROUND_SECONDS = 0.002
"""Pause between two searches for descendants."""


def adopt_orphans() -> None:
    """Make this process the parent of the orphans among its descendants; on Linux only."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(is_bound: bool = True) -> None:
    """Let the kernel kill this process when its parent dies, or not any more; on Linux only."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL if is_bound else 0)


def reap() -> dict[int, int]:
    """Collect the children that have ended; return their exit codes, negative for signals."""
    codes: dict[int, int] = {}
    with suppress(ChildProcessError):  # no child is left
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            codes[ended[0]] = os.waitstatus_to_exitcode(ended[1])
    return codes


def child_processes() -> list[int]:
    """Return the ids of this process's children; empty if the system has no /proc."""
    return _children()[os.getpid()]


def exit_text(code: int) -> str:
    """Return how a process ended, like ``exit_status``, also for a signal without a name."""
    try:
        return exit_status(code)
    except ValueError:
        return f"was killed by signal {-code}"


def kill_group(pid: int) -> None:
    """Kill a child and all processes in the group that it leads."""
    for kill in (os.killpg, os.kill):  # a child that was just forked leads no group
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def kill_descendants(kept: Collection[int]) -> dict[int, int]:
    """Kill the children of this process with all of their descendants, except the children in
    ``kept`` with theirs. Return the exit codes of the children that have ended meanwhile.

    The search is repeated until it finds none, because a process may have forked before it was
    killed.
    """
    codes = reap()
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        children = _children()
        left = [pid for pid in children[os.getpid()] if pid not in kept]
        if not left:
            break
        while left:
            pid = left.pop()
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            left += children[pid]
        time.sleep(ROUND_SECONDS)
        codes |= reap()
    return codes


def _children() -> defaultdict[int, list[int]]:
    """Return the ids of every process's children, by its id."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    names = os.listdir("/proc") if sys.platform == "linux" else []
    for pid in (int(name) for name in names if name.isdigit()):
        with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
            # "pid (command) state parent ...", in which the command may contain parentheses
            parent = int(file.read().rpartition(b")")[2].split()[1])
            found[parent].append(pid)
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
