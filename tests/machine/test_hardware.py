"""The machine as its files describe it, and what it multiplies in a moment."""

import os
import subprocess
import sys

import pytest

from burnish.machine import hardware

INTEL = "processor\t: 0\nmodel name\t: Some Xeon\nflags\t\t: fpu avx2 avx512f amx_bf16\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd sve bf16\nCPU part\t: 0xd40\n"
MEMORY = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    600 kB\n"


@pytest.fixture
def system(tmp_path, monkeypatch):
    """Writes files of an operating system that is not there."""
    monkeypatch.setattr(hardware, "SYSTEM", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)

    def write(files):
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    return write


def test_processors(system):
    system({"proc/cpuinfo": INTEL})
    assert hardware.processor() == "Some Xeon"
    assert hardware.instructions() == ("AMX", "AVX-512", "AVX2")
    system({"proc/cpuinfo": ARM})
    assert hardware.instructions() == ("BF16", "NEON")
    system({"proc/cpuinfo": ""})
    assert hardware.processor()
    assert hardware.instructions() == ()


@pytest.mark.parametrize(
    ("limit", "known", "bf16"),
    [
        ("AVX512_CORE_AMX", ("AMX", "AVX-512 BF16", "AVX-512"), True),
        ("AVX512_CORE_BF16", ("AVX-512 BF16", "AVX-512"), True),
        ("avx512_core", ("AVX-512",), False),
    ],
)
def test_the_switch_of_onednn_holds_for_burnish(system, monkeypatch, limit, known, bf16):
    system({"proc/cpuinfo": "flags\t: avx512f avx512_bf16 amx_bf16\n"})
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    assert hardware.instructions() == known
    assert hardware.supports_precision("bf16", "cpu") == bf16
    assert hardware.supports_precision("fp32", "cpu")


def test_what_a_container_grants(system):
    assert hardware.cores() == 8
    system({"proc/meminfo": MEMORY, "proc/self/cgroup": "0::/a/b\n"})
    assert hardware.memory() == (1000 * 1024, 600 * 1024)
    system({"sys/fs/cgroup/a/cpu.max": "250000 100000\n", "sys/fs/cgroup/a/b/cpu.max": "max 100\n"})
    assert hardware.cores() == 2
    group = "sys/fs/cgroup/a/memory"
    system({f"{group}.max": "300000", f"{group}.current": "200000"})
    system({f"{group}.stat": "anon 10\ninactive_file 50000\n"})
    assert hardware.memory() == (300000, 150000)
    system({f"{group}.max": "max"})
    assert hardware.memory() == (1000 * 1024, 600 * 1024)


def test_processes_that_may_be_started(system, monkeypatch):
    limits = {hardware.resource.RLIMIT_NOFILE: (10, 4000), hardware.resource.RLIMIT_NPROC: (50, 60)}
    monkeypatch.setattr(hardware.resource, "getrlimit", limits.__getitem__)
    monkeypatch.setattr(hardware.os, "getuid", lambda: 0)
    system({"proc/self/cgroup": "0::/a/b\n"})
    assert hardware.processes() == 2000  # two files each
    system({"proc/sys/kernel/pid_max": "1500\n", "proc/sys/kernel/threads-max": "9000\n"})
    assert hardware.processes() == 1500
    system({"sys/fs/cgroup/a/pids.max": "100\n", "sys/fs/cgroup/a/pids.current": "30\n"})
    system({"sys/fs/cgroup/a/b/pids.max": "max\n", "sys/fs/cgroup/a/b/pids.current": "30\n"})
    assert hardware.processes() == 70
    monkeypatch.setattr(hardware.os, "getuid", os.getuid)
    if os.getuid():
        system({"proc/77/task/77/stat": "", "proc/77/task/78/stat": ""})
        assert hardware.processes() == 48


def test_a_machine_without_such_files_is_described_too(system):
    total, available = hardware.memory()
    assert total == available > 2**20


def test_a_moment_of_products():
    rates = hardware.measure_rates(0.02, device="cpu")
    assert (rates.device, rates.precision) == ("cpu", "fp32")
    assert rates.decode_gflops > 0.01
    assert rates.learn_gflops > 0.01
    total, available = hardware.memory()
    assert 0 < available <= total
    assert hardware.cores() >= 1


def test_reading_the_machine_loads_no_torch():
    code = "from burnish.launch import preflight\nfrom burnish.machine import hardware\n"
    code += "hardware.memory(), hardware.cores()\n"
    code += "import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
