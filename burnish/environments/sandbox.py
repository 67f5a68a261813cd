"""The tool ``python``: run a model's code in a process of its own, isolated by the Linux kernel.

    resource     the code has
    network      none: a network namespace without devices
    files        an empty directory in memory, and read-only Python, its packages and /usr
    processes    one, which sees no other (a PID namespace), with threads; no fork
    memory       ``memory_bytes`` of address space, and DISK_BYTES of files
    time         the time limit of the call

Each run makes its namespaces by one fork, which needs no privileges. A second fork, the first
process of the PID namespace, executes Python. The kernel kills it with its parent, and all of its
files with it. Nothing of the episode is visible: neither its row, nor the environment's file.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import shutil
import signal
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple, NoReturn

from burnish.environments.descendants import exit_text
from burnish.environments.protocol import ToolError
from burnish.errors import DataError

OUTPUT_BYTES = 1 << 16
"""Bytes of a program's output that are kept; the rest is discarded."""
DISK_BYTES = 64 << 20
"""Size of the directory in memory."""
HOME = "/sandbox"
"""The program's directory in its sandbox."""
ROOT = "/proc"
"""Directory on which the sandbox's root is mounted; no file of Python is below it."""
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
"""Directories that Python's libraries need."""
DEVICES = ("null", "zero", "random", "urandom")
INSIDE_ID = 1000
"""User and group of the program in its sandbox, where it has no privileges."""

NEW_NAMESPACES = 0x10000000 | 0x40000000 | 0x20000000 | 0x00020000 | 0x08000000 | 0x04000000
"""Flags of unshare(2): new user, network, PID, mount, IPC and UTS namespaces."""
MS_NOSUID, MS_NODEV, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 4096, 16384, 1 << 18
MNT_DETACH = 2
MOUNT_SETATTR, AT_RECURSIVE, AT_FDCWD = 442, 0x8000, -100
READ_ONLY = 1 | 2 | 4
"""Flags of mount_setattr(2): read-only, and no set-user-ID programs and devices."""
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 22, 38
CALLS_OF = {
    "x86_64": (0xC000003E, {"clone": 56, "clone3": 435, "fork": 57, "vfork": 58, "unshare": 272}),
    "aarch64": (0xC00000B7, {"clone": 220, "clone3": 435, "unshare": 97}),
}
"""Numbers of the architecture and of system calls that start processes, by machine."""
CLONE_THREAD = 0x10000


@dataclass(frozen=True)
class PythonSource:
    """Settings of the tool ``python``."""

    name: ClassVar[str] = "python"
    memory_bytes: int = 512 << 20
    """Address space of a program."""
    is_isolated: bool = True
    """Whether programs run in a sandbox. Without it, they have the network and this user's
    files."""


class ProgramResult(NamedTuple):
    """The end of a program."""

    output: str
    """Standard output and standard error, truncated."""
    code: int
    """Exit code, negative for a signal."""


def python_tool(source: PythonSource) -> Callable[[str], str]:
    """Return the tool. Raise a DataError if this system can't isolate a program."""
    if source.is_isolated:
        check_sandbox(source)

    def python(code: str) -> str:
        """Run a Python program in a new process, and return what it prints. It has no network, and
        its files are lost when it ends.

        Args:
            code: the program; use print for results
        """
        result = run_python(code, source)
        if result.code:
            said = exit_text(result.code)
            raise ToolError(f"the program {said}\n{result.output}".rstrip())
        return result.output or "the program printed nothing"

    return python


def check_sandbox(source: PythonSource) -> None:
    """Run a program in the sandbox. Raise a DataError if the kernel refuses it."""
    off = "or set sandbox = 'off': programs then have the network and this user's files"
    if sys.platform != "linux" or os.uname().machine not in CALLS_OF:
        raise DataError(f"tool python: its sandbox needs Linux on x86-64 or ARM64; use it, {off}")
    try:
        result = run_python("print(6 * 7)", source)
    except OSError as error:
        raise DataError(
            f"tool python: the kernel refuses its sandbox ({error}); allow unprivileged user "
            "namespaces (sysctl kernel.unprivileged_userns_clone=1 or "
            "kernel.apparmor_restrict_unprivileged_userns=0; in a container, run it with "
            f"--security-opt seccomp=unconfined --security-opt systempaths=unconfined), {off}"
        ) from None
    if result.output != "42\n":
        said = f"{exit_text(result.code)} with the output {result.output[-500:]!r}"
        raise DataError(
            f"tool python: Python does not run in its sandbox: a trial {said}; raise memory_mb, "
            f"{off}"
        )


