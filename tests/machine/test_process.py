"""Child processes end with everything they started, and their errors name them."""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest

from burnish.errors import ChildError
from burnish.machine.process import (
    OPEN_FILES,
    ChildProcess,
    exit_status,
    raise_open_files,
    run_command,
)

PATIENCE = 10.0
GRANDCHILD = """
import os, sys, time
pid = os.fork()
if pid:
    open(sys.argv[1], "w").write(str(pid))
time.sleep(60)
"""


def python(code: str, *arguments: Any, **how: Any) -> ChildProcess:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return ChildProcess(command, name="the probe", **how)


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ")[1][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def grandchild(file: Path) -> int:
    until(lambda: file.exists() and file.read_text() != "")
    return int(file.read_text())


@pytest.mark.parametrize("way", ["kill", "stop", "close", "forget"])
def test_the_whole_group_ends(way: str, tmp_path: Path) -> None:
    child = python(GRANDCHILD, tmp_path / "pid")
    pids = [child.pid, grandchild(tmp_path / "pid")]
    assert child.is_running
    if way == "forget":
        del child
        gc.collect()
    elif way == "close":
        child.close()
        child.close()
    else:
        assert (child.kill() if way == "kill" else child.stop(grace=0.1)) == -signal.SIGKILL
        assert not child.is_running
    until(lambda: not any(map(is_alive, pids)))


def test_a_child_that_exits_in_time_is_not_killed() -> None:
    with closing(python("import time; time.sleep(0.1); raise SystemExit(3)")) as child:
        assert child.stop(grace=PATIENCE) == 3


def test_a_fork_does_not_end_its_parents_child() -> None:
    with closing(python("import time; time.sleep(60)")) as child:
        pid = os.fork()
        if not pid:
            child.close()
            os._exit(0)
        os.waitpid(pid, 0)
        assert child.is_running


def test_a_late_child_is_named_with_its_timeout_and_the_end_of_its_output() -> None:
    code = "import sys, time\nfor i in range(50): print(i, file=sys.stderr, flush=True)\n"
    with closing(python(code + "time.sleep(60)")) as child:
        until(lambda: "49" in child.tail())
        with pytest.raises(ChildError) as error:
            child.wait(0.1)
        head, *lines = str(error.value).splitlines()
        assert head == "the probe did not exit within 0.1 s; the end of its output:"
        assert lines == [f"  {i}" for i in range(20, 50)]


def test_objects_over_a_pipe() -> None:
    code = """
import sys, time
from multiprocessing.connection import Connection
pipe = Connection(int(sys.argv[1]))
pipe.send(pipe.recv() + 1)
pipe.recv()
print("no more")
"""
    ours, theirs = Pipe()
    with closing(ours), closing(python(code, theirs.fileno(), inherited=[theirs])) as child:
        assert theirs.closed
        ours.send(41)
        assert child.receive(ours, PATIENCE) == 42
        with pytest.raises(ChildError, match=r"the probe did not respond within 0\.1 s"):
            child.receive(ours, 0.1)
        ours.send(None)
        with pytest.raises(ChildError, match=r"the probe exited with 0; .*\n  no more"):
            child.receive(ours, PATIENCE)


def test_a_socket_is_inherited_and_nothing_else() -> None:
    ours, theirs = socket.socketpair()
    code = "import os, sys; os.write(int(sys.argv[1]), b'hello')"
    with ours, closing(python(code, theirs.fileno(), inherited=[theirs])) as child:
        ours.settimeout(PATIENCE)
        assert ours.recv(100) == b"hello"
        assert ours.recv(100) == b""  # no other process holds the child's end
        assert child.wait(PATIENCE) == 0


def test_a_log_has_its_path_and_can_be_limited(tmp_path: Path) -> None:
    file = tmp_path / "log.txt"
    with closing(python("print('one'); print('two')", log=file)) as child:
        assert child.wait(PATIENCE) == 0
        assert file.read_text() == "one\ntwo\n"
        child.limit_log(100)
        assert child.tail() == ["one", "two"]
        child.limit_log(3)
        assert (child.tail(), file.read_text()) == ([], "")


def test_a_limited_log_is_appended_to() -> None:
    """A write at the old offset would leave a hole of zeros."""
    code = "import os; os.write(2, b'x' * 99); os.read(int(__import__('sys').argv[1]), 1)"
    ours, theirs = socket.socketpair()
    command = code + "; os.write(2, b'end')"
    with ours, closing(python(command, theirs.fileno(), inherited=[theirs])) as child:
        until(lambda: child.tail() == ["x" * 99])
        child.limit_log(50)
        ours.send(b"!")
        assert child.wait(PATIENCE) == 0
        assert child.tail() == ["end"]


def test_environment_directory_and_input_reach_the_child(tmp_path: Path) -> None:
    code = "import os, sys; print(os.environ['MINE'], os.getcwd(), sys.stdin.read(), end='')"
    with closing(python(code, env={"MINE": "x"}, cwd=tmp_path, stdin=b"given")) as child:
        assert child.wait(PATIENCE) == 0
        assert child.tail() == [f"x {tmp_path} given"]


def test_closing_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    python("print(1)").close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_output_of_a_command() -> None:
    code = "import sys; print('warning', file=sys.stderr); print(sys.stdin.read())"
    command = [sys.executable, "-c", code]
    how: dict[str, Any] = {"name": "the probe", "timeout": PATIENCE}
    assert run_command(command, stdin=b"x" * 100_000, **how) == b"x" * 100_000 + b"\n"
    with pytest.raises(ChildError, match=r"the probe exited with 1; (?s:.*)ZeroDivisionError"):
        run_command([sys.executable, "-c", "1 / 0"], **how)
    with pytest.raises(ChildError, match=r"the probe can't be started: .*/no/such/program"):
        run_command(["/no/such/program"], **how)
    began = time.monotonic()
    with pytest.raises(ChildError, match=r"the probe did not exit within 0\.2 s"):
        run_command(["sleep", "60"], name="the probe", timeout=0.2)
    assert time.monotonic() - began < PATIENCE


def test_exit_codes_in_words() -> None:
    assert exit_status(3) == "exited with 3"
    assert exit_status(-9) == "was killed by SIGKILL"


@pytest.mark.parametrize(
    ("soft", "hard", "expected"), [(50, 300, 300), (50, 10**9, OPEN_FILES), (10**8, 10**9, 10**8)]
)
def test_the_limit_of_open_files_is_raised_and_never_lowered(monkeypatch, soft, hard, expected):
    limits = [soft, hard]
    monkeypatch.setattr(resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(resource, "setrlimit", lambda _, new: limits.__setitem__(slice(2), new))
    assert raise_open_files() == expected
    assert limits == [expected, hard]


def test_a_limit_of_open_files_that_the_system_refuses_is_kept(monkeypatch):
    def refuse(*_):
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, resource.RLIM_INFINITY))
    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert raise_open_files() == 256
