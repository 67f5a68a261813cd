"""Ctrl-C and SIGTERM in a run: the first lets a step finish, another stops it at once.

Before the first step already the first one stops it at once. Python hands a signal to the main
thread only between two of its own instructions, and a backward pass can take minutes; so a thread
listens as well, and ends the process if the main thread has not done so in time.
"""

from __future__ import annotations

import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_REQUEST_S = 1.0
"""Signals this close together are one request: `timeout` signals a process, then its group."""
GRACE_S = 1.5
"""Seconds that the main thread has to stop at once by itself."""


class Interrupts:
    """Inside of the block, signals are requests to stop."""

    def __init__(self, say: Callable[[str], None], leave: Callable[[int], None]) -> None:
        """``leave`` is given an exit code and must end the process, from another thread."""
        self.begun = False
        """Whether a step has begun, so that a first request lets it finish."""
        self.number: int | None = None
        """The first signal that came; None if none has."""
        self._say, self._leave = say, leave
        self._first = 0.0
        self._at_once = self._raised = False
        self._heard, self._ended = threading.Event(), threading.Event()

    def __enter__(self) -> Self:
        self._ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._theirs = theirs
        self._wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._ended.set()
        self._theirs.close()  # which ends the thread
        self._thread.join(1.0)
        self._ours.close()

    def _listen(self) -> None:
        while numbers := self._ours.recv(1):
            self._take(numbers[0])
            self._heard.set()
            if self._at_once and not self._ended.wait(GRACE_S):
                self._leave(128 + numbers[0])

    def _take(self, number: int) -> None:
        if self.number is None:
            self.number, self._first = number, time.monotonic()
            self._at_once = not self.begun
            if self.begun:
                self._say("stopping after this step; once more to stop at once")
        elif time.monotonic() - self._first > ONE_REQUEST_S:
            self._at_once = True

    def _handle(self, number: int, frame: object) -> None:
        self._heard.wait(1.0)  # the thread may not have read it yet
        self._heard.clear()
        if self._at_once and not self._raised:
            self._raised = True
            raise KeyboardInterrupt
