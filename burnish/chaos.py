"""Chaos: a run on Ray whose actors are killed at random moments, and the ledger's verdict."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from pathlib import Path

from burnish.runs.ledger import Verdict, judge
from burnish.schema import Recipe
from burnish.strategy import FreeLoop


class Killer(threading.Thread):
    """Kills actors of a run, one after another; each has time to come back before the next."""

    def __init__(self, run: Path, kills: int, seed: int, pause: float) -> None:
        """``pause``: seconds between two kills, at most."""
        super().__init__(daemon=True)
        self.run_path, self.kills, self.pause = run, kills, pause
        self.killed: list[str] = []
        self._chance, self._ended = random.Random(seed), threading.Event()

    def run(self) -> None:
        names: list[str] = []
        while len(self.killed) < self.kills:
            if self._ended.wait(self.pause * self._chance.uniform(0.2, 1.0)):
                return
            actors = self._actors()
            names = names or sorted(actors)
            if not names:
                continue
            self._chance.shuffle(names)
            name = names.pop()
            try:
                os.kill(actors[name]["pid"], signal.SIGKILL)
            except (KeyError, ProcessLookupError):
                continue
            self.killed.append(name)
            self._wait_for_another(name, actors[name]["pid"])

    def end(self) -> None:
        self._ended.set()

    def _wait_for_another(self, name: str, pid: int) -> None:
        """Waits until an actor that was killed works again in another process."""
        end = time.monotonic() + 60
        while time.monotonic() < end and not self._ended.wait(0.5):
            if self._actors().get(name, {}).get("pid", pid) != pid:
                return

    def _actors(self) -> dict[str, dict[str, int]]:
        try:
            found: dict[str, dict[str, int]] = json.loads(
                (self.run_path / "actors.json").read_text()
            )
        except (OSError, ValueError):
            return {}
        return found


def verdict(run: Path, recipe: Recipe) -> Verdict:
    """What the ledger of a run says of its recipe's strategy."""
    batch = recipe.prompts_per_rollout
    loop = recipe.loop
    window, max_lag = batch, None
    if isinstance(loop, FreeLoop):
        window, max_lag = loop.window or batch, loop.max_lag
    else:
        max_lag = loop.lag * recipe.gradient_steps_per_rollout
    uses = 1 if recipe.buffer is None else recipe.buffer.max_uses
    return judge(
        run, batch=batch, window=window, max_uses=uses, max_lag=None if recipe.buffer else max_lag
    )
