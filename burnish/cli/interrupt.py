"""Ctrl-C and SIGTERM in a run: the first lets a step finish, another stops it at once.

Before the first step, the first signal stops the run at once. Python hands a signal to the main
thread only between two of its own instructions, and a backward pass can take minutes. So a thread
listens as well, and ends the process if the main thread has not ended it in time.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn, Self

from burnish.display import Display
from burnish.errors import ActorError, EngineError, GraderError
from burnish.progress import STEP_PHASES, Progress
from burnish.runs import checkpoints, directory

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_REQUEST_S = 1.0
"""Signals this close together are one request: `timeout` signals a process, then its group."""
GRACE_S = 1.5
"""Seconds that the main thread has to stop at once by itself."""
OTHERS = (ActorError, EngineError, GraderError)
"""Errors of other processes of a run, which the same signal may have ended."""


class Interrupts:
    """Shows a run inside of the block, where signals are requests to stop it.

    A run that was stopped ends the process at the end of the block, and says how to continue.
    """

    def __init__(self, path: Path, display: Display) -> None:
        """``path`` is the run's directory."""
        self._path, self._display = path, display
        self._begun = False
        """Whether a step has begun, so that a first request lets it finish."""
        self._number: int | None = None
        """The first signal that came; None if none has."""
        self._first = 0.0
        self._at_once = self._raised = False
        self._heard, self._ended = threading.Event(), threading.Event()

    def show(self, progress: Progress) -> None:
        self._begun |= progress.phase in STEP_PHASES
        self._display(progress)

    def is_asked(self) -> bool:
        """Whether a signal has asked the run to stop."""
        return self._number is not None

    def __enter__(self) -> Self:
        self._display.__enter__()
        self._ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        self._theirs = theirs
        self._wakeup = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        self._ended.set()
        self._theirs.close()  # which ends the thread
        self._thread.join(1.0)
        self._ours.close()
        self._display.close()
        if self.is_asked() and isinstance(error, OTHERS):
            self._display.say(str(error))
            self._stop_at_once()
        if kind is KeyboardInterrupt:
            self._stop_at_once()
        if kind is None and self.is_asked() and not (self._path / "summary.json").exists():
            self._leave(f"stopped and saved; continue with: burnish resume {self._path}")

    def _listen(self) -> None:
        while numbers := self._ours.recv(1):
            self._take(numbers[0])
            self._heard.set()
            if self._at_once and not self._ended.wait(GRACE_S):
                self._display.close()
                self._stop_at_once()

    def _take(self, number: int) -> None:
        if self._number is None:
            self._number, self._first = number, time.monotonic()
            self._at_once = not self._begun
            if self._begun:
                self._display.say("stopping after this step; once more to stop at once")
        elif time.monotonic() - self._first > ONE_REQUEST_S:
            self._at_once = True

    def _handle(self, number: int, frame: object) -> None:
        self._heard.wait(1.0)  # the thread may not have read it yet
        self._heard.clear()
        if self._at_once and not self._raised:
            self._raised = True
            raise KeyboardInterrupt

    def _stop_at_once(self) -> NoReturn:
        saved, again = checkpoints.latest(self._path), f"burnish resume {self._path}"
        said = f"stopped at once; no checkpoint was saved yet; begin again with: {again}"
        if not (self._path / "recipe.toml").is_file():
            said = "stopped before the first step was done: nothing was learned, nothing is kept"
        elif saved is not None:
            said = f"stopped at once; the last checkpoint is {saved.name}; continue with: {again}"
        directory.unclaim(self._path)
        self._leave(said)

    def _leave(self, said: str) -> NoReturn:
        """Ends the process now: the usual way out waits for a download's threads and takes torch
        apart, which can take seconds."""
        self._display.say(said)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + (self._number or signal.SIGINT))
