"""The machine that a run would use: its cores, their instructions, its memory, disk and GPU.

Reading it takes milliseconds and no torch, but for the GPU and for ``measure``, which multiplies
matrices for about a second.
"""

from __future__ import annotations

import os
import platform
import shutil
import time
from pathlib import Path
from typing import NamedTuple

SYSTEM = Path("/")
"""Where the files of the operating system are; tests have others."""
INSTRUCTIONS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 BF16",
    "avx512f": "AVX-512",
    "avx2": "AVX2",
    "bf16": "BF16",
    "asimd": "NEON",
}
"""Flags of /proc/cpuinfo that decide how fast matrices are multiplied, and their names."""
MULTIPLY_BF16 = ("AMX", "AVX-512 BF16", "BF16")
"""The instructions that multiply bf16; without them, as fp16 always is, it is widened to fp32."""
CORES = "BURNISH_CORES"
"""The variable of the environment that says how many cores a process may use at most."""
LIMIT = "ONEDNN_MAX_CPU_ISA"
"""The switch of oneDNN, which burnish's choice of precision follows as well."""
_ANY = ("DEFAULT", "ALL", "AMX")
ALLOWED_BY = {"AMX": _ANY, "AVX-512 BF16": (*_ANY, "FP16", "AVX10", "BF16")}
"""For each instruction set that the switch can turn off: the words of its values that keep it."""
WIDTHS = (576, 3072)
"""The widths of a product in the default model."""
ROWS = {"cpu": (64, 1024), "cuda": (1024, 16384)}
"""Rows of a product while text is sampled and while it is learned, by device."""
MATRICES = 16
"""Weights that are multiplied in turn, so that they come from memory and not from a cache."""

QUIET = 5
"""One product in so many is taken to have run undisturbed by other programs."""


class Rates(NamedTuple):
    """How fast a device multiplies matrices, in 10⁹ operations a second."""

    device: str
    precision: str
    """The precision of the products: fp32 in the place of bf16 if the processor widens bf16."""
    decode_gflops: float
    """With few rows, as when text is sampled."""
    learn_gflops: float
    """With many rows, as when text is scored or learned."""


def set_up_torch(threads: int) -> None:
    """Sets torch up as bit-exactness needs it, before it touches a device."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    import torch

    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # torch then also fills all fresh memory with NaN, so that a read before a write is seen. There
    # is none (a test compares), and filling takes 5% or more of a gradient step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def gpu() -> str | None:
    """The name of the first GPU; None if torch finds none."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def measure(seconds: float = 1.0, *, precision: str = "fp32", device: str | None = None) -> Rates:
    """Multiplies matrices of the default model's shapes for about ``seconds``. The rates are those
    of a machine that does nothing else.

    ``device`` is cpu or cuda; None takes a GPU if there is one, as device = 'auto' does.
    """
    import torch

    where = (device or ("cuda" if torch.cuda.is_available() else "cpu")).partition(":")[0]
    precision = precision if multiplies(precision, where) else "fp32"
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    wide, long = WIDTHS
    weights = [torch.full((wide, long), 0.01, dtype=dtype, device=where) for _ in range(MATRICES)]
    together = MATRICES if where == "cuda" else 1  # products until the device is waited for

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
    """Cores that this process may use: its affinity, at most a container's quota, and at most as
    many as the environment says."""
    has_affinity = hasattr(os, "sched_getaffinity")  # macOS has none
    usable = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    for group in _groups():
        quota, _, period = _read(group / "cpu.max").partition(" ")
        if quota.isdigit():
            usable = min(usable, max(1, int(quota) // int(period)))
    return min(usable, max(1, int(os.environ.get(CORES, usable))))


def processor() -> str:
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def instructions() -> tuple[str, ...]:
    """Instruction sets that the processor has and ``ONEDNN_MAX_CPU_ISA`` allows, the strongest
    first."""
    flags = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    limit = os.environ.get(LIMIT, "DEFAULT").upper()
    known = [name for flag, name in INSTRUCTIONS.items() if flag in flags]
    return tuple(
        name
        for name in known
        if name not in ALLOWED_BY or any(word in limit for word in ALLOWED_BY[name])
    )


def multiplies(precision: str, device: str) -> bool:
    """Whether the device, cpu or cuda, has instructions for products of fp32, bf16 or fp16."""
    if precision == "fp32":
        return True
    if device != "cpu":
        import torch

        return precision == "fp16" or torch.cuda.get_device_capability(device) >= (8, 0)
    return precision == "bf16" and any(name in MULTIPLY_BF16 for name in instructions())


def disk(path: Path) -> int:
    """Bytes that are free where the path is, or would be."""
    path = path.absolute()
    return shutil.disk_usage(next(p for p in (path, *path.parents) if p.is_dir())).free


def memory(device: str = "cpu") -> tuple[int, int]:
    """All bytes of a device, and the bytes that are free. For the processor, both are at most the
    limit of its container."""
    if device != "cpu":
        import torch

        free, whole = torch.cuda.mem_get_info(device)
        own = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return whole, free + own
    told = dict(line.split(":", 1) for line in _read(SYSTEM / "proc/meminfo").splitlines())
    if "MemAvailable" in told:
        total, free = (int(told[name].split()[0]) * 1024 for name in ("MemTotal", "MemAvailable"))
    else:
        total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for group in _groups():
        limit, used = (_read(group / f"memory.{name}") for name in ("max", "current"))
        if limit.isdigit() and int(limit) < total:
            caches = dict(line.split() for line in _read(group / "memory.stat").splitlines())
            held = int(used) - int(caches.get("inactive_file", 0))
            total, free = int(limit), min(free, int(limit) - held)
    return total, max(0, free)


def _cpuinfo(key: str) -> str:
    for line in _read(SYSTEM / "proc/cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == key:
            return value.strip()
    return ""


def _groups() -> list[Path]:
    """The control groups (version 2) that bound this process, from the outermost in."""
    root, lines = SYSTEM / "sys/fs/cgroup", _read(SYSTEM / "proc/self/cgroup").splitlines()
    own = root / next((line[4:] for line in lines if line.startswith("0::/")), "")
    return [group for group in (*reversed(own.parents), own) if group.is_relative_to(root)]


def _read(path: Path) -> str:
    """A file's text; empty if there is none."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
