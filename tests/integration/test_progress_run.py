"""Nothing is ever silent: what is reported, what is shown of it, and that it never stops moving."""

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
from io import StringIO
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from burnish import api, display, progress
from burnish.display import Display, figures
from burnish.errors import BurnishError
from burnish.loops import sync
from burnish.progress import Progress, after, begin, showing, tell

PHASES = ["check", "load", "evaluate", "generate", "grade", "score", "learn", "publish"]
PHASES += ["checkpoint", "step", "report"]


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def test_a_phase_reports_how_far_it_is_and_how_fast(monkeypatch):
    seen, clock = [], Clock()
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=clock))
    with showing(seen.append):
        report = begin("evaluate", "evaluating", total=8, unit="responses")
    clock.now += 2.0
    report(3, tokens=50)
    after(report, 4, tokens=60)(1, 2, tokens=20)
    assert [(p.done, p.total, p.tokens_per_second) for p in seen] == [
        (0, 8, None),
        (3, 8, 25.0),
        (5, 8, 40.0),
    ]


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


def test_a_run_that_is_interrupted_before_it_learned_leaves_no_directory(tmp_path):
    def show(progress):
        if progress.phase == "learn":
            assert (tmp_path / "run").exists()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.train("sort", out=tmp_path / "run", show=show)
    assert not (tmp_path / "run").exists()


def test_progress_is_shown_inside_a_block_alone():
    seen = []
    with showing(seen.append):
        tell("compile", "compiling the kernel norm")
    tell("compile", "compiling the kernel gate")
    assert seen == [Progress("compile", "compiling the kernel norm")]


def lines(console):
    return console.file.getvalue().splitlines()


def test_sampling_outside_of_a_run_has_a_line_too(monkeypatch):
    monkeypatch.setattr(display, "EVERY", 0.01)
    console = Console(file=StringIO(), width=200)
    with Display("answers", console) as show:
        show(Progress("generate", "sampling 2 responses", total=2, unit="responses"))
        time.sleep(0.1)
    assert "] sampling 2 responses  0/2 responses" in console.file.getvalue()


def test_lines_of_a_pipe(monkeypatch):
    monkeypatch.setattr(display, "EVERY", 1000)
    console, clock = Console(file=StringIO(), width=80), Clock()
    with Display("run", console, clock=clock) as show:
        show(Progress("load", "loading torch"))
        show(Progress("evaluate", "evaluating 64 prompts before the first step", 0, 64, step=0))
        show(Progress("evaluate", "evaluating 64 prompts before the first step", 9, 64, step=0))
        show(Progress("generate", "sampling", step=0, steps=3))
        metrics = {"rollout/reward": 0.5, "train/loss": 2.0, "validation/reward": 0.25}
        show(Progress("step", "", step=1, steps=3, seconds_left=70, metrics=metrics))
        show(Progress("checkpoint", "saving a checkpoint", step=1, steps=3))
        clock.now += 5
        show.beat()
        show(Progress("evaluate", "evaluating", step=3, steps=3, seconds_left=0.2))
        clock.now += 60
        show.beat()
    assert lines(console) == [
        "[0:00:00] loading torch",
        "[0:00:00] evaluating 64 prompts before the first step  0/64 ",
        "step 1/3  reward 0.500  held out 0.250  0:01:10 left",
        "[0:00:05] saving a checkpoint  reward 0.500  held out 0.250",
        "[0:01:05] evaluating  reward 0.500  held out 0.250",
    ]


def test_responses_that_got_no_grade_or_ran_late_are_shown():
    metrics = {"rollout/reward": 0.5, "rollout/responses": 96.0}
    trouble = {"rollout/grades_timeout": 3 / 96, "rollout/grades_error": 2 / 96}
    assert figures(Progress("step", "", metrics=metrics)) == "reward 0.500"
    shown = figures(Progress("step", "", metrics=metrics | trouble))
    assert shown == "reward 0.500  3 timed out  2 not graded"


def test_a_quiet_display_writes_a_line_per_step(monkeypatch):
    monkeypatch.setattr(display, "EVERY", 0.01)
    console = Console(file=StringIO())
    with Display("run", console, quiet=True) as show:
        show(Progress("load", "loading torch"))
        time.sleep(0.05)
        show(Progress("step", "", step=1, steps=3, metrics={"train/loss": 2.0}))
    assert lines(console) == ["step 1/3  loss 2.000"]


