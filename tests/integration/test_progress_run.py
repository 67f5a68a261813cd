"""Progress of whole runs: phases, status and live display, and Ctrl-C at any time."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from contextlib import suppress
from io import StringIO
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console

from burnish import api
from burnish.console import display
from burnish.console.display import Display
from burnish.console.progress import tell
from burnish.errors import BurnishError
from burnish.loops import sync

PHASES = ["check", "load", "evaluate", "generate", "grade", "score", "learn", "publish"]
PHASES += ["checkpoint", "step", "report"]


def test_every_phase_of_a_run_is_told_in_order(tmp_path):
    seen = []
    overrides = ["train.steps=2", "train.epochs=3", "checkpoint.every=1", "objective.kl=k3"]
    api.train("sort", overrides=overrides, out=tmp_path / "run", show=seen.append)
    assert list(dict.fromkeys(progress.phase for progress in seen)) == PHASES
    assert "evaluating 3 prompts before the first step" in {progress.doing for progress in seen}
    assert "evaluating 3 prompts after step 2" in {progress.doing for progress in seen}
    learned = [(p.done, p.total) for p in seen if p.phase == "learn" and p.step == 0]
    assert learned == [(0, None), (1, 1), (1, 1), (1, 1)]
    in_run = [progress for progress in seen if progress.step is not None]
    assert {progress.steps for progress in in_run} == {2}
    first = next(i for i, progress in enumerate(in_run) if progress.phase == "step")
    assert all(progress.seconds_left is None for progress in in_run[:first])
    assert all(progress.seconds_left is not None for progress in in_run[first:])


def status_of(path):
    return json.loads((path / "status.json").read_text())


def test_status_says_where_a_run_is_and_how_it_ended(tmp_path):
    path, seen = tmp_path / "run", []

    def show(progress):
        if progress.step is not None:
            seen.append(status_of(path) | {"now": progress.doing})

    api.train("sort", overrides=["train.steps=2"], out=path, show=show, stop=lambda: True)
    assert all(status["now"] in status["doing"] for status in seen)
    assert "left" in seen[-1]["doing"]
    assert set(seen[0]) == {"state", "updated", "doing", "share", "steps", "now"}
    assert seen[0]["state"] == "running"
    assert status_of(path)["state"] == "stopped"
    api.resume(path, show=False)
    assert status_of(path)["state"] == "finished"
    assert status_of(path)["steps"] == 2


@pytest.mark.parametrize(
    ("error", "state"), [(BurnishError("no"), "failed"), (KeyboardInterrupt(), "stopped")]
)
def test_status_of_a_run_that_does_not_end_by_itself(error, state, tmp_path):
    def show(progress):
        if progress.step == 1:
            raise error

    with pytest.raises(type(error)):
        api.train("sort", overrides=["train.steps=3"], out=tmp_path / "run", show=show)
    assert status_of(tmp_path / "run")["state"] == state


@pytest.mark.parametrize(("phase", "is_kept"), [("evaluate", False), ("learn", True)])
def test_a_run_that_is_interrupted_keeps_its_first_evaluation(phase, is_kept, tmp_path):
    """It is interrupted in the evaluation, or in the first step after it."""
    path = tmp_path / "run"

    def show(progress):
        if progress.phase == phase:
            assert path.exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.train("sort", overrides=["train.steps=2"], out=path, show=show)
    assert path.exists() == is_kept
    if is_kept:
        assert status_of(path)["state"] == "stopped"
        assert [
            json.loads(line)["step"] for line in (path / "metrics.jsonl").read_text().splitlines()
        ] == [0]
        api.train("sort", overrides=["train.steps=2"], out=tmp_path / "whole", show=False)
        api.resume(path, show=False)  # it begins again
        whole = (tmp_path / "whole" / "metrics.jsonl").read_bytes()
        assert (path / "metrics.jsonl").read_bytes() == whole


def test_python_shows_on_stderr_unless_told_not_to(tmp_path, capfd):
    for out, show in (("shown", None), ("hidden", False)):
        api.train("sort", overrides=["train.steps=1"], out=tmp_path / out, show=show)
        captured = capfd.readouterr()
        assert captured.out == ""
        assert ("step 1/1  reward" in captured.err) == (show is None)


SLOW = """
import sys, time
from burnish.cli import main as cli
from burnish.console import display
from burnish.launch import inputs

pause, every, redraws, steps, first_only = map(float, sys.argv[1:6])
quick_hashes, calls, beats = inputs.hash_inputs, [], []
quick_beat = display.Display.beat

def beat(self):
    quick_beat(self)
    beats.append(self)

display.Display.beat = beat

