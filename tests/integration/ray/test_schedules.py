"""Random schedules of faults on real Ray, in all modes: nothing hangs, and every group and every
bound is accounted for. `test_simulated.py` in this folder tries a thousand on a simulated Ray.

There are twenty schedules, of half a minute or more each on two cores. `make proofs` runs three of
them, which have three of the patterns, both loops and a buffer; `make proofs-extra` the others.

They sample with the native engine, which takes a step per token, so that actors die while samples
are in flight.
"""

from __future__ import annotations

import _thread
import json
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.cli.chaos import verdict
from burnish.console.progress import Progress
from burnish.recipe.load import load_recipe
from tests.integration.ray import native
from tests.integration.ray.test_faults import descendants

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

SEEDS = [pytest.param(n, marks=[pytest.mark.extra] * (n not in (3, 8, 18))) for n in range(20)]
LIMIT = 600.0
"""Seconds after which a schedule counts as hung."""
STEPS = 6
GROUPS = 4
FREE = [
    (on_stale, on_update, generators)
    for generators in (1, 2)
    for on_stale in ("wait", "drop")
    for on_update in ("wait", "recompute", "keep")
]
LAGGED = [(0, 1, False), (1, 2, False), (2, 1, True), (1, 2, True)]
"""Lag, generators, and whether there is a buffer."""
PATTERNS = ("one after another", "two at once", "again while it recovers", "learner and generator")


def schedule(seed: int) -> tuple[dict[str, Any], str]:
    """Settings of a run, and how its actors die."""
    chance = random.Random(seed)
    given: dict[str, Any] = {}
    if seed < len(FREE):
        on_stale, on_update, generators = FREE[seed]
        loop = {"name": "free", "on_stale": on_stale, "on_update": on_update}
        given["loop"] = loop | {"max_lag": chance.choice([1, 2, 4])}
        given["loop"]["window"] = GROUPS * chance.choice([1, 2])
    else:
        lag, generators, has_buffer = LAGGED[seed % len(LAGGED)]
        given["loop"] = {"lag": lag}
        if has_buffer:
            given["buffer"] = {"capacity": 2 * GROUPS, "order": "uniform", "max_uses": 2}
    if seed % 3 == 2:
        chosen = {"dead_groups": ("dynamic", "active")[seed % 2], "max_asked": 4}
        given["selection"] = chosen | {"on_bound": "learn"}
    idle = {"cpus": 0}
    given["runtime"] = {"name": "ray", "generators": generators, "threads": 1}
    given["runtime"] |= {"generator": idle, "learner": idle}
    given |= {"checkpoint": {"every": 2}, "validation": {"every": 3}, "seed": seed}
    return given, PATTERNS[seed % len(PATTERNS)]


def workers(kind: str) -> set[int]:
    """The processes of actors of a kind that this process's own Ray has started."""
    return {
        pid for pid, name in descendants(os.getpid()).items() if name.startswith(f"ray::{kind}")
    }


class Deaths:
    """Kills actors after steps of a run, in one of the patterns."""

    def __init__(self, run: Path, pattern: str, generators: int, seed: int) -> None:
        self._run, self._pattern, self._chance = run, pattern, random.Random(seed)
        self._generators, self._last = generators, 0
        self.killed: list[str] = []
        self._threads: list[threading.Thread] = []

    def show(self, progress: Progress) -> None:
        if progress.phase != "step" or progress.step in (self._last, STEPS):
            return
        self._last = progress.step
        names = ["scorer", "learner", *(f"generator-{n}" for n in range(self._generators))]
        if progress.step % 2 and len(self.killed) < 6:
            self._begin(names, progress.step)

    def _begin(self, names: list[str], step: int) -> None:
        first = names[(step // 2 + self._chance.randrange(2)) % len(names)]
        if self._pattern == "two at once":
            others = self._chance.sample(names, 2)
            for name in others:
                self._later(self._kill, name, 0.1)
        elif self._pattern == "learner and generator":
            self._later(self._kill, "learner", 0.05)
            self._later(self._kill, "generator-0", self._chance.choice([0.1, 2.0, 6.0]))
        elif self._pattern == "again while it recovers":
            self._later(self._kill_twice, "learner" if step % 4 == 1 else first, 0.1)
        else:
            self._later(self._kill, first, self._chance.uniform(0, 0.3))

    def _later(self, kill: Callable[[str], None], name: str, seconds: float) -> None:
        thread = threading.Timer(seconds, kill, [name])
        self._threads.append(thread)
        thread.start()

    def _kill(self, name: str) -> None:
        actors = json.loads((self._run / "actors.json").read_text())
        with suppress(ProcessLookupError, KeyError):  # it died with another one, or starts again
            os.kill(actors[name]["pid"], signal.SIGKILL)
            self.killed.append(name)

    def _kill_twice(self, name: str) -> None:
        """Kills an actor, and soon after its start the one that takes its place."""
        kind = name.partition("-")[0].capitalize()
        before = workers(kind)
        self._kill(name)
        end = time.monotonic() + 60
        while not (fresh := workers(kind) - before):
            if time.monotonic() > end:
                return
            time.sleep(0.05)
        time.sleep(self._chance.choice([0.0, 0.5, 1.5]))
        with suppress(ProcessLookupError):
            os.kill(fresh.pop(), signal.SIGKILL)
            self.killed.append(name)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(90)


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Interrupts a block that takes longer."""
    timer = threading.Timer(seconds, _thread.interrupt_main)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_schedule_of_faults(seed: int, tmp_path: Path) -> None:
    given, pattern = schedule(seed)
    print(f"seed {seed}, {pattern}: {given}")
    path = tmp_path / "run"
    deaths = Deaths(path, pattern, given["runtime"]["generators"], seed)
    given |= native.settings(tmp_path, groups=GROUPS, steps=STEPS)
    with limited(LIMIT):
        burnish.train("keywords", out=path, show=deaths.show, **given)
    deaths.join()
    found = verdict(path, load_recipe(str(path / "recipe.toml")))
    print(found, deaths.killed)
    assert not found.problems, found
    assert found.steps == STEPS
    assert len(deaths.killed) >= 2
