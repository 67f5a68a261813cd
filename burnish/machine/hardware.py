"""The machine of a run: its cores, their instruction sets, its memory, disk and GPU.

Most functions take milliseconds and do not load torch. The exceptions are those about the GPU, and
``measure_rates``, which multiplies matrices for about a second.
"""

from __future__ import annotations

import os
import platform
import resource
import shutil
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from burnish.types import Rates

SYSTEM = Path("/")
"""Root of the operating system's files; tests replace it."""
INSTRUCTIONS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 BF16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "bf16": "BF16",
    "asimd": "NEON",
}
"""Instruction sets that determine the speed of matrix products, by their flag in /proc/cpuinfo."""
MULTIPLY_BF16 = ("AMX", "AVX-512 BF16", "BF16")
"""Instruction sets with bf16 products. Without them, bf16 is converted to fp32, like fp16."""
CORES = "BURNISH_CORES"
"""Environment variable with the maximum number of cores of a process."""
LIMIT = "ONEDNN_MAX_CPU_ISA"
"""oneDNN's environment variable that limits the instruction sets; burnish's choice of precision
respects it, too."""
_ANY = ("DEFAULT", "ALL", "AMX")
ALLOWED_BY = {"AMX": _ANY, "AVX-512 BF16": (*_ANY, "FP16", "AVX10", "BF16")}
"""For each instruction set that ``LIMIT`` can disable: words in the variable's value that allow
it."""
WIDTHS = {"cpu": (576, 3072), "cuda": (4096, 4096)}
"""Input and output width of a measured matrix product: on a CPU, those of the default model; on a
GPU, wide enough for its full speed."""
ROWS = {"cpu": (64, 1024), "cuda": (1024, 16384)}
"""Number of rows of a product during sampling and during training, by device."""
MATRICES = 16
"""Number of weights that are multiplied in turn, so that they are read from memory, not a cache."""

QUIET = 5
"""The speed is measured by the fastest fifth of the products: at least one product in this many is
assumed to run undisturbed by other programs."""