def slow(owner, name):
    quick = getattr(owner, name)
    def slowed(*given, **named):
        if not (first_only and calls):
            calls.append(name)
            shown, end = len(beats), time.monotonic() + 60
            time.sleep(pause)
            while len(beats) == shown and time.monotonic() < end:  # others may be at work
                time.sleep(0.01)
        return quick(*given, **named)
    setattr(owner, name, slowed)

def slow_hashes(*given, **named):  # of a run, before it is built
    from burnish.engine.sorter import SorterEngine
    from burnish.learner.learner import LocalLearner
    from burnish.runs import checkpoints, report
    print("LOADED", flush=True)
    for owner, name in (
        (SorterEngine, "step"), (LocalLearner, "score"), (LocalLearner, "step"),
        (checkpoints, "save_checkpoint"), (report, "write_report"),
    ):
        slow(owner, name)
    return quick_hashes(*given, **named)

inputs.hash_inputs = slow_hashes
display.EVERY, display.REDRAWS = every, redraws
sets = [f"train.steps={steps:.0f}", "train.epochs=1", "checkpoint.every=1", "validation.every=9"]
sys.argv = ["burnish", "train", "sort", "--out", "run"]
sys.argv += [flag for change in sets for flag in ("--set", change)]
cli.main()
"""


def queued(process):
    """Seconds for which the threads of a process were ready and had no core, by Linux's count."""
    nanoseconds = 0
    with suppress(OSError):  # it has ended
        for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
            with suppress(OSError):
                nanoseconds += int(file.read_text().split()[1])
    return nanoseconds / 1e9


class Watched:
    """A process on a terminal or a pipe, and when it wrote what."""

    def __init__(self, command, cwd, *, terminal, **env):
        self.began, self.queued_before = time.monotonic(), queued("self")
        self.delayed = 0.0
        """Seconds for which the process or this one had to wait for a core, at the last look."""
        self.chunks = []
        """When and after which delay which text was written."""
        self.out, theirs = pty.openpty() if terminal else os.pipe()
        if terminal:
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            stdin=theirs if terminal else subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1", **env},
        )
        os.close(theirs)

    def read(self, until=None, seconds=90.0):
        """Reads to the end, or until a text was written."""
        while until is None or until not in self.text:
            assert self.now() < seconds, self.text
            is_written = select.select([self.out], [], [], 0.1)[0]
            ours = queued("self") - self.queued_before
            self.delayed = max(self.delayed, ours + queued(self.process.pid))
            if not is_written:
                continue
            try:
                data = os.read(self.out, 65536)
            except OSError:  # a terminal's way to say that nobody writes any more
                data = b""
            if not data:
                break
            self.chunks.append((self.now(), data.decode(errors="replace")))
        return self

    @property
    def text(self):
        return "".join(text for _, text in self.chunks)

    def now(self):
        """Seconds since the start of the process, without those in which it or this process had to
        wait for a core: what others do on the machine does not count."""
        return time.monotonic() - self.began - self.delayed

    def longest_gap(self, since=0.0):
        """Seconds, from the start of the process or from ``since`` on."""
        times = [since, *(when for when, _ in self.chunks if when > since)]
        return max(later - earlier for earlier, later in pairwise(times))

    def when(self, text):
        return next(when for when, written in self.chunks if text in written)

    def end(self, seconds=60.0):
        """Reads until the process has ended; its exit code."""
        try:
            self.read(seconds=self.now() + seconds)
            return self.process.wait(seconds)
        finally:
            self.process.kill()
            os.close(self.out)


def watch_slow(
    tmp_path, *, terminal, pause, every, redraws, steps=1, first_only=False, script=SLOW
):
    file = tmp_path / "slow.py"
    file.write_text(script)
    numbers = map(str, (pause, every, redraws, steps, int(first_only)))
    return Watched([sys.executable, str(file), *numbers], tmp_path, terminal=terminal)


@pytest.mark.slow
@pytest.mark.parametrize(("terminal", "most"), [(True, 5.0), (False, 20.0)])
def test_it_moves_while_a_phase_says_nothing(terminal, most, tmp_path):
    """Each phase takes longer than what the display's intervals are cut to, without a report."""
    pause = 1.5
    watched = watch_slow(tmp_path, terminal=terminal, pause=pause, every=0.2, redraws=10)
    assert watched.end() == 0, watched.text
    assert watched.longest_gap() < most
    assert watched.longest_gap(since=watched.when("LOADED")) < pause
    phases = ["evaluating 3 prompts before the first step", "sampling 30 responses to 3 prompts"]
    phases += ["scoring 30 resp", "learning from 30", "saving a checkpoint of", "writing the rep"]
    assert [phase for phase in phases if phase not in watched.text] == []
    assert "report: run/report.html" in watched.text


