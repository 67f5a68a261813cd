"""Temporary folders that outlive a process which is killed: the next one removes them.

The owner of a folder holds the lock of a file in it. The kernel releases the lock when the process
ends, in whatever way, so a folder whose lock is free belongs to no living process, also if the
process lived in another container, where its pid would mean another process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

SHARED = Path("/dev/shm")
PREFIX = "burnish-"
LOCK = ".lock"


class Folder:
    """A folder of this process, until it is removed or the process ends."""

    def __init__(self, path: Path, lock: int) -> None:
        """``lock``: the file descriptor that holds the lock."""
        self.path, self._lock = path, [lock]

    def remove(self) -> None:
        """May be called again."""
        shutil.rmtree(self.path, ignore_errors=True)
        while self._lock:
            os.close(self._lock.pop())


def claim(kind: str, root: Path | None = None) -> Folder:
    """A new folder of this process. ``kind`` is a part of its name; ``root``: None for the system's
    folder of temporary files."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-{os.getpid()}-", dir=root))
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):  # it was taken for one of a dead process before it was locked
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path / LOCK), os.fstat(lock)):
                return Folder(path, lock)
        os.close(lock)


def remove_dead(*roots: Path) -> list[Path]:
    """Removes the folders of this user's processes that have ended, and returns them. It looks into
    ``roots``, or into shared memory and the system's folder of temporary files."""
    removed = []
    for path in [p for root in roots or _roots() for p in root.glob(f"{PREFIX}*")]:
        with suppress(OSError):  # it has no lock, is locked, or went meanwhile
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(lock).st_uid == os.getuid():
                    shutil.rmtree(path)
                    removed.append(path)
            finally:
                os.close(lock)
    return removed


def _roots() -> list[Path]:
    return [root for root in (Path(tempfile.gettempdir()), SHARED) if root.is_dir()]
