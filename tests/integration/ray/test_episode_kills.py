"""Twenty kills of workers, engine and learner lose no episode, and SIGTERM may reach all processes
of a run at once."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

import burnish
from burnish.console.progress import Progress
from burnish.runs.ledger import judge
from tests.environments.conftest import alive, descendants, gone
from tests.integration.ray.test_episodes import APART, LAG, played, settings, train
from tests.integration.ray.test_episodes import folder as folder
from tests.integration.ray.test_runs import metrics, pid_of
from tests.loops.test_recorder import fingerprint

pytestmark = pytest.mark.slow

VICTIMS = {"episode": 10, "supervisor": 4, "generator-0": 3, "learner": 3}
"""Number of kills by victim."""
SEED = 33
STEPS = 2 * sum(VICTIMS.values()) + 2


class Kills:
    """Kills one process after every second step of a run, in an order drawn from a seed.

    A rollout is sampled during two steps at most, so no episode is killed twice: it would be an
    error then, by design.
    """

    def __init__(self, folder: Path, run: Path) -> None:
        self.folder, self.run, self.killed = folder, run, Counter[str]()
        self._chance = random.Random(SEED)
        self._due = [name for name, count in VICTIMS.items() for _ in range(count)]
        self._chance.shuffle(self._due)
        self._last, self._timers = 0, list[threading.Timer]()

    def show(self, progress: Progress) -> None:
        if progress.phase == "step" and progress.step >= self._last + 2 and self._due:
            self._last = progress.step
            moment = self._chance.uniform(0, 0.2)
            timer = threading.Timer(moment, self._kill, [self._due.pop(0)])
            self._timers.append(timer)
            timer.start()

    def wait(self) -> None:
        for timer in self._timers:
            timer.join(60)

    def _kill(self, victim: str) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with suppress(ProcessLookupError, FileNotFoundError):
                os.kill(self._pid_of(victim), signal.SIGKILL)
                self.killed[victim] += 1
                return
            time.sleep(0.01)

    def _pid_of(self, victim: str) -> int:
        if victim not in ("episode", "supervisor"):
            return pid_of(self.run, victim)
        lives = sorted(filter(alive, played(self.folder)))
        if not lives:
            raise ProcessLookupError
        pid = self._chance.choice(lives)
        return pid if victim == "episode" else parent(pid)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def rows_of(run: burnish.Run) -> list[dict[str, object]]:
    return [json.loads(line) for line in (run.path / "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("cluster")
def test_twenty_kills_lose_no_episode(folder: Path) -> None:
    """All groups, episodes and steps are those of a run that nobody disturbed."""
    more = [*LAG, f"train.steps={STEPS}", "checkpoint.every=10", "validation.every=1000"]
    whole = train(folder, "whole", *more)
    kills = Kills(folder, folder / "killed" / "run")
    run = train(folder, "killed", *more, *APART, show=kills.show)
    kills.wait()
    assert kills.killed == VICTIMS
    assert sum(VICTIMS.values()) == 20
    assert metrics(run) == metrics(whole)
    rows = rows_of(run)
    assert rows == rows_of(whole)
    assert Counter(row["step"] for row in rows) == dict.fromkeys(range(1, STEPS + 1), 8)
    assert all(row["status"] == "scored" and len(row["turns"]) == 3 for row in rows)
    found = judge(run.path, batch=2, window=2)
    assert not found.problems, found
    assert (found.steps, found.groups, found.dropped) == (STEPS, 2 * STEPS, 0)
    assert all(map(gone, played(folder)))


@pytest.mark.parametrize("runtime", [[], APART], ids=["local", "ray"])
def test_sigterm_to_all_processes_at_once(folder: Path, runtime: list[str]) -> None:
    """As from a system that shuts down. The run ends, no process is left, and the rest of the run
    is that of a run that nobody disturbed."""
    more = settings(folder, *LAG, "train.steps=12", "checkpoint.every=2")
    sets = [word for setting in [*more, *runtime] for word in ("--set", setting)]
    command = [sys.executable, "-m", "burnish", "train", "keywords", *sets, "--quiet"]
    run = subprocess.Popen([*command, "--out", "b/run"], cwd=folder, start_new_session=True)
    end = time.monotonic() + 120
    while not list(folder.glob("b/run/checkpoints/step-*2")) or not any(map(alive, played(folder))):
        assert run.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)
    below = descendants(run.pid)
    for pid in [*below, run.pid]:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    assert run.wait(120) != 0
    assert all(gone(pid, 20) for pid in [*below, *played(folder)])
    resumed = burnish.resume(folder / "b" / "run", show=False)
    whole = train(folder, "a", *more[len(settings(folder)) :])
    assert metrics(resumed) == metrics(whole)
    assert rows_of(resumed) == rows_of(whole)
    name = "checkpoints/step-00000012"
    assert fingerprint(resumed.path)[name] == fingerprint(whole.path)[name]
