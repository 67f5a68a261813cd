"""Programs of a model: isolated from the network, from files and from other processes."""

import errno
import os
import socket
import sys
import time
from pathlib import Path

import pytest

from burnish.environments import sandbox
from burnish.environments.protocol import ToolError
from burnish.environments.sandbox import PythonSource, python_tool, run_python
from burnish.errors import DataError
from tests.environments.conftest import descendants


def _refusal():
    try:
        sandbox.check_sandbox(PythonSource())
    except DataError as error:
        return str(error)
    return None


REFUSAL = _refusal()
needs_sandbox = pytest.mark.skipif(REFUSAL is not None, reason=str(REFUSAL))
BOTH = [pytest.param(True, marks=needs_sandbox), False]


def run(code, is_isolated=True, **settings):
    return run_python(code, PythonSource(is_isolated=is_isolated, **settings))


@pytest.mark.parametrize("is_isolated", BOTH)
def test_a_program_prints(is_isolated):
    assert run("print(6 * 7)", is_isolated) == ("42\n", 0)
    result = run("import sys; print('é'); sys.exit('no')", is_isolated)
    assert result == ("é\nno\n", 1)
    assert "ZeroDivisionError: division by zero" in run("1 / 0", is_isolated).output
    assert run("import ctypes; ctypes.string_at(0)", is_isolated).code == -11
    assert run("print(input())", is_isolated).output.endswith("EOFError: EOF when reading a line\n")
    assert run("x = '\ud800'", is_isolated).code == 0
    assert run("import fractions, json, decimal, sqlite3, ctypes", is_isolated).code == 0


@pytest.mark.parametrize("is_isolated", BOTH)
def test_output_and_memory_are_bounded(is_isolated):
    result = run("print('x' * (1 << 30))", is_isolated, memory_bytes=3 << 30)
    assert len(result.output) < sandbox.OUTPUT_BYTES + 100
    assert result.output.endswith("[the rest of the output is discarded]")
    assert "MemoryError" in run("x = bytearray(1 << 30)", is_isolated).output


@needs_sandbox
def test_the_disk_is_bounded():
    code = "with open('f', 'wb') as f:\n    while True: f.write(bytes(1 << 20))"
    assert "No space left on device" in run(code).output


@needs_sandbox
def test_there_is_no_network():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code = f"import socket\nsocket.create_connection(('127.0.0.1', {port}), 5)"
        assert run(code, is_isolated=False).code == 0
        assert "Network is unreachable" in run(code).output
    name = f"\0burnish-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as server:  # an abstract address belongs to no file
        server.bind(name)
        server.listen()
        code = f"import socket\nsocket.socket(socket.AF_UNIX).connect({name!r})"
        assert "ConnectionRefusedError" in run(code).output


@needs_sandbox
def test_there_are_no_files_but_pythons(tmp_path):
    (tmp_path / "answer").write_text("42")
    for path in (
        tmp_path / "answer",
        "/etc/passwd",
        "/proc/self/status",
        Path(__file__),
        Path.home() / "x",
    ):
        assert "FileNotFoundError" in run(f"open({str(path)!r})").output
    found = run("import os; print(sorted(os.listdir('/')), os.listdir())").output
    assert "'sandbox'" in found
    assert not {"home", "proc", "var", "sys", "mnt", "run"} & set(found.split("'"))
    assert found.endswith("['main.py']\n")
    for place in ("/usr/x", f"{sys.prefix}/x", f"{os.path.realpath(sys.base_prefix)}/lib/x"):
        assert "Read-only file system" in run(f"open({place!r}, 'w')").output


@needs_sandbox
def test_runs_share_nothing():
    run("open('mine', 'w').write('1'); open('/tmp/mine', 'w').write('1')")
    code = "import os; print(os.listdir(), os.path.exists('/tmp/mine'))"
    assert run(code).output == "['main.py'] False\n"


@needs_sandbox
def test_there_are_no_other_processes():
    assert run("import os; print(os.getpid(), os.getppid(), os.getuid())").output == "1 0 1000\n"
    for code in (
        "os.fork()",
        "import subprocess; subprocess.run(['true'])",
        "os.posix_spawn('/usr/bin/true', ['true'], {})",
    ):
        assert "Operation not permitted" in run(f"import os; {code}").output
    assert "ProcessLookupError" in run("import os; os.kill(-1, 9)").output
    code = "import ctypes; print(ctypes.CDLL(None).unshare(0x10000000))"
    assert run(code).output == "-1\n"
    code = "import threading; t = threading.Thread(target=print, args='t'); t.start(); t.join()"
    assert run(code).output == "t\n"


@needs_sandbox
def test_there_are_no_privileges():
    code = (
        "import ctypes; libc = ctypes.CDLL(None)\n"
        "print(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None), libc.chroot(b'/tmp'))\n"
        "import os; print({name for name in os.environ if 'KEY' in name or 'TOKEN' in name})"
    )
    assert run(code).output == "-1 -1\nset()\n"


@pytest.mark.parametrize("is_isolated", BOTH)
@pytest.mark.parametrize("code", ["while True: pass", "import time; print('a'); time.sleep(60)"])
def test_an_interrupted_program_is_killed(is_isolated, code, monkeypatch):
    class Late(BaseException):
        pass

    read, began = sandbox._read_into, time.monotonic()

    def late(*args):
        if time.monotonic() - began > 0.5:
            assert descendants(os.getpid())
            raise Late
        return read(*args)

    monkeypatch.setattr(sandbox, "_read_into", late)
    before, files = set(descendants(os.getpid())), len(os.listdir("/proc/self/fd"))
    with pytest.raises(Late):
        run(code, is_isolated)
    deadline = time.monotonic() + 5
    while set(descendants(os.getpid())) - before and time.monotonic() < deadline:
        time.sleep(0.02)
    assert set(descendants(os.getpid())) <= before
    assert len(os.listdir("/proc/self/fd")) == files


def test_without_a_sandbox_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(sandbox.tempfile, "tempdir", str(tmp_path))
    code = "import subprocess, os; print(os.getcwd()); subprocess.Popen(['sleep', '60'])"
    began = time.monotonic()
    result = run(code, is_isolated=False)
    assert result.output.startswith(f"{tmp_path}/burnish-python-")
    assert time.monotonic() - began < 10
    assert not list(tmp_path.iterdir())
    assert not [pid for pid in descendants(os.getpid()) if "sleep" in _command(pid)]


def _command(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def test_a_kernel_that_refuses_the_sandbox(monkeypatch):
    def refuse():
        raise OSError(errno.EPERM, "unshare: Operation not permitted")

    monkeypatch.setattr(sandbox, "_enter_sandbox", refuse)
    with pytest.raises(DataError, match=r"the kernel refuses its sandbox .*unshare: .*'off'"):
        python_tool(PythonSource())
    assert python_tool(PythonSource(is_isolated=False))("print(1)") == "1\n"
    monkeypatch.setattr(sandbox.sys, "platform", "darwin")
    with pytest.raises(DataError, match=r"needs Linux on x86-64 or ARM64; .*'off'"):
        python_tool(PythonSource())


@needs_sandbox
def test_the_tool():
    python = python_tool(PythonSource())
    assert python("print('a')") == "a\n"
    assert python("pass") == "the program printed nothing"
    with pytest.raises(ToolError, match=r"(?s)^the program exited with 1\nTraceback.*NameError"):
        python("x")
