"""Configure OpenMP's threads so that this process shares its cores with other programs.

A matrix product runs on all threads and ends with the slowest. By default OpenMP's threads spin
while they wait for each other. If another program uses the machine, a spinning thread occupies the
core that the thread it waits for needs, and a run takes many times as long. Here threads spin a
thousand times and then sleep; sleeping at once would be slow, because an idle core needs time to
wake up, above all in a virtual machine. A sleeping thread must also be scheduled soon after it is
woken, so the process requests short time slices (Linux 6.12 and newer).
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys
from pathlib import Path

SLICE_NS = 100_000
"""Requested time slice on a core in nanoseconds; Linux's default is 3 ms."""
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "1000"}
"""Environment variables that configure how OpenMP's threads wait. GNU's OpenMP, which PyTorch
includes on Linux, reads the second: 1000 spins take 50 µs on a Xeon, longer than most waits within
a step of the model. Other implementations read the first, and their threads sleep at once."""
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""Number of the system call, by architecture."""


def share_cores() -> None:
    """Make OpenMP's threads sleep while they wait, unless the user has configured OpenMP, and
    request short time slices. Call it before torch is loaded, because OpenMP reads its settings
    once."""
    if "torch" not in sys.modules and not any(name in os.environ for name in WAITING):
        os.environ.update(WAITING)
    _request_short_slices()


def _request_short_slices() -> None:
    """Request short time slices for all present threads, which later ones inherit. Systems that
    don't support this are left unchanged."""
    number = _SCHED_SETATTR.get(platform.machine())
    tasks = Path("/proc/self/task")
    if sys.platform != "linux" or number is None or not tasks.is_dir():
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    # struct sched_attr: size, policy (0: the default), flags, nice, priority, runtime, deadline,
    # period. For the default policy, the runtime is the length of a time slice.
    attributes = struct.pack("=IIQiIQQQ", 48, 0, 0, nice, 0, SLICE_NS, 0, 0)
    call = ctypes.CDLL(None, use_errno=True).syscall
    for task in tasks.iterdir():
        call(number, int(task.name), ctypes.create_string_buffer(attributes), 0)