@pytest.mark.slow
@pytest.mark.parametrize(("terminal", "pause", "most"), [(True, 6.0, 5.0), (False, 25.0, 20.0)])
def test_it_is_never_silent_for_long(terminal, pause, most, tmp_path):
    """The intervals that users get, in a first evaluation that takes longer than they are."""
    interval = {"every": display.EVERY, "redraws": display.REDRAWS}
    watched = watch_slow(tmp_path, terminal=terminal, pause=pause, first_only=True, **interval)
    assert watched.end() == 0, watched.text
    assert watched.longest_gap() < most


def is_running(pid):
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(
    ("moment", "terminal"), [("loading torch", False), ("before the first step", True)]
)
def test_ctrl_c_before_the_first_step_ends_at_once(moment, terminal, tmp_path):
    watched = watch_slow(tmp_path, terminal=terminal, pause=60, every=5, redraws=5, first_only=True)
    watched.read(until=moment)
    watched.process.send_signal(signal.SIGINT)
    asked = watched.now()
    assert watched.end() == 130
    assert watched.now() - asked < 3
    assert "nothing was learned" in watched.text
    assert "Traceback" not in watched.text
    assert not (tmp_path / "run").exists()


IN_C = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9) if len(calls) > 5 else time.sleep(pause)"


@pytest.mark.slow
def test_ctrl_c_twice_says_what_was_saved(tmp_path):
    """The second step is in a call that Python's own signal handling waits for."""
    script = SLOW.replace("time.sleep(pause)", IN_C).replace("import sys", "import hashlib, sys")
    wait = {"pause": 1.0, "every": 5, "redraws": 5}
    watched = watch_slow(tmp_path, script=script, terminal=False, steps=100, **wait)
    watched.read(until="step 1/100  reward")
    watched.process.send_signal(signal.SIGINT)
    watched.read(until="once more to stop at once")
    time.sleep(0.4)  # what comes sooner is the same request
    watched.process.send_signal(signal.SIGINT)
    asked = watched.now()
    assert watched.end() == 130
    assert watched.now() - asked < 3
    said = "the last checkpoint is step-00000001; continue with: burnish resume run"
    assert said in watched.text
    assert status_of(tmp_path / "run")["state"] == "stopped"  # though nothing could run any more
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 2


COMPILING = """
import os, sys
from burnish.cli import main as cli

os.environ["NUMBA_CACHE_DIR"] = os.path.abspath("kernels")
sys.executable = os.path.abspath("compiler.sh")
cli.main()
"""


@pytest.mark.slow
def test_ctrl_c_ends_the_process_that_compiles_a_kernel(smollm2, tmp_path):
    (tmp_path / "compiler.sh").write_text("#!/bin/sh\necho $$ > pid\nexec sleep 60\n")
    (tmp_path / "compiler.sh").chmod(0o755)
    (tmp_path / "compiling.py").write_text(COMPILING)
    size = {"layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 128, "name": "scratch"}
    sets = [f"model.{key}={value}" for key, value in size.items()]
    sets += [f"model.tokenizer={smollm2}", "task.validation_prompts=2", "device=cpu"]
    flags = [flag for change in sets for flag in ("--set", change)]
    command = [sys.executable, "compiling.py", "train", "keywords", *flags]
    watched = Watched(command, tmp_path, terminal=False).read(until="compiling the kernel")
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        assert watched.process.poll() is None, watched.text
        time.sleep(0.05)
    watched.process.send_signal(signal.SIGINT)
    asked = watched.now()
    assert watched.end() == 130, watched.text
    assert watched.now() - asked < 3
    assert re.search(r"\[0:00:\d\d\] compiling the kernel \w+ \(once", watched.text)
    child = int((tmp_path / "pid").read_text())
    assert not is_running(child), watched.text


def test_the_work_of_actors_stands_beside_the_phase(tmp_path, monkeypatch):
    """It is shown with the phase that was announced last, and no longer than that."""
    real = sync.grade

    def grade(*given):
        tell("actors", "generator-0: sampling, 3 of 30 responses")
        return real(*given)

    monkeypatch.setattr(sync, "grade", grade)
    seen = []
    api.train("sort", overrides=["train.steps=1"], out=tmp_path / "run", show=seen.append)
    (shown,) = (p for p in seen if p.actors)
    assert (shown.phase, shown.doing, shown.step) == ("grade", "grading 30 responses", 0)
    console = Console(file=StringIO(), width=200)
    one = Display("run", console)
    one(shown)
    one.beat()
    assert "grading 30 responses  generator-0: sampling, 3 of 30" in console.file.getvalue()
