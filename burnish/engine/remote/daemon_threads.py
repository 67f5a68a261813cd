"""A thread pool for blocking calls. The interpreter does not wait for them when it exits."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any


class DaemonThreads:
    """A pool of ``count`` daemon threads that run submitted calls and do not delay the
    interpreter's exit."""

    def __init__(self, count: int) -> None:
        self._calls = SimpleQueue[Any]()
        for _ in range(count):
            Thread(target=self._work, daemon=True).start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Run ``function(*arguments)`` in a thread of the pool as soon as one is free; return the
        future of its result."""
        future = Future[Any]()
        self._calls.put((future, function, arguments))
        return future

    def close(self) -> None:
        """Make the threads end after the calls that are already submitted, without waiting."""
        self._calls.put(None)

    def _work(self) -> None:
        for future, function, arguments in iter(self._calls.get, None):
            try:
                future.set_result(function(*arguments))
            except Exception as error:
                future.set_exception(error)
        self._calls.put(None)  # for the next thread
