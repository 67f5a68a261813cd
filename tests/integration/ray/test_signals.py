"""SIGTERM and Ctrl-C in runs on Ray: they are saved, and end as runs in one process do."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

pytest.importorskip("ray", reason="the extra 'ray' is not installed")

pytestmark = pytest.mark.slow

SYNC: list[str] = []
LAGGED = ["objective.proximal=behavior", "loop.lag=1"]
FREE = ["objective.proximal=behavior", "loop.name=free", "loop.max_lag=20", "loop.on_update=keep"]
PATIENCE = 300.0
"""Seconds that a run may take to begin, and to end."""


@pytest.fixture
def watch() -> Iterator[type[Watched]]:
    """`Watched`, whose runs end with the test, also if it fails."""
    yield Watched
    for run in Watched.begun:
        below = running([*run.children, *descendants(run.process.pid)])
        run.process.kill()
        for pid in below:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        run.process.wait()
    Watched.begun.clear()


class Watched:
    """A run of `burnish train sort` on Ray in a process group of its own."""

    begun: ClassVar[list[Watched]] = []

    def __init__(self, folder: Path, settings: list[str], script: str = "") -> None:
        self.path = folder / "run"
        changes = ["train.steps=100000", "checkpoint.every=100000", *settings]
        flags = [flag for change in changes for flag in ("--set", change)]
        code = f"from burnish.cli import main as cli\n{script}\ncli.main()\n"
        command = [sys.executable, "-c", code, "train", "sort", "--out", "run", "--quiet"]
        self.process = subprocess.Popen(
            [*command, "--runtime", "ray", *flags],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        Watched.begun.append(self)
        self.children: list[int] = []
        self.said = ""

    def steps(self) -> int:
        """The last step of metrics.jsonl; -1 if there is none."""
        file = self.path / "metrics.jsonl"
        rows = file.read_text().splitlines() if file.exists() else []
        return json.loads(rows[-1])["step"] if rows else -1

    def wait_for(self, what: str, there: Callable[[], Any]) -> None:
        end = time.monotonic() + PATIENCE
        while not there():
            assert self.process.poll() is None, self.process.communicate()[0]
            assert time.monotonic() < end, f"no {what} within {PATIENCE:g} s"
            time.sleep(0.05)
        self.children = descendants(self.process.pid)

    def end(self) -> int:
        self.said, _ = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode is not None
        return self.process.returncode

    def saved(self) -> list[str]:
        return sorted(path.name for path in self.path.glob("checkpoints/step-*"))

    def left_over(self) -> list[str]:
        """Processes of the run that are alive 20 seconds after its end."""
        end = time.monotonic() + 20
        while (left := running(self.children)) and time.monotonic() < end:
            time.sleep(0.2)
        return list(left.values())


def running(pids: list[int]) -> dict[int, str]:
    """The names of processes that have not ended, by their pids."""
    found = {}
    for pid in pids:
        with suppress(OSError):
            name, _, rest = Path(f"/proc/{pid}/stat").read_text().rpartition(")")
            if rest.split()[0] != "Z":
                found[pid] = name
    return found


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and that these have started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    found = [pid]
    for one in found:  # it grows
        found += [child for child, parent in parents.items() if parent == one]
    return found[1:]


def to_process(run: Watched, number: int) -> None:
    run.process.send_signal(number)


def to_group(run: Watched, number: int) -> None:
    """As a shell and `timeout` do: Ray's own processes share the group of the run."""
    os.killpg(run.process.pid, number)


def to_all(run: Watched, number: int) -> None:
    """As Slurm does with all processes of a job step, whatever their groups are."""
    for pid in [run.process.pid, *run.children]:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


@pytest.mark.parametrize(
    ("settings", "send"),
    [
        pytest.param(SYNC, to_process, marks=pytest.mark.extra),
        (LAGGED, to_group),
        (LAGGED, to_all),
        pytest.param(FREE, to_all, marks=pytest.mark.extra),
    ],
    ids=["sync, process", "lagged, group", "lagged, all", "free, all"],
)
def test_sigterm_saves_and_ends_with_143(
    watch: type[Watched], tmp_path: Path, settings: list[str], send: Any
) -> None:
    run = watch(tmp_path, settings)
    run.wait_for("third step", lambda: run.steps() >= 3)
    send(run, signal.SIGTERM)
    assert run.end() == 143, run.said
    assert "stopped and saved; continue with: burnish resume run" in run.said
    assert run.saved() == [f"step-{run.steps():08d}"]
    assert run.steps() >= 3
    for noise in ("SIGTERM received", "Traceback", "died"):
        assert noise not in run.said
    assert json.loads((run.path / "status.json").read_text())["state"] == "stopped"
    assert run.left_over() == []


