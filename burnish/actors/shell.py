"""The Ray actor: one thin shell for every part of a run that lives in a process of its own."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import ray
from ray import cloudpickle

from burnish.threads import share_cores


class Pulse(NamedTuple):
    """A sign of life of an actor, which it gives also while it works."""

    pid: int
    host: str
    stack: str
    """Where the actor's work stands, as a traceback."""
    sampled: int
    """Tokens that the actor has sampled; 0 if it does not sample."""


class Shell:
    """Holds a plain object and calls its methods by name, one after the other."""

    def __init__(self, make: bytes) -> None:
        """``make`` is a pickled function that builds the object; unpickling may load torch."""
        share_cores()
        self._worker = threading.get_ident()
        self._make, self._part = make, None
        self._failure: Exception | None = None

    def build(self) -> None:
        """Builds the object: a call of its own, so that a pulse answers while it is built."""
        self._worker = threading.get_ident()
        try:
            self._part = cloudpickle.loads(self._make)()
        except Exception as error:
            self._failure = error
            raise

    def call(self, method: str, *args: Any) -> Any:
        if self._failure is not None:
            raise self._failure
        self._worker = threading.get_ident()
        return getattr(self._part, method)(*args)

    @ray.method(concurrency_group="pulse")
    def pulse(self) -> Pulse:
        frame = sys._current_frames().get(self._worker)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        return Pulse(os.getpid(), os.uname().nodename, stack, getattr(self._part, "sampled", 0))


def actor_class(kind: str) -> Any:
    """The class of an actor; the list of processes shows its name."""
    groups: dict[str, Any] = {"concurrency_groups": {"pulse": 1}}
    return ray.remote(**groups)(type(kind, (Shell,), {}))


def pickled(make: Callable[[], Any]) -> bytes:
    found: bytes = cloudpickle.dumps(make)  # type: ignore[no-untyped-call]
    return found
