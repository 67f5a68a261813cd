"""Handling of Ctrl-C and SIGTERM: the first signal lets the current step finish, the second one
stops the run immediately.

Before the first step, the first signal stops the run immediately. Python runs signal handlers only
in the main thread and between two bytecode instructions, but a backward pass can take minutes.
Therefore a second thread also receives the signals, and ends the process if the main thread does
not end it in time.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import NoReturn, Self

from burnish.console.display import Display
from burnish.console.progress import STEP_PHASES, Progress
from burnish.errors import ActorError, ClusterError, EngineError, GraderError
from burnish.runs import checkpoints, directory, report
from burnish.runs.resuming import command_to_resume

SIGNALS = (signal.SIGINT, signal.SIGTERM)
ONE_REQUEST_S = 0.2
"""Signals within this time count as one request: `timeout` signals a process and, at
once, its group. A second Ctrl-C takes longer."""
GRACE_S = 1.5
"""Time limit for the main thread to stop by itself, in seconds."""
OTHERS = (ActorError, ClusterError, EngineError, GraderError)
"""Errors of a run's other processes, which the same signal may have ended."""


class Interrupts:
    """Context manager that displays a run's progress and treats SIGINT and SIGTERM as requests to
    stop the run.

    ``show`` and ``is_stop_requested`` are the arguments of ``train``. If the run was stopped, the
    end of the block prints how to continue and ends the process, so the code after it does not run.
    """

    def __init__(self, path: Path, display: Display) -> None:
        """``path`` is the run's directory."""
        self._path, self._display = path, display
        self._last = Progress("load", "starting")
        self._begun = False
        """Whether a step has begun, so that the first request lets it finish."""
        self._number: int | None = None
        """The first signal that was received; None if there was none."""
        self._first = 0.0
        self._at_once = self._raised = False
        self._heard, self._ended = threading.Event(), threading.Event()

    def show(self, progress: Progress) -> None:
        """Display a progress report, and note whether a step has begun."""
        self._begun |= progress.phase in STEP_PHASES
        self._last = progress
        self._display(progress)

    def is_stop_requested(self) -> bool:
        """Return whether a signal has requested the run to stop."""
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
        self._theirs.close()  # ends the thread
        self._thread.join(1.0)
        self._ours.close()
        self._display.close()
        if self.is_stop_requested() and isinstance(error, OTHERS):
            self._display.print_line(str(error))
            self._stop_at_once()
        if kind is KeyboardInterrupt:
            self._stop_at_once()
        if kind is None and self.is_stop_requested() and not (self._path / "summary.json").exists():
            self._leave(f"stopped and saved; continue with: {command_to_resume(self._path)}")

    def _listen(self) -> None:
        while numbers := self._ours.recv(1):
            if numbers[0] not in SIGNALS:  # such as the SIGALRM of a reward's time limit
                continue
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
                self._display.print_line("stopping after this step; once more to stop at once")
        elif time.monotonic() - self._first > ONE_REQUEST_S:
            self._at_once = True

    def _handle(self, number: int, frame: object) -> None:
        self._heard.wait(1.0)  # the thread may not have read it yet
        self._heard.clear()
        if self._at_once and not self._raised:
            self._raised = True
            raise KeyboardInterrupt

    def _stop_at_once(self) -> NoReturn:
        saved, again = checkpoints.latest(self._path), command_to_resume(self._path)
        message = f"stopped at once; no checkpoint was saved yet; begin again with: {again}"
        if not (self._path / "recipe.toml").is_file():
            message = "stopped before the first step was done: nothing was learned, nothing is kept"
        elif saved is not None:
            last = f"the last checkpoint is {saved.name}"
            message = f"stopped at once; {last}; continue with: {again}"
        self._note_end()
        directory.unclaim(self._path)
        self._leave(message)

    def _note_end(self) -> None:
        """Write to status.json that the run was stopped, if the main thread did not get to it."""
        file = self._path / directory.STATUS
        with suppress(OSError):
            if file.exists() and directory.load_json(file)["state"] == "running":
                report.write_status(self._path, "stopped", self._last, now=time.time())

    def _leave(self, message: str) -> NoReturn:
        """End the process immediately: a regular exit waits for download threads and for torch's
        cleanup, which can take seconds."""
        self._display.print_line(message)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(128 + (self._number or signal.SIGINT))
