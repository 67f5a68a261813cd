"""The Ray actor that hosts one component of a run: a generator, the scorer or the learner."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
import traceback
from typing import Any, NamedTuple

import ray
from ray import cloudpickle

from burnish.console.progress import Progress, format_progress, showing
from burnish.machine.threads import share_cores


class ActorStatus(NamedTuple):
    """An actor's response to a heartbeat. Actors respond while they work, too."""

    pid: int
    host: str
    node: str
    """Ray's id of the node."""
    stack: str
    """Traceback of the thread that runs the actor's calls."""
    sampled: int
    """Number of tokens that the actor has sampled; 0 if it does not sample."""
    activity: str
    """Progress of the current call, for display; empty if the actor is idle."""


class ComponentActor:
    """Hosts a plain object, the worker, and runs the worker's methods that the driver calls by
    name, one at a time."""

    def __init__(self, make: bytes, is_direct: bool = False) -> None:
        """``make`` is a pickled function that builds the worker; unpickling it may import torch.

        ``is_direct``: Ray Direct Transport may deliver tensors while the worker is being built, in
        a thread that needs torch. torch is then imported here, because two threads must not import
        it at the same time.
        """
        share_cores()
        if is_direct:
            import torch  # noqa: F401
        self._thread = threading.get_ident()
        self._make, self._worker = make, None
        self._failure: Exception | None = None
        self._progress: Progress | None = None

    def build(self) -> None:
        """Build the worker. This is separate from ``__init__``, so that heartbeats work in the
        meantime. It does not raise: every later `call` raises the error with which it failed."""
        self._thread = threading.get_ident()
        try:
            self._worker = _unpickle(self._make)()
        except Exception as error:
            self._failure = error

    @ray.method(num_returns=2)
    def call(self, method: str, *args: Any) -> tuple[Any, dict[str, Any]]:
        """Call a method of the worker. Return the method's result, and the columns of the call's
        row in the timeline: begin and end (seconds since the epoch, by this machine's clock) and
        version, the worker's weight version after the call (None if it has no weights)."""
        if self._failure is not None:
            raise self._failure
        self._thread = threading.get_ident()
        began, self._progress = time.time(), Progress(method, method)
        with showing(self._show):
            answer = getattr(self._worker, method)(*args)
        self._progress = None
        version = getattr(self._worker, "version", None)
        return answer, {"begin": began, "end": time.time(), "version": version}

    def read_buffer(self, buffer: str) -> Any:
        """Return the bytes of one of the worker's buffers, for other actors. This is separate from
        `call`, because Ray sends tensors directly only for methods with a single return value."""
        return self._worker.data(buffer)  # type: ignore[attr-defined]

    def _show(self, progress: Progress) -> None:
        self._progress = progress

    @ray.method(concurrency_group="heartbeat")
    def heartbeat(self) -> ActorStatus:
        """Return the actor's status. It runs in its own thread, also while a call is running."""
        frame = sys._current_frames().get(self._thread)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        node = ray.get_runtime_context().get_node_id()
        sampled = getattr(self._worker, "sampled", 0)
        activity = "" if self._progress is None else format_progress(self._progress)
        return ActorStatus(os.getpid(), os.uname().nodename, node, stack, sampled, activity)


def _unpickle(make: bytes) -> Any:
    """Unpickle without garbage collection: most of the time goes to imports, which keep what they
    create, and collecting meanwhile would take an eighth of it."""
    gc.disable()
    try:
        return cloudpickle.loads(make)
    finally:
        gc.enable()


def actor_class(kind: str, is_direct: bool) -> Any:
    """Return a Ray actor class based on `ComponentActor`.

    ``kind``: name of the class, which is shown in process lists. ``is_direct``: whether the actor
    may exchange tensors with other actors by Ray Direct Transport.
    """
    options: dict[str, Any] = {"concurrency_groups": {"heartbeat": 1}}
    options["enable_tensor_transport"] = is_direct
    return ray.remote(**options)(type(kind, (ComponentActor,), {}))