def run_python(code: str, source: PythonSource) -> ProgramResult:
    """Run a program until it ends, or until an exception, such as that of a time limit, is raised
    in this process. Raise an OSError if it can't be started."""
    with contextlib.ExitStack() as opened:
        home = ""
        if not source.is_isolated:
            home = tempfile.mkdtemp(prefix="burnish-python-")
            opened.callback(shutil.rmtree, home, ignore_errors=True)
        output, output_end = _pipe(opened)
        problem, problem_end = _pipe(opened)
        pid = os.fork()
        if not pid:
            _become_program(code, source, home, output_end, problem_end)
        opened.callback(_end, pid)
        os.close(output_end)
        os.close(problem_end)
        if said := os.read(problem, 1000):  # it is closed when the program begins
            raise OSError(said.decode())
        text, code_of = _read_output(output, pid)
    shown = text[:OUTPUT_BYTES].decode(errors="replace")
    if len(text) > OUTPUT_BYTES:
        shown += "\n[the rest of the output is discarded]"
    return ProgramResult(shown, code_of)


def _pipe(opened: contextlib.ExitStack) -> tuple[int, int]:
    """Open a pipe whose ends are closed with the stack, unless they are closed before."""
    ends = os.pipe()
    for end in ends:
        opened.callback(_close, end, os.fstat(end).st_ino)
    return ends


def _close(descriptor: int, inode: int) -> None:
    with contextlib.suppress(OSError):
        if os.fstat(descriptor).st_ino == inode:
            os.close(descriptor)


def _end(pid: int) -> None:
    """Kill a program that has not ended, and what it has started."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _read_output(output: int, pid: int) -> tuple[bytes, int]:
    """Read a program's output until it ends; return its beginning and the exit code. A process that
    it has left behind does not delay the end."""
    kept = bytearray()
    os.set_blocking(output, False)
    is_open, status = True, None
    while is_open or status is None:
        if is_open:
            select.select([output], [], [], 0.05)
            is_open = _read_into(kept, output)
        if status is None:
            ended, found = os.waitpid(pid, os.WNOHANG if is_open else 0)
            status = found if ended else None
        elif is_open:
            break
    if is_open:
        _read_into(kept, output)
    assert status is not None
    return bytes(kept), os.waitstatus_to_exitcode(status)


def _read_into(kept: bytearray, output: int) -> bool:
    """Read what is available; return whether more may come."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(16):
            part = os.read(output, 1 << 16)
            if not part:
                return False
            if len(kept) <= OUTPUT_BYTES:
                kept += part
    return True


def _become_program(
    code: str, source: PythonSource, home: str, output: int, problem: int
) -> NoReturn:
    """Turn this fork into the program's parent, or without isolation into the program."""
    try:
        os.setsid()
        for number in range(1, signal.NSIG):
            with contextlib.suppress(OSError, ValueError):
                signal.signal(number, signal.SIG_DFL)
        if source.is_isolated:
            _enter_sandbox()
            home = HOME
            if child := os.fork():
                os.close(output)
                os.close(problem)
                _exit_like(os.waitpid(child, 0)[1])
            os.setsid()
            _libc().prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        _execute(code, source, home, output, problem)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.write(problem, str(error).encode(errors="replace")[:1000] or b"unknown")
    finally:
        os._exit(1)