def set_up_torch(threads: int) -> None:
    """Configure torch, for the whole process, to give bit-exact results with ``threads`` CPU
    threads. Call it before torch uses a device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # By default torch then also fills new memory with NaN to reveal reads of uninitialised memory.
    # There are none (a test compares), and filling takes 5% or more of a gradient step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which this GPU is the thread's current one; on a CPU it does nothing.
    Triton's kernels, streams and CUDA graphs use the current GPU, wherever their tensors are."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def gpu() -> str | None:
    """Return the name of the first GPU; None if torch finds none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def measure_rates(
    seconds: float = 1.0, *, precision: str = "fp32", device: str | None = None
) -> Rates:
    """Measure how fast a device multiplies matrices of the shapes in `WIDTHS` and `ROWS`, which
    takes about ``seconds``. The rates, in 10⁹ operations per second, estimate an otherwise idle
    machine.

    ``precision`` is fp32, bf16 or fp16; fp32 is measured if the device has no instructions for it.
    ``device`` is cpu or cuda; None selects a GPU if there is one, like device = 'auto'.
    """
    import torch

    from burnish.types import Rates

    where = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    precision = precision if supports_precision(precision, where) else "fp32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    wide, long = WIDTHS[where]
    weights = [torch.full((wide, long), 0.01, dtype=dtype, device=where) for _ in range(MATRICES)]
    together = MATRICES if where == "cuda" else 1  # products before waiting for the device

    def rate(rows: int) -> float:
        x = torch.full((rows, wide), 0.01, dtype=dtype, device=where)
        times: list[float] = []
        while len(times) < 3 or sum(times) < seconds / 2:
            start = time.perf_counter()
            for number in range(together):
                x @ weights[(len(times) + number) % MATRICES]
            if where == "cuda":
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        fast = sorted(times)[len(times) // QUIET]
        return 2e-9 * rows * wide * long * together / fast

    few, many = ROWS[where]
    with torch.inference_mode():
        return Rates(where, precision, rate(few), rate(many))


def cores() -> int:
    """Return the number of cores that this process may use: its affinity, limited by a container's
    quota and by the environment variable BURNISH_CORES."""
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS has none
    usable = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for group in _groups():
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit():
            usable = min(usable, max(1, int(quota) // int(period)))
    return min(usable, max(1, int(os.environ.get(CORES, usable))))


def load() -> tuple[float, int]:
    """Return the mean number of processes that wanted a core in the last minute, and the machine's
    number of cores. The former is 0 if the system does not report it."""
    try:
        average = os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows, and containers that hide it
        average = 0.0
    return average, os.cpu_count() or 1


def processor() -> str:
    """Return the name of the processor's model, or of its architecture if the name is unknown."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def instructions() -> tuple[str, ...]:
    """Return the names of the instruction sets that the processor has and that ONEDNN_MAX_CPU_ISA
    allows, best first."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    limit = os.environ.get(LIMIT, "DEFAULT").upper()
    known = [name for flag, name in INSTRUCTIONS.items() if flag in flags]
    return tuple(
        name
        for name in known
        if name not in ALLOWED_BY or any(word in limit for word in ALLOWED_BY[name])
    )


def supports_precision(precision: str, device: str) -> bool:
    """Return whether ``device``, cpu or cuda, has instructions for matrix products in
    ``precision``: fp32, bf16 or fp16."""
    if precision == "fp32":
        return True
    if device != "cpu":
        import torch

        return precision == "fp16" or torch.cuda.get_device_capability(device) >= (8, 0)
    return precision == "bf16" and any(name in MULTIPLY_BF16 for name in instructions())


def disk(path: Path) -> int:
    """Return the number of free bytes on the disk of a path, which may not exist yet."""
    path = path.absolute()
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.is_dir())).free


def memory(device: str = "cpu") -> tuple[int, int]:
    """Return the total and the free memory of a device, in bytes. For the CPU, both respect the
    limit of a container; on a GPU, memory that torch has cached counts as free."""
    if device != "cpu":
        import torch

        free, whole = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return whole, free + own
    info = dict(line.split(":", 1) for line in _read(SYSTEM / "proc/meminfo").splitlines())
    if "MemAvailable" in info:
        total, free = (int(info[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    else:
        total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _groups():
        limit, used = (_read(group / f"memory.{name}") for name in ("max", "current"))
        if limit.isdigit() and int(limit) < total:
            caches = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            held = int(used) - int(caches.get("inactive_file", 0))
            total, free = int(limit), min(free, int(limit) - held)
    return total, max(0, free)


def processes() -> int:
    """Return the number of processes that this one may start before the system refuses more: by the
    limits of the user, of a container and of the kernel, and by the number of open files if each
    process needs two."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = [] if files == resource.RLIM_INFINITY else [files // 2]
    own, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if own != resource.RLIM_INFINITY and os.getuid():  # the kernel ignores root's limit
        most.append(own - _threads_of(os.getuid()))
    for name in ("pid_max", "threads-max"):
        value = _read(SYSTEM / "proc/sys/kernel" / name)
        most += [int(value)] if value.isdigit() else []
    for group in _groups():
        limit, used = (_read(group / f"pids.{name}") for name in ("max", "current"))
        if limit.isdigit():
            most.append(int(limit) - int(used or 0))
    return max(0, min(most, default=1 << 15))


def _threads_of(user: int) -> int:
    """Return the number of threads of a user's processes."""
    count = 0
    for folder in (SYSTEM / "proc").glob("[0-9]*"):
        with suppress(OSError):
            if folder.stat().st_uid == user:
                count += len(list((folder / "task").iterdir()))
    return count


def _cpuinfo(key: str) -> str:
    for line in _read(SYSTEM / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _groups() -> list[Path]:
    """Return the directories of the Linux control groups (version 2) that limit this process,
    outermost first."""
    root, lines = SYSTEM / "sys/fs/cgroup", _read(SYSTEM / "proc/self/cgroup").splitlines()
    own = root / next((line[4:] for line in lines if line.startswith("0::/")), "")
    return [group for group in (*reversed(own.parents), own) if group.is_relative_to(root)]


def _read(path: Path) -> str:
    """Return the text of a file; empty if it can't be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
