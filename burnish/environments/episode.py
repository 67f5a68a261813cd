"""The process of one episode: a fork of the supervisor, which calls the user's environment.

It reads calls from a socket and writes the results to it, until it is killed or its supervisor has
died. Each message is preceded by its length. Calls are pickled. Results are JSON, because the
supervisor must not unpickle bytes of a process that may run anything.

    limit of one call    enforced by
    cpu_seconds          the kernel, which kills the process with SIGPROF
    wall_seconds         the supervisor
    memory_bytes         the kernel, which refuses memory; the process then exits
    REPLY_BYTES          this module: a larger result is an error
"""

from __future__ import annotations

import inspect
import json
import os
import pickle
import random
import signal
import socket
import struct
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from burnish.environments.descendants import adopt_orphans, die_with_parent
from burnish.environments.loading import LoadedEnvironment, exception_text
from burnish.environments.protocol import (
    Environment,
    EnvironmentCall,
    InvalidResult,
    Observation,
    failed_observation,
    read_observation,
)
from burnish.machine.process import bound_memory

OUT_OF_MEMORY = 99
"""Exit code of an episode whose environment raised MemoryError."""
REPLY_BYTES = 16 << 20
"""Largest result of a call, encoded as JSON."""
LENGTH = struct.Struct("!I")
"""Encoding of a message's length."""


@dataclass(frozen=True)
class EnvironmentLimits:
    """Limits of time and memory of an episode's process."""

    wall_seconds: float = 20.0
    """Wall-clock time per call of ``reset``, ``step`` or ``close``."""
    cpu_seconds: float = 2.0
    """CPU time per call, so that other load on the machine ends no episode."""
    start_seconds: float = 120.0
    """Time to load the environment's file."""
    memory_bytes: int = 1 << 30
    """Address space beyond what the loaded file occupies; enforced on Linux only."""


def framed(content: bytes) -> bytes:
    """Return a message preceded by its length, as `multiprocessing.connection` does."""
    return LENGTH.pack(len(content)) + content


def read_reply(content: bytes, call: EnvironmentCall) -> Observation:
    """Decode the message that an episode's process has sent as the result of a call, and check it
    again, because the environment's code may have written to the socket itself."""
    try:
        reply = json.loads(content)
        if isinstance(reply.get("error"), str):
            return failed_observation(reply["error"], was_raised=reply.get("raised") is True)
        if call == "close":
            return Observation([], None, True, {})
        return read_observation(reply["messages"] if call == "reset" else reply, call)
    except Exception as error:
        return failed_observation(f"the environment's process sent an invalid reply: {error}")


def play(
    channel: socket.socket,
    loaded: LoadedEnvironment,
    limits: EnvironmentLimits,
    row: Mapping[str, Any],
    seed: int,
) -> NoReturn:
    """Main function of an episode's process: create the environment, reset it, and answer calls.

    The global generators of ``random`` and of numpy (if it is loaded) begin with the seed.
    """
    die_with_parent()
    adopt_orphans()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent's SIG_IGN would be inherited
    bound_memory(limits.memory_bytes)
    _seed(seed)
    own, environments, runners = os.getpid(), list[Environment](), list[Any]()

    def finished(value: Any) -> Any:
        if not inspect.iscoroutine(value):
            return value
        import asyncio

        if not runners:  # one loop for all calls: an environment's clients belong to it
            runners.append(asyncio.Runner())
        return runners[0].run(value)

    def reset(_: Any) -> dict[str, Any]:
        environments.append(loaded.make())
        value = finished(environments[0].reset(row, seed))
        return {"messages": _checked(value, "reset")["messages"]}

    def step(message: Any) -> dict[str, Any]:
        return _checked(finished(environments[0].step(message)), "step")

    def close(_: Any) -> dict[str, Any]:
        method = getattr(environments[0], "close", None)
        if method is not None:
            finished(method())
        return {}

    calls: dict[EnvironmentCall, Callable[[Any], dict[str, Any]]]
    calls = {"reset": reset, "step": step, "close": close}
    call: EnvironmentCall = "reset"
    argument = None
    while True:
        signal.setitimer(signal.ITIMER_PROF, limits.cpu_seconds)
        try:
            reply = _encoded(partial(calls[call], argument), call, loaded)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)
        signal.setitimer(signal.ITIMER_PROF, 0)
        if os.getpid() != own:  # the environment has forked, and this is its child
            os._exit(0)
        channel.sendall(framed(reply))
        call, argument = pickle.loads(_received(channel))


def _encoded(
    run: Callable[[], dict[str, Any]], call: EnvironmentCall, loaded: LoadedEnvironment
) -> bytes:
    """Call the environment and return its result, or its error, as JSON."""
    try:
        reply = json.dumps(run()).encode()
    except MemoryError:
        raise
    except InvalidResult as error:
        return json.dumps({"error": str(error)}).encode()
    except BaseException as error:
        return json.dumps({"error": exception_text(error, loaded.file), "raised": True}).encode()
    if len(reply) > REPLY_BYTES:
        size = f"must be at most {REPLY_BYTES / 2**20:g} MB, got {len(reply) / 2**20:.1f} MB"
        return json.dumps({"error": f"the result of {call} {size}; shorten messages"}).encode()
    return reply


def _checked(value: Any, call: EnvironmentCall) -> dict[str, Any]:
    assert call != "close"
    try:
        found = read_observation(value, call)
    except ValueError as error:
        raise InvalidResult(str(error)) from None
    return {name: getattr(found, name) for name in ("messages", "reward", "done", "metrics")}


def _seed(seed: int) -> None:
    random.seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def _received(channel: socket.socket) -> bytes:
    (length,) = LENGTH.unpack(_bytes(channel, LENGTH.size))
    return _bytes(channel, length)


def _bytes(channel: socket.socket, size: int) -> bytes:
    parts, left = [], size
    while left:
        part = channel.recv(min(left, 1 << 16))
        if not part:  # the supervisor has died
            os._exit(0)
        parts.append(part)
        left -= len(part)
    return b"".join(parts)
