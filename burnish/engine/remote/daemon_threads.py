"""Threads for calls that wait for another process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from threading import Thread
from typing import Any


class Callers:
    """Calls in daemon threads: the interpreter ends without them, and not with an executor's."""

    def __init__(self, count: int) -> None:
        self._asked = SimpleQueue[Any]()
        for _ in range(count):
            Thread(target=self._work, daemon=True).start()

    def submit(self, function: Callable[..., Any], *given: Any) -> Future[Any]:
        future = Future[Any]()
        self._asked.put((future, function, given))
        return future

    def close(self) -> None:
        """The threads end after the calls that were submitted."""
        self._asked.put(None)

    def _work(self) -> None:
        for future, function, given in iter(self._asked.get, None):
            try:
                future.set_result(function(*given))
            except Exception as error:
                future.set_exception(error)
        self._asked.put(None)  # for the next thread
