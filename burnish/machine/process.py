"""Start, call, supervise and stop child processes.

A ``ChildProcess`` runs one command in its own session, so that a terminal's Ctrl-C does not reach
it and so that it can be killed together with all processes that it has started. Its output goes to
a log, and every error quotes the end of that log. The process is killed when its ``ChildProcess``
is closed, garbage-collected, or still open when the interpreter exits.

    graders      burnish/graders/pool.py             calls over a pipe (``receive``)
    engines      burnish/engine/remote/client.py     calls over a socket that the child inherits
    sweeps       burnish/cli/sweep.py                one training run per child (``wait``)
    commands     ``run_command``                     a short program whose output is read

This module imports only the standard library and burnish.errors, because grader workers import it.
"""

from __future__ import annotations

import fcntl
import os
import resource
import signal
import subprocess
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any, Protocol

from burnish.errors import ChildError

KILL_TIMEOUT = 30.0
"""Seconds that the kernel has to end a killed process."""
TAIL_LINES = 30
"""Lines of a child's output that an error quotes."""
TAIL_BYTES = 1 << 14
"""Bytes of a child's output in which these lines are searched."""
LONGEST_WAIT = 1e6
"""Longest timeout, in seconds, that the system's poll accepts."""
OPEN_FILES = 1 << 16
"""Number of open files beyond which no process raises its limit."""


class Inheritable(Protocol):
    """An open socket or pipe."""

    def fileno(self) -> int: ...

    def close(self) -> None: ...


class ChildProcess:
    """A child process that runs one command in its own session, with a log of its output."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        name: str,
        inherited: Sequence[Inheritable] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: bytes = b"",
        stdout: IO[bytes] | None = None,
        log: Path | None = None,
        is_shown: bool = False,
    ) -> None:
        """Start the command. Raises ``ChildError`` if it can't be started.

        Args:
            command: program and arguments.
            name: names the child in errors, for example "the engine vllm".
            inherited: sockets or pipes that the child inherits under the same descriptors. This
                process closes its copies once the child has started.
            env: environment variables that differ from this process's.
            cwd: working directory; None for this process's.
            stdin: content of the child's standard input.
            stdout: file for standard output; None to write it to the log.
            log: file for the output; None for an unnamed temporary file.
            is_shown: whether the output goes to this process's stderr instead of a log.
        """
        self.name = name
        self._log = None if is_shown else _open_log(log)
        try:
            with _as_file(stdin) as given:
                self._popen = subprocess.Popen(
                    command,
                    stdin=given,
                    stdout=stdout or self._log or 2,
                    stderr=self._log,
                    pass_fds=[end.fileno() for end in inherited],
                    env=None if env is None else os.environ | env,
                    cwd=cwd,
                    start_new_session=True,
                )
        except OSError as error:
            _close_log(self._log)
            raise ChildError(f"{name} can't be started: {error}") from error
        for end in inherited:
            end.close()
        self._close_log = weakref.finalize(self, _close_log, self._log)
        self._kill_group = weakref.finalize(self, _kill_group, self._popen, os.getpid())

    @property
    def pid(self) -> int:
        """The child's process id, which is also the id of its process group."""
        return self._popen.pid

    @property
    def is_running(self) -> bool:
        return self._popen.poll() is None

    def wait(self, timeout: float | None) -> int:
        """Wait until the child exits and return its exit code, negative for a signal.

        Raises ``ChildError`` after ``timeout`` seconds. None waits without a limit and is meant for
        children whose duration is not known, such as training runs.
        """
        try:
            return self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            late = f"{self.name} did not exit within {timeout:g} s"
            raise ChildError(self.with_tail(late)) from None

    def receive(self, connection: Connection, timeout: float) -> Any:
        """Return the next object that the child sends over a pipe.

        Raises ``ChildError`` if the child exits, or sends nothing within ``timeout`` seconds.
        """
        try:
            if connection.poll(min(timeout, LONGEST_WAIT)):
                return connection.recv()
        except (EOFError, OSError):
            raise self.failure() from None
        raise ChildError(self.with_tail(f"{self.name} did not respond within {timeout:g} s"))

    def failure(self) -> ChildError:
        """Stop a child that has closed its connection: wait one second for it to exit, and kill it
        otherwise. Return an error that says how it ended, for the caller to raise."""
        ended = exit_status(self.stop(grace=1.0))
        return ChildError(self.with_tail(f"{self.name} {ended}"))

    def stop(self, grace: float) -> int:
        """Wait at most ``grace`` seconds for the child to exit, then kill all processes that are
        left in its group. Return the child's exit code, negative for a signal."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(grace)
        return self.kill()

    def kill(self) -> int:
        """Kill the child and every process in its group; return the child's exit code, negative for
        a signal. Killing it again only returns the code."""
        self._kill_group()  # a finalizer runs only once: later, the id may be another process's
        return self.wait(KILL_TIMEOUT)

    def close(self, grace: float = 0.0) -> None:
        """Stop the child, unless it was killed before, and close its log. ``grace``: seconds that
        the child has to exit by itself. Closing again does nothing."""
        if self._kill_group.alive:
            self.stop(grace)
        self._close_log()

    def tail(self, lines: int = TAIL_LINES) -> list[str]:
        """Return the last lines of the child's output; empty if the output is shown instead of
        logged, or if the child was closed."""
        if self._log is None or self._log.closed:
            return []
        descriptor = self._log.fileno()
        start = max(0, os.fstat(descriptor).st_size - TAIL_BYTES)
        text = os.pread(descriptor, TAIL_BYTES, start).decode(errors="replace")
        return text.splitlines()[-lines:]

    def with_tail(self, problem: str) -> str:
        """Return an error message: the problem, followed by the end of the child's output."""
        lines = self.tail()
        head = [f"{problem}; the end of its output:"] if lines else [problem]
        return "\n".join([*head, *(f"  {line}" for line in lines)])

    def limit_log(self, limit: int) -> None:
        """Empty the log if it is longer than ``limit`` bytes, so that a long-lived child can't fill
        the disk."""
        if self._log is not None and os.fstat(self._log.fileno()).st_size > limit:
            os.ftruncate(self._log.fileno(), 0)


