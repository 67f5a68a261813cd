"""A grader worker: ``python -m burnish.graders.worker``, started and watched by a ``GraderPool``.

Lines of JSON travel over standard input and output. The first line in is the set-up, the first out
says that the reward is loaded and warm; after that come batches of
(response, row), and each answer is written as soon as there is one, so that the pool always knows
which item a worker is on. A worker holds itself to the CPU and memory limits: the kernel kills it
by SIGPROF when the deadline of an item has passed, whatever it is doing, and it exits when it runs
out of memory, because a reward may never give back what it took. A comparison of answers runs in
forks of the worker, and only a fork ends. Nothing that is printed, read from standard input or
forked by a reward touches the frames. No torch, no numpy.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, BinaryIO

from burnish.errors import DataError
from burnish.graders import rewards

OUT_OF_MEMORY = 99
"""The exit status of a worker whose reward raised MemoryError."""
Send = Callable[[Any], Any]
Bounds = tuple[float, int]
"""CPU seconds of an item, and bytes of memory."""


def frame(content: Any) -> bytes:
    """A line of ASCII JSON; lone surrogates in a text survive."""
    return json.dumps(content).encode("ascii") + b"\n"


def main() -> None:
    incoming, outgoing = _private_pipes()
    send = _sender(outgoing)
    setup = _receive(incoming)
    if setup is None:
        return
    threading.Thread(target=_end_with, args=(setup["parent"],), daemon=True).start()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent's SIG_IGN would be inherited
    sys.path.extend(entry for entry in setup["path"] if entry not in sys.path)
    source = rewards.Source(*setup["source"])
    try:
        reward = _ending_when_full(rewards.load(source))
    except DataError as error:
        send({"failed": str(error)})
        return
    _bound_memory(setup["memory_bytes"])
    send({"ready": True})
    bounds = setup["cpu_seconds"], setup["memory_bytes"]
    answer = _answer_in_forks if source.compares_answers else _answer
    while (batch := _receive(incoming)) is not None:
        began = _cpu_seconds()
        answer(reward, batch, bounds, send)
        send({"cpu_seconds": _cpu_seconds() - began})


def exceeded(code: int, bounds: Bounds) -> str | None:
    """The bound for which a worker, or a fork of one, ended; None if it ended for another reason.

    code: negative for a signal, as in ``subprocess``.
    """
    cpu_seconds, memory_bytes = bounds
    if code == -signal.SIGPROF:
        return f"took more than {cpu_seconds:g} s of CPU time (task.cpu_seconds)"
    if code == OUT_OF_MEMORY:
        return f"took more than {memory_bytes / 2**20:g} MB of memory (task.memory_mb)"
    return None


def _ending_when_full(reward: rewards.Reward) -> rewards.Reward:
    def call(response: str, row: Any) -> Any:
        try:
            return reward(response, row)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)

    return call


def _answer(reward: rewards.Reward, batch: Any, bounds: Bounds, send: Send) -> None:
    for response, row in batch:
        signal.setitimer(signal.ITIMER_PROF, bounds[0])
        send(rewards.score(reward, response, row))
    signal.setitimer(signal.ITIMER_PROF, 0)


def _answer_in_forks(reward: rewards.Reward, batch: Any, bounds: Bounds, send: Send) -> None:
    """Each bound exceeded costs a fork, not the seconds that it takes to load the reward."""
    while batch:
        reading, writing = os.pipe()
        fork = os.fork()
        if fork == 0:
            threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
            _answer(reward, batch, bounds, _sender(os.fdopen(writing, "wb")))
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading, "rb") as answers:
            while (outcome := _receive(answers)) is not None:
                send(outcome)
                batch = batch[1:]
        ended = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
        too_much = exceeded(ended, bounds)
        if too_much and batch:
            send(rewards.Outcome("timeout", 0.0, {}, too_much))
            batch = batch[1:]
        elif ended or batch:  # the pool sees this worker end as the fork did
            os.kill(os.getpid(), -ended) if ended < 0 else os._exit(ended)


def _cpu_seconds() -> float:
    forks = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + forks.ru_utime + forks.ru_stime


def _sender(outgoing: BinaryIO) -> Send:
    own = os.getpid()

    def send(content: Any) -> None:
        if os.getpid() != own:  # a reward forked, and this is the child coming back
            os._exit(0)
        outgoing.write(frame(content))
        outgoing.flush()

    return send


def _private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The frames' pipes under other numbers; what a reward reads is empty, what it prints is shown.

    (The copies are closed in programs that a reward starts.)
    """
    pipes = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return pipes


def _receive(incoming: BinaryIO) -> Any:
    """The next frame's content; None at the end."""
    line = incoming.readline()
    return json.loads(line) if line.endswith(b"\n") else None


def _end_with(parent: int, *, exit: Callable[[int], None] = os._exit) -> None:
    """Ends this process when the pool's is gone, killed perhaps, in the middle of an item."""
    while os.getppid() == parent:
        time.sleep(1)
    exit(1)


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


if __name__ == "__main__":
    main()