SLOW_SAVE = """
import time
from pathlib import Path
from burnish.runs import checkpoints
real = checkpoints.save_checkpoint
def save(path, step, *given, **more):
    if step > 4:
        Path("saving").touch()
        time.sleep(60)
    return real(path, step, *given, **more)
checkpoints.save_checkpoint = save
"""


@pytest.mark.parametrize(
    "second",
    [pytest.param(signal.SIGTERM, marks=pytest.mark.extra), signal.SIGINT],
    ids=["SIGTERM", "Ctrl-C"],
)
def test_a_second_signal_while_it_saves_stops_at_once(
    watch: type[Watched], tmp_path: Path, second: int
) -> None:
    """What was saved before is kept, and no process and no file is left."""
    run = watch(tmp_path, [*LAGGED, "checkpoint.every=4"], SLOW_SAVE)
    run.wait_for("fourth step", lambda: run.steps() >= 4)
    to_all(run, signal.SIGTERM)
    run.wait_for("checkpoint after the signal", (tmp_path / "saving").exists)
    time.sleep(0.4)  # what comes sooner is the same request
    run.process.send_signal(second)
    asked = time.monotonic()
    assert run.end() == 143, run.said
    assert time.monotonic() - asked < 10
    told = "the last checkpoint is step-00000004; continue with: burnish resume run"
    assert told in run.said
    assert "Traceback" not in run.said
    assert run.saved() == ["step-00000004"]
    assert run.left_over() == []
    assert not list(Path("/dev/shm").glob(f"burnish-run-{run.process.pid}-*"))


def test_sigterm_while_ray_starts_ends_at_once(watch: type[Watched], tmp_path: Path) -> None:
    run = watch(tmp_path, SYNC, "import ray; init = ray.init\n" + STARTING)
    run.wait_for("start of Ray", (tmp_path / "starting").exists)
    to_group(run, signal.SIGTERM)
    assert run.end() == 143, run.said
    assert "nothing was learned, nothing is kept" in run.said
    assert "Traceback" not in run.said
    assert not run.path.exists()


STARTING = """
from pathlib import Path
def slow_init(*given, **more):
    init(*given, **more)
    Path("starting").touch()
    import time
    time.sleep(30)
ray.init = slow_init
"""


DEATH = """
import json, os, signal, time
from burnish.actors.remote_learner import RemoteLearner
real = RemoteLearner.finish_step
def take(self, call):
    if call.args[0] == 4:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
        with open("run/actors.json") as file:
            os.kill(json.load(file)["learner"]["pid"], signal.SIGKILL)
    return real(self, call)
RemoteLearner.finish_step = take
"""


def test_a_learner_that_dies_after_sigterm_is_not_started_again(
    watch: type[Watched], tmp_path: Path
) -> None:
    """A joined cluster may end by the same signal: there is nothing left to save."""
    run = watch(tmp_path, [*LAGGED, "checkpoint.every=2"], DEATH)
    assert run.end() == 143, run.said
    assert "learner died" in run.said
    assert "the last checkpoint is step-00000002; continue with: burnish resume run" in run.said
    assert "goes back to its last checkpoint" not in run.said
    assert run.saved() == ["step-00000002"]


def test_the_next_run_removes_the_shared_memory_of_a_killed_one(
    watch: type[Watched], tmp_path: Path
) -> None:
    shared = Path("/dev/shm")
    (tmp_path / "killed").mkdir()
    (tmp_path / "next").mkdir()
    run = watch(tmp_path / "killed", SYNC)
    run.wait_for("first step", lambda: run.steps() >= 1)
    (lost,) = shared.glob(f"burnish-run-{run.process.pid}-*")
    run.process.kill()
    run.end()
    assert list(lost.glob("weights-*"))
    after = watch(tmp_path / "next", SYNC)
    after.wait_for("first step", lambda: after.steps() >= 1)
    assert not lost.exists()
    (kept,) = shared.glob(f"burnish-run-{after.process.pid}-*")
    to_process(after, signal.SIGTERM)
    assert after.end() == 143
    assert not kept.exists()
