"""Folders of engines whose process was killed are removed by the next start, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.engine.remote import client, sglang_weights
from burnish.engine.remote import listener as listening
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.machine import folders

KILLED = """
import os, signal, socket, sys, time
from burnish.engine.remote import client
from burnish.engine.settings import EngineSettings
from burnish.machine import folders
ours, theirs = socket.socketpair()
child = client.EngineProcess(sys.executable, EngineSettings("native", "nowhere"), theirs)
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

    monkeypatch.setattr(client, "EngineProcess", refuse)
    with pytest.raises(EngineError, match="no engine here"):
        client.start_engine(EngineSettings("native", "nowhere"), python="python", deadline=1)


def serve(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(listening.Door, "next", interrupt)
    with listening.open_listener("127.0.0.1", 0) as listener, pytest.raises(KeyboardInterrupt):
        listening.accept(listener, "t", EngineSettings("native", "nowhere"), "python", print)


def sample(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_weights.SharedFiles(None, {})  # type: ignore[arg-type]


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


OWNER = """
import sys, time
from pathlib import Path
from burnish.machine.folders import claim
folder = claim("run", Path(sys.argv[1]))
(folder.path / "weights").write_bytes(bytes(1000))
print(folder.path, flush=True)
time.sleep(60)
"""


def owner(root: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a folder of shared memory, and its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(root)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as said:
        return process, Path(said.readline().strip())


def test_the_folders_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    (dead, lost), (living, kept) = owner(tmp_path), owner(tmp_path)
    own = folders.claim("run", tmp_path)
    (tmp_path / "burnish-run-without-lock").mkdir()
    (tmp_path / "another").mkdir()
    try:
        dead.send_signal(signal.SIGKILL)
        dead.wait(timeout=20)
        assert (lost / "weights").exists()
        assert folders.remove_dead(tmp_path) == [lost]
        assert folders.remove_dead(tmp_path) == []
        assert not lost.exists()
        assert (kept / "weights").exists()
        left = {"burnish-run-without-lock", "another", kept.name, own.path.name}
        assert {path.name for path in tmp_path.iterdir()} == left
    finally:
        living.kill()
        living.wait(timeout=20)
    own.remove()
    own.remove()
    assert not own.path.exists()


RACE = """
import sys
from pathlib import Path
from burnish.machine.folders import claim, remove_dead
root = Path(sys.argv[1])
for _ in range(100):
    folder = claim("run", root)
    remove_dead(root)
    (folder.path / "weights").write_bytes(b"w")
    assert (folder.path / "weights").read_bytes() == b"w"
    folder.remove()
"""


def test_runs_that_begin_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    """A folder is not locked for a moment after it was made."""
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    runs = [subprocess.Popen(command) for _ in range(3)]
    assert [run.wait(timeout=60) for run in runs] == [0, 0, 0]
