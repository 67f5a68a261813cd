"""Heartbeats between ranks: if a rank dies or fails, all other ranks stop and name it."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from burnish.errors import ActorError

BEAT_S = 0.5
"""Seconds between two heartbeats."""
SILENT_S = 20.0
"""Timeout in seconds after which a rank without a heartbeat counts as dead. It is shorter than the
30 seconds after which torchrun kills the remaining ranks."""
HEARD_S = 3.0
"""Maximum number of seconds for which rank 0 waits until the other ranks have read why all ranks
stop."""
GRACE_S = 5.0
"""Seconds in which the main thread may stop by itself after a failure. Then the process is ended,
because a collective may block the main thread forever."""


class Heartbeat(threading.Thread):
    """Thread that sends this rank's heartbeat and monitors the other ranks' heartbeats. If a rank
    died or failed, it sets ``failure`` and, after `GRACE_S` seconds, ends this process unless the
    main thread has stopped."""

    def __init__(self, store: Any, rank: int, count: int) -> None:
        """``store`` is a separate connection to torch's key-value store, so that calls of the main
        thread do not block it. ``count`` is the number of ranks."""
        super().__init__(daemon=True)
        self._store, self._rank, self._count = store, rank, count
        self._ended = threading.Event()
        self.failure: str | None = None
        """Description of the rank that died or failed, and how; None if no failure is known."""

    def run(self) -> None:
        self._store.set(f"who/{self._rank}", f"{os.getpid()} {socket.gethostname()}")
        beats, seen = 0, {rank: ("", time.monotonic()) for rank in range(self._count)}
        while self.failure is None and not self._ended.wait(BEAT_S):
            beats += 1
            try:
                self._store.set(f"beat/{self._rank}", str(beats))
                self.failure = self._failed() or self._silent(seen)
            except Exception as error:
                self.failure = (
                    f"the process that hosts the ranks' store (rank 0 or torchrun) ended ({error})"
                )
        with suppress(Exception):  # the process that hosts the store may have ended
            if self.failure is not None:
                self._store.set(f"heard/{self._rank}", "")
        # If the main thread does not stop, it is blocked in a call that waits for a dead rank.
        if self.failure is not None and not self._ended.wait(GRACE_S):
            print(f"error: {self.failure}; rank {self._rank} stops", file=sys.stderr, flush=True)
            os._exit(1)

    def _failed(self) -> str | None:
        return str(self._store.get("failed").decode()) if self._store.check(["failed"]) else None

    def _silent(self, seen: dict[int, tuple[str, float]]) -> str | None:
        now = time.monotonic()
        for rank in range(self._count):
            if rank == self._rank or not self._store.check([f"who/{rank}", f"beat/{rank}"]):
                continue  # it has not started; another timeout covers that
            beat = self._store.get(f"beat/{rank}").decode()
            pid, host = self._store.get(f"who/{rank}").decode().split()
            if beat == "end":
                continue
            if beat != seen[rank][0]:
                seen[rank] = beat, now
            if host == socket.gethostname() and not _is_alive(int(pid)):
                # It may have reported why it failed just before it died.
                return self._failed() or f"rank {rank} (process {pid} on {host}) died"
            if now - seen[rank][1] > SILENT_S:
                silence = f"sent no heartbeat for {SILENT_S:g} s"
                return f"rank {rank} (process {pid} on {host}) {silence}"
        return None

    def fail(self, error: BaseException) -> None:
        """Report to all ranks that this rank has failed, and why."""
        who = f"rank {self._rank} (process {os.getpid()} on {socket.gethostname()}) failed: "
        with suppress(Exception):  # the process that hosts the store may have ended
            self._store.compare_set("failed", "", f"{who}{type(error).__name__}: {error}")

    def explain(self, error: RuntimeError) -> ActorError:
        """Return the error to raise after a call of all ranks has failed with ``error``. Its
        message names the rank that caused the failure.

        If ``error`` comes from a collective, wait until the heartbeats show which rank failed, for
        at most `SILENT_S` seconds and two heartbeats. Any other error was caused by this rank,
        which reports it to the others. Rank 0 also waits until they have read the report.
        """
        is_shared = isinstance(error, dist.DistError) or "gloo" in str(error)
        end = time.monotonic() + (SILENT_S + 2 * BEAT_S if is_shared else 0)
        while self.failure is None and time.monotonic() < end:
            time.sleep(BEAT_S / 5)
        if self.failure is None:
            self.fail(error)
        if self._rank == 0:
            self._wait_until_heard()
        return ActorError(
            f"{self.failure or error}; all ranks stop; continue from the last checkpoint with "
            "`burnish resume`"
        )

    def _wait_until_heard(self) -> None:
        """Wait until all ranks but one (which may be dead) have read the failure, or `HEARD_S`
        seconds have passed: rank 0 may host the store, which ends with it."""
        end = time.monotonic() + HEARD_S
        with suppress(Exception):
            while time.monotonic() < end:
                heard = [self._store.check([f"heard/{rank}"]) for rank in range(self._count)]
                if sum(heard) >= self._count - 1:
                    return
                time.sleep(BEAT_S / 5)

    def end(self) -> None:
        """Stop monitoring, and mark this rank as ended, so that the other ranks do not treat its
        end as a failure."""
        self._ended.set()
        with suppress(Exception):
            self._store.set(f"beat/{self._rank}", "end")


def _is_alive(pid: int) -> bool:
    """Return whether a process of this machine is running; False for a zombie. Always True on a
    system without /proc."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not os.path.exists("/proc/self/stat")  # without /proc only the timeout decides