def _execute(code: str, source: PythonSource, home: str, output: int, problem: int) -> NoReturn:
    os.chdir(home)
    Path(home, "main.py").write_bytes(code.encode(errors="replace"))
    nothing = os.open("/dev/null", os.O_RDONLY)
    for given, wanted in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(given, wanted)
    os.closerange(3, problem)
    os.closerange(problem + 1, 1 << 16)
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    most = source.memory_bytes if hard < 0 else min(source.memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if source.is_isolated:
        _forbid_processes()
    env = {
        "PATH": os.defpath,
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    arguments = [sys.executable, "-I", "-B", "-X", "utf8", os.path.join(home, "main.py")]
    # A virtual environment's Python may be a link through directories that the sandbox lacks.
    program = os.path.realpath(sys.executable) if source.is_isolated else sys.executable
    os.execve(program, arguments, env)


def _exit_like(status: int) -> NoReturn:
    """End this process as the one with this status has ended."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 1)


def _enter_sandbox() -> None:
    """Make the namespaces of a program and move into a root directory in memory. The next fork is
    the first process of the PID namespace."""
    user, group = os.getuid(), os.getgid()
    _check(_libc().unshare(NEW_NAMESPACES), "unshare")
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{INSIDE_ID} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{INSIDE_ID} {group} 1")
    sources = list(_python_directories())  # before ROOT is hidden
    libraries = Path("/etc/ld.so.cache")
    cached = libraries.read_bytes() if libraries.exists() else b""
    _mount("none", "/", None, MS_REC | MS_PRIVATE)
    _mount("tmpfs", ROOT, "tmpfs", MS_NOSUID | MS_NODEV, f"size={DISK_BYTES},mode=755")
    for directory in ("etc", "dev", "tmp", HOME.strip("/")):
        os.mkdir(f"{ROOT}/{directory}")
    Path(ROOT, "etc/ld.so.cache").write_bytes(cached)
    for device in DEVICES:
        Path(ROOT, "dev", device).touch()
        _mount(f"/dev/{device}", f"{ROOT}/dev/{device}", None, MS_BIND)
    for directory in sources:
        if os.path.islink(directory) and directory in SYSTEM:
            os.symlink(os.readlink(directory), ROOT + directory)
            continue
        os.makedirs(ROOT + directory, exist_ok=True)
        _mount(directory, ROOT + directory, None, MS_BIND | MS_REC)
        _make_read_only(ROOT + directory)
    os.chdir(ROOT)
    _check(_libc().pivot_root(b".", b"."), "pivot_root")
    _check(_libc().umount2(b".", MNT_DETACH), "umount")
    os.chdir("/")


def _python_directories() -> Iterator[str]:
    """Yield the directories that a program may read, none of them below another."""
    wanted = [os.path.abspath(prefix) for prefix in (sys.prefix, sys.base_prefix)]
    wanted += [os.path.realpath(prefix) for prefix in wanted]
    wanted.append(os.path.dirname(os.path.dirname(os.path.realpath(sys.executable))))
    present = [path for path in SYSTEM if os.path.isdir(path)]
    for path in dict.fromkeys([*present, *sorted(wanted, key=len)]):
        if path != "/" and not any(path.startswith(f"{other}/") for other in present):
            present.append(path)
            yield path


def _mount(
    source: str, target: str, kind: str | None, flags: int, options: str | None = None
) -> None:
    given = [None if text is None else text.encode() for text in (source, target, kind, options)]
    _check(_libc().mount(*given[:3], ctypes.c_ulong(flags), given[3]), f"mount {target}")


def _make_read_only(path: str) -> None:
    """Make a mount and all mounts below it read-only, which needs Linux 5.12."""
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", READ_ONLY, 0, 0, 0), 32)
    call = _libc().syscall
    _check(
        call(MOUNT_SETATTR, AT_FDCWD, path.encode(), AT_RECURSIVE, attributes, ctypes.c_size_t(32)),
        "mount_setattr",
    )


def _forbid_processes() -> None:
    """Let the kernel refuse new processes and namespaces, but not threads, in this process."""
    architecture, numbers = CALLS_OF[os.uname().machine]
    refused, missing, allowed = 0x00050000 | 1, 0x00050000 | 38, 0x7FFF0000  # EPERM, ENOSYS, allow
    load, equal, above, has, end = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of the filter
    program = [
        (load, 0, 0, 4),  # the architecture
        (equal, 1, 0, architecture),
        (end, 0, 0, refused),
        (load, 0, 0, 0),  # the number of the call
        (above, 0, 1, 0x40000000),  # x32
        (end, 0, 0, refused),
        (equal, 0, 1, numbers["clone3"]),  # its flags can't be read; libraries then use clone
        (end, 0, 0, missing),
    ]
    for name in ("fork", "vfork", "unshare"):
        if name in numbers:
            program += [(equal, 0, 1, numbers[name]), (end, 0, 0, refused)]
    program += [
        (equal, 0, 3, numbers["clone"]),
        (load, 0, 0, 16),  # the lower half of the flags
        (has, 1, 0, CLONE_THREAD),
        (end, 0, 0, refused),
        (end, 0, 0, allowed),
    ]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code))
    prctl = _libc().prctl
    _check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    _check(prctl(PR_SET_SECCOMP, 2, ctypes.create_string_buffer(header, 16), 0, 0), "seccomp")


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, call: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(f"{call}: {os.strerror(number)}")