def run_command(
    command: Sequence[str],
    *,
    name: str,
    timeout: float,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> bytes:
    """Run a command and return its standard output.

    Raises ``ChildError``, with the end of its stderr, if the command can't be started, fails, or
    does not exit within ``timeout`` seconds. In any case, all processes that it started are killed.
    """
    with tempfile.TemporaryFile() as stdout:
        child = ChildProcess(command, name=name, env=env, stdin=stdin, stdout=stdout)
        with closing(child):
            code = child.wait(timeout)
            if code:
                raise ChildError(child.with_tail(f"{name} {exit_status(code)}"))
        stdout.seek(0)
        return stdout.read()


def exit_status(code: int) -> str:
    """Return how a process ended, in words: "exited with 3" or "was killed by SIGKILL"."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def bound_memory(extra: int) -> None:
    """Limit the address space of this process to ``extra`` bytes beyond its present size; does
    nothing if the system is not Linux."""
    try:
        with open("/proc/self/statm") as file:
            now = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # only Linux reports the present size and enforces such a limit
        return
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = now + extra if hard == resource.RLIM_INFINITY else min(now + extra, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def raise_open_files() -> int:
    """Raise the number of files that this process may open to the system's hard limit, at most to
    `OPEN_FILES`; return the number."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return OPEN_FILES
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft < most:
        with suppress(OSError, ValueError):  # macOS has another limit below the hard one
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
            soft = most
    return soft


def _open_log(path: Path | None) -> IO[bytes]:
    log: IO[bytes] = tempfile.TemporaryFile() if path is None else path.open("wb+")  # noqa: SIM115
    # Processes that share the log append to it, also after `limit_log` has emptied it.
    flags = fcntl.fcntl(log, fcntl.F_GETFL)
    fcntl.fcntl(log, fcntl.F_SETFL, flags | os.O_APPEND)
    return log


def _as_file(content: bytes) -> IO[bytes]:
    """Return an open file with this content, for the child's standard input. Unlike a pipe, it does
    not block this process if the child reads it late or not at all."""
    if not content:
        return open(os.devnull, "rb")
    file = tempfile.TemporaryFile()  # noqa: SIM115 the caller closes it
    file.write(content)
    file.seek(0)
    return file


def _kill_group(popen: subprocess.Popen[bytes], owner: int) -> None:
    if os.getpid() != owner:  # a fork of the owner exits; the child is not the fork's
        return
    # macOS reports PermissionError for a group whose processes have all ended.
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(popen.pid, signal.SIGKILL)
    popen.wait(KILL_TIMEOUT)


def _close_log(log: IO[bytes] | None) -> None:
    if log is not None:
        log.close()
