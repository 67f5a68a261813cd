"""Temporary folders that are removed even if their process was killed: by the next process.

The owner of a folder holds a lock on a file in it. The kernel releases the lock when the process
ends in any way, so a folder with a free lock belongs to no live process. Unlike a pid, this is also
correct for processes in other containers.
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
    """A temporary folder that belongs to this process."""

    def __init__(self, path: Path, lock: int) -> None:
        """``lock``: file descriptor that holds the lock."""
        self.path, self._lock = path, [lock]

    def remove(self) -> None:
        """Remove the folder and release its lock. Removing it again does nothing."""
        shutil.rmtree(self.path, ignore_errors=True)
        while self._lock:
            os.close(self._lock.pop())


def claim(kind: str, root: Path | None = None) -> Folder:
    """Create a temporary folder and lock it for this process. The caller calls `Folder.remove`; if
    it can't, a later `remove_dead` removes the folder. ``kind`` becomes a part of the folder's
    name. ``root`` is the folder in which it is created; None for the system's folder of temporary
    files."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{kind}-{os.getpid()}-", dir=root))
        lock = os.open(path / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        with suppress(OSError):  # another process removed it before it was locked
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.stat(path / LOCK), os.fstat(lock)):
                return Folder(path, lock)
        os.close(lock)


def remove_dead(*roots: Path) -> list[Path]:
    """Remove the temporary folders that `claim` made for processes of this user that have ended;
    return the paths of the removed folders.

    ``roots``: where to look; by default, shared memory and the system's folder of temporary files.
    """
    removed = []
    for path in [p for root in roots or _roots() for p in root.glob(f"{PREFIX}*")]:
        with suppress(OSError):  # it has no lock file, is locked, or is already gone
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


def fsync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