def test_python_shows_on_stderr_unless_told_not_to(tmp_path, capfd):
    for out, show in (("shown", None), ("hidden", False)):
        api.train("sort", overrides=["train.steps=1"], out=tmp_path / out, show=show)
        captured = capfd.readouterr()
        assert captured.out == ""
        assert ("step 1/1  reward" in captured.err) == (show is None)


SLOW = """
import sys, time
from burnish import cli, display, preflight

pause, every, redraws, steps, first_only = map(float, sys.argv[1:6])
quick_hashes, calls = preflight.hashes, []

def slow(owner, name):
    quick = getattr(owner, name)
    def slowed(*given, **named):
        if not (first_only and calls):
            calls.append(name)
            time.sleep(pause)
        return quick(*given, **named)
    setattr(owner, name, slowed)

def slow_hashes(*given, **named):  # of a run, before it is built
    from burnish.engine.sorter import SorterEngine
    from burnish.learner.learner import Learner
    from burnish.runs import checkpoints, report
    print("LOADED", flush=True)
    for owner, name in (
        (SorterEngine, "step"), (Learner, "score"), (Learner, "step"),
        (checkpoints, "save"), (report, "write_report"),
    ):
        slow(owner, name)
    return quick_hashes(*given, **named)

preflight.hashes = slow_hashes
display.EVERY, display.REDRAWS = every, redraws
sets = [f"train.steps={steps:.0f}", "train.epochs=1", "checkpoint.every=1", "validation.every=9"]
sys.argv = ["burnish", "train", "sort", "--out", "run"]
sys.argv += [flag for change in sets for flag in ("--set", change)]
cli.main()
"""


class Watched:
    """A process on a terminal or a pipe, and when it wrote what."""

    def __init__(self, command, cwd, *, terminal, **env):
        self.began = time.monotonic()
        self.chunks = []
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
            assert time.monotonic() - self.began < seconds, self.text
            if not select.select([self.out], [], [], 0.1)[0]:
                continue
            try:
                data = os.read(self.out, 65536)
            except OSError:  # a terminal's way to say that nobody writes any more
                data = b""
            if not data:
                break
            self.chunks.append((time.monotonic() - self.began, data.decode(errors="replace")))
        return self

    @property
    def text(self):
        return "".join(text for _, text in self.chunks)

    def longest_gap(self, since=0.0):
        """Seconds, from the start of the process or from ``since`` on."""
        times = [since, *(when for when, _ in self.chunks if when > since)]
        return max(later - earlier for earlier, later in pairwise(times))

    def when(self, text):
        return next(when for when, written in self.chunks if text in written)

    def end(self, seconds=60.0):
        """Reads until the process has ended; its exit code."""
        try:
            self.read(seconds=time.monotonic() - self.began + seconds)
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
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("moment", "terminal"), [("loading torch", False), ("before the first step", True)]
)
def test_ctrl_c_before_the_first_step_ends_at_once(moment, terminal, tmp_path):
    watched = watch_slow(tmp_path, terminal=terminal, pause=60, every=5, redraws=5, first_only=True)
    watched.read(until=moment)
    watched.process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    assert watched.end() == 130
    assert time.monotonic() - asked < 3
    assert "nothing was learned" in watched.text
    assert "Traceback" not in watched.text
    assert not (tmp_path / "run").exists()


IN_C = "hashlib.pbkdf2_hmac('sha256', b'', b'', 10**9) if len(calls) > 5 else time.sleep(pause)"


def test_ctrl_c_twice_says_what_was_saved(tmp_path):
    """The second step is in a call that Python's own signal handling waits for."""
    script = SLOW.replace("time.sleep(pause)", IN_C).replace("import sys", "import hashlib, sys")
    wait = {"pause": 1.0, "every": 5, "redraws": 5}
    watched = watch_slow(tmp_path, script=script, terminal=False, steps=100, **wait)
    watched.read(until="step 1/100  reward")
    watched.process.send_signal(signal.SIGINT)
    watched.read(until="once more to stop at once")
    time.sleep(1.2)  # what comes sooner is the same request
    watched.process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    assert watched.end() == 130
    assert time.monotonic() - asked < 3
    said = "the last checkpoint is step-00000001; continue with: burnish resume run"
    assert said in watched.text


COMPILING = """
import os, sys
from burnish import cli

os.environ["NUMBA_CACHE_DIR"] = os.path.abspath("kernels")
sys.executable = os.path.abspath("compiler.sh")
cli.main()
"""


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
        time.sleep(0.05)
    watched.process.send_signal(signal.SIGINT)
    asked = time.monotonic()
    assert watched.end() == 130, watched.text
    assert time.monotonic() - asked < 3
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
