"""How this process shares its cores: threads that wait give their core away, and wake fast.

A product runs on all threads at once and ends with the slowest. By default OpenMP's threads wait
for each other awake; beside another program a waiting thread then holds the core that the thread it
waits for needs, and a run takes many times as long. Here they look a thousand times and then sleep:
a core that falls idle in every short wait is slow to come back, in a virtual machine above all. A
sleeping thread must also be run soon after it is woken, so they ask Linux for short turns on a core
(6.12 and newer grant them).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from pathlib import Path

TURN_NS = 100_000
"""The turn on a core that is asked for; Linux gives 3 ms unless it is told otherwise."""
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
"""GNU's OpenMP, which PyTorch brings on Linux, reads the second: 50 µs on a Xeon, which is longer
than most waits within a step of the model. Others read the first, and sleep at once."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""The system call's number, by machine."""


def share_cores() -> None:
    """To be called before torch is loaded: OpenMP reads its settings once. A setting of the user's
    own stays."""
    if "torch" not in sys.modules and not any(name in os.environ for name in WAITING):
        os.environ.update(WAITING)
    _ask_for_short_turns()


def _ask_for_short_turns() -> None:
    """For every thread there is; later ones inherit it. Where it can't be had, nothing changes."""
    number = _SCHED_SETATTR.get(platform.machine())
    tasks = Path("/proc/self/task")
    if sys.platform != "linux" or number is None or not tasks.is_dir():
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # struct sched_attr: size, policy (0: the usual one), flags, nice, priority, runtime, deadline,
    # period. For the usual policy the runtime is the length of a turn.
    attributes = struct.pack("=IIQiIQQQ", 48, 0, 0, nice, 0, TURN_NS, 0, 0)
    call = ctypes.CDLL(None, use_errno=True).syscall
    for task in tasks.iterdir():
        call(number, int(task.name), ctypes.create_string_buffer(attributes), 0)
