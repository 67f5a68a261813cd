"""Folders of engines whose process was killed are removed by the next start, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from burnish import folders
from burnish.engine import listening, remote, sglang_weights
from burnish.engine.serving import Settings
from burnish.errors import EngineError

KILLED = """
import os, signal, socket, sys, time
from burnish import folders
from burnish.engine import remote
from burnish.engine.serving import Settings
ours, theirs = socket.socketpair()
child = remote.Child(sys.executable, Settings("native", "nowhere"), theirs)
weights = folders.claim("engine", folders.SHARED)
(weights.path / "bucket-0").write_bytes(bytes(9))
print(child.folder.path, weights.path, flush=True)
sys.stdin.read()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The folders of a process that has started an engine, sent weights, and was killed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    found = [Path(path) for path in process.stdout.readline().split()]
    assert len(found) == 2
    assert not folders.remove_dead(), "it lives"
    assert all(path.is_dir() for path in found)
    process.communicate("", timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert all(path.is_dir() for path in found)
    assert [path.parent for path in found] == [tmp_path, folders.SHARED]
    return found


def start(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object) -> None:
        raise EngineError("no engine here")

    monkeypatch.setattr(remote, "Child", refuse)
    with pytest.raises(EngineError, match="no engine here"):
        remote.start(Settings("native", "nowhere"), python="python", deadline=1)


def serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(listening.Door, "next", interrupt)
    with listening.listen("127.0.0.1", 0) as listener, pytest.raises(KeyboardInterrupt):
        listening.accept(listener, "t", Settings("native", "nowhere"), "python", print)


def sample(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_weights.Files(None, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("begin", [start, serve, sample])
def test_the_next_start_removes_what_a_killed_process_left(
    killed: list[Path], monkeypatch: pytest.MonkeyPatch, begin: object
) -> None:
    own, stranger = folders.claim("engine", folders.SHARED), folders.SHARED / f"{folders.PREFIX}0-x"
    stranger.mkdir()
    try:
        begin(monkeypatch)  # type: ignore[operator]
        assert not any(path.exists() for path in killed)
        assert own.path.is_dir()
        assert stranger.is_dir(), "it has no lock, so nobody knows whose it is"
    finally:
        own.remove()
        stranger.rmdir()
    own.remove()
    assert not own.path.exists()


def test_a_folder_that_is_taken_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process starts between the folder and its lock."""
    whole, taken = os.open, list[Path]()

    def slow(path: Path, *given: int, **more: int) -> int:
        descriptor = whole(path, *given, **more)
        if not taken:
            taken.append(Path(path).parent)
            monkeypatch.setattr(folders, "_roots", lambda: [tmp_path])
            assert folders.remove_dead() == taken
        return descriptor

    monkeypatch.setattr(os, "open", slow)
    folder = folders.claim("engine", tmp_path)
    assert folder.path not in taken
    assert not folders.remove_dead()
    assert folder.path.is_dir()
    folder.remove()
