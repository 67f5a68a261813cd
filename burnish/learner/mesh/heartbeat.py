"""Ranks watch each other: a rank that dies or fails is named to all others, which then stop."""

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
"""Seconds between two signs of life."""
SILENT_S = 20.0
"""A rank without a sign of life for so long counts as dead. It is less than the 30 seconds that
torchrun leaves the others before it kills them, too."""
HEARD_S = 3.0
"""Seconds that rank 0 waits until the others know why all ranks stop."""
GRACE_S = 5.0
"""Seconds that the main thread has to stop by itself: a collective may hold it."""


class Watch(threading.Thread):
    """Shows that this rank lives, and finds out who does not."""

    def __init__(self, store: Any, rank: int, count: int) -> None:
        """``store`` is a connection of its own to torch's key-value store: calls of the main thread
        must not hold it up."""
        super().__init__(daemon=True)
        self._store, self._rank, self._count = store, rank, count
        self._ended = threading.Event()
        self.verdict: str | None = None
        """The rank that died or failed, and how; None if all ranks live."""

    def run(self) -> None:
        self._store.set(f"who/{self._rank}", f"{os.getpid()} {socket.gethostname()}")
        beats, seen = 0, {rank: ("", time.monotonic()) for rank in range(self._count)}
        while self.verdict is None and not self._ended.wait(BEAT_S):
            beats += 1
            try:
                self._store.set(f"beat/{self._rank}", str(beats))
                self.verdict = self._failed() or self._silent(seen)
            except Exception as error:
                self.verdict = (
                    f"rank 0 or torchrun, which keep the ranks' store, are gone ({error})"
                )
        with suppress(Exception):  # whoever keeps the store may be gone
            if self.verdict is not None:
                self._store.set(f"heard/{self._rank}", "")
        # If the main thread does not stop by itself, something that waits for a dead rank holds it.
        if self.verdict is not None and not self._ended.wait(GRACE_S):
            print(f"error: {self.verdict}; rank {self._rank} stops", file=sys.stderr, flush=True)
            os._exit(1)

    def _failed(self) -> str | None:
        return str(self._store.get("failed").decode()) if self._store.check(["failed"]) else None

    def _silent(self, seen: dict[int, tuple[str, float]]) -> str | None:
        now = time.monotonic()
        for rank in range(self._count):
            if rank == self._rank or not self._store.check([f"who/{rank}", f"beat/{rank}"]):
                continue  # it has not begun; a deadline bounds that
            beat = self._store.get(f"beat/{rank}").decode()
            pid, host = self._store.get(f"who/{rank}").decode().split()
            if beat == "end":
                continue
            if beat != seen[rank][0]:
                seen[rank] = beat, now
            if host == socket.gethostname() and not _lives(int(pid)):
                # Its last words may be on their way.
                return self._failed() or f"rank {rank} (process {pid} on {host}) died"
            if now - seen[rank][1] > SILENT_S:
                told = f"gave no sign of life for {SILENT_S:g} s"
                return f"rank {rank} (process {pid} on {host}) {told}"
        return None

    def fail(self, error: BaseException) -> None:
        """Tells all ranks that this one has failed, and why."""
        told = f"rank {self._rank} (process {os.getpid()} on {socket.gethostname()}) failed: "
        with suppress(Exception):  # whoever keeps the store may be gone
            self._store.compare_set("failed", "", f"{told}{type(error).__name__}: {error}")

    def blame(self, error: RuntimeError) -> ActorError:
        """The error of a call that other ranks take part in: it names the rank that is the cause.

        Of an error of this rank alone, this rank is the cause.
        """
        is_shared = isinstance(error, dist.DistError) or "gloo" in str(error)
        end = time.monotonic() + (SILENT_S + 2 * BEAT_S if is_shared else 0)
        while self.verdict is None and time.monotonic() < end:
            time.sleep(BEAT_S / 5)
        if self.verdict is None:
            self.fail(error)
        if self._rank == 0:
            self._wait_until_heard()
        return ActorError(f"{self.verdict or error}; all ranks stop, and a checkpoint resumes them")

    def _wait_until_heard(self) -> None:
        """Rank 0 may keep the store, so it leaves after the others, but for the one that died."""
        end = time.monotonic() + HEARD_S
        with suppress(Exception):
            while time.monotonic() < end:
                heard = [self._store.check([f"heard/{rank}"]) for rank in range(self._count)]
                if sum(heard) >= self._count - 1:
                    return
                time.sleep(BEAT_S / 5)

    def end(self) -> None:
        """This rank is about to leave, and is not to be missed."""
        self._ended.set()
        with suppress(Exception):
            self._store.set(f"beat/{self._rank}", "end")


def _lives(pid: int) -> bool:
    """Whether a process of this machine runs; one that has died and is not collected does not."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return not os.path.exists("/proc/self/stat")  # only silence tells, then
