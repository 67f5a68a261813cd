"""Folders in shared memory, which outlive processes: each has an owner, who holds its lock.

The kernel releases a lock when its process ends, in whatever way it ends. So a folder whose lock is
free belongs to a dead process, also if the process lived in another container that shares the
memory, where a pid would mean another process.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

SHARED = Path("/dev/shm")
PREFIX = "burnish-run-"
LOCK = ".lock"


class Folder(NamedTuple):
    """A folder of this process."""

    path: Path
    lock: int
    """The file descriptor that holds the lock."""

    def remove(self) -> None:
        """May be called twice, as actors may leave a file after the first time."""
        shutil.rmtree(self.path, ignore_errors=True)


def claim(root: Path) -> Folder:
    """Makes a folder that is this process's own until it ends."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=root))
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):  # another process took it for a dead one's before it was locked
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path / LOCK), os.fstat(lock)):
                return Folder(path, lock)
        os.close(lock)


def remove_dead(root: Path) -> list[Path]:
    """Removes the folders of processes that have ended, and returns them.

    Folders of other users stay, and so do folders without a lock.
    """
    removed = []
    for path in root.glob(f"{PREFIX}*"):
        with suppress(OSError):  # it is another user's, or it went meanwhile
            lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                if os.stat(path).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path)
                    removed.append(path)
            finally:
                os.close(lock)
    return removed
