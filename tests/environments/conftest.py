import os
import time
from pathlib import Path

import pytest

from burnish.environments.episode import EnvironmentLimits

GAMES = Path(__file__).with_name("games.py")
QUICK = EnvironmentLimits(wall_seconds=1.5, cpu_seconds=0.5, memory_bytes=1 << 28)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def gone(pid, within=10.0):
    """Whether the process ends within that time."""
    deadline = time.monotonic() + within
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not alive(pid)


def descendants(root):
    """The ids of all processes below a process, without zombies."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(") ")[2].split()[:2]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state not in "ZX":
            parents.setdefault(int(parent), []).append(int(stat.parent.name))
    found, left = [], [root]
    while left:
        found += (below := parents.get(left.pop(), []))
        left += below
    return found


def supervisor_of(pool):
    """The id of the supervisor, the only child of the guardian."""
    return descendants(pool._supervisor.process.pid)[0]


def processes_of(pool):
    """The ids of the processes of all episodes."""
    return descendants(supervisor_of(pool))


@pytest.fixture
def nothing_left():
    """The test leaves no process below this one, and no open file."""
    files, processes = len(os.listdir("/proc/self/fd")), set(descendants(os.getpid()))
    yield
    new = set(descendants(os.getpid())) - processes
    assert all(map(gone, new)), new
    assert len(os.listdir("/proc/self/fd")) <= files
