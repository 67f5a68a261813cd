"""The Ray actor: one thin shell for every part of a run that lives in a process of its own."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from typing import Any, NamedTuple

import ray
from ray import cloudpickle

from burnish.progress import Progress, showing, spelled
from burnish.threads import share_cores


class Pulse(NamedTuple):
    """A sign of life of an actor, which it gives also while it works."""

    pid: int
    host: str
    node: str
    """Ray's name of the node."""
    stack: str
    """Where the actor's work stands, as a traceback."""
    sampled: int
    """Tokens that the actor has sampled; 0 if it does not sample."""
    doing: str
    """Its work in words; empty if it does not work."""


class Shell:
    """Holds a plain object and calls its methods by name, one after the other."""

    def __init__(self, make: bytes, is_direct: bool = False) -> None:
        """``make`` is a pickled function that builds the object; unpickling may load torch.

        ``is_direct``: tensors may come while the object is built, in a thread that needs torch; two
        threads must not load it at once.
        """
        share_cores()
        if is_direct:
            import torch  # noqa: F401
        self._worker = threading.get_ident()
        self._make, self._part = make, None
        self._failure: Exception | None = None
        self._doing: Progress | None = None

    def build(self) -> None:
        """Builds the object: a call of its own, so that a pulse answers while it is built.

        The calls after it raise its error; nobody waits for this one.
        """
        self._worker = threading.get_ident()
        try:
            self._part = cloudpickle.loads(self._make)()
        except Exception as error:
            self._failure = error

    @ray.method(num_returns=2)
    def call(self, method: str, *args: Any) -> tuple[Any, dict[str, Any]]:
        """The answer, and a part of its row in the timeline: when the work began and ended, by this
        machine's clock, and the version of the weights that it left (None if there are none)."""
        if self._failure is not None:
            raise self._failure
        self._worker = threading.get_ident()
        began, self._doing = time.time(), Progress(method, method)
        with showing(self._show):
            answer = getattr(self._part, method)(*args)
        self._doing = None
        version = getattr(self._part, "version", None)
        return answer, {"begin": began, "end": time.time(), "version": version}

    def give(self, space: str) -> Any:
        """The bytes of a space of the object, for other actors: Ray wants one value alone."""
        return self._part.data(space)  # type: ignore[attr-defined]

    def _show(self, progress: Progress) -> None:
        self._doing = progress

    @ray.method(concurrency_group="pulse")
    def pulse(self) -> Pulse:
        frame = sys._current_frames().get(self._worker)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        node = ray.get_runtime_context().get_node_id()
        sampled = getattr(self._part, "sampled", 0)
        doing = "" if self._doing is None else spelled(self._doing)
        return Pulse(os.getpid(), os.uname().nodename, node, stack, sampled, doing)


def actor_class(kind: str, is_direct: bool) -> Any:
    """The class of an actor; the list of processes shows its name. ``is_direct``: tensors go from
    actor to actor by Ray Direct Transport."""
    options: dict[str, Any] = {"concurrency_groups": {"pulse": 1}}
    options["enable_tensor_transport"] = is_direct
    return ray.remote(**options)(type(kind, (Shell,), {}))
