"""Chaos: a run on Ray whose actors are killed at random moments, and the ledger's verdict."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import suppress
from pathlib import Path

from burnish.runs.directory import read_json
from burnish.runs.ledger import Verdict, judge
from burnish.schema.recipe import Recipe
from burnish.strategy import FreeLoop


class Killer(threading.Thread):
    """Kills the actors of a run in turn, at random moments, each once the one before works again
    in another process."""

    def __init__(self, run: Path, kills: int, seed: int, pause: float) -> None:
        """``pause``: seconds between two kills, at most."""
        super().__init__(daemon=True)
        self._actors, self._kills, self._pause = run / "actors.json", kills, pause
        self._chance, self._ended = random.Random(seed), threading.Event()
        self.killed: list[str] = []

    def run(self) -> None:
        pid = None
        while len(self.killed) < self._kills:
            if self._ended.wait(self._pause * self._chance.uniform(0.2, 1.0)):
                return
            actors = read_json(self._actors) if self._actors.is_file() else {}
            pids = {name: place["pid"] for name, place in sorted(actors.items())}
            if not pids or pid in pids.values():
                continue
            name = list(pids)[len(self.killed) % len(pids)]
            pid = pids[name]
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed.append(name)

    def end(self) -> None:
        self._ended.set()


def verdict(run: Path, recipe: Recipe) -> Verdict:
    """What the ledger of a run says of its recipe's strategy."""
    batch, uses = recipe.prompts_per_rollout, 1 if recipe.buffer is None else recipe.buffer.max_uses
    window, max_lag = bounds_of(recipe)
    return judge(run, batch=batch, window=window, max_uses=uses, max_lag=max_lag)


def bounds_of(recipe: Recipe) -> tuple[int, int | None]:
    """The window and the bound on lag by which a ledger is judged; None if there is no bound."""
    loop, batch, chosen = recipe.loop, recipe.prompts_per_rollout, recipe.selection
    if isinstance(loop, FreeLoop):
        # Groups that begin under new numbers, in the place of others, leave groups open that began
        # before; so do dead ones, which the next step closes.
        again = loop.on_stale == "drop" or chosen.fills
        waiting = (1 + loop.max_lag // recipe.gradient_steps_per_rollout) * batch
        dead = batch * chosen.max_asked if chosen.fills else 0
        return (loop.window or batch) + again * waiting + dead, loop.max_lag
    # Groups that fill a rollout have higher numbers than the rollouts in flight, or numbers that
    # were reserved for it.
    most = chosen.max_asked if chosen.dead_groups == "active" else 1
    window = batch * most * (1 + loop.lag) if chosen.fills else batch
    if recipe.buffer is not None:
        return window + recipe.buffer.capacity, None
    return window, loop.lag * recipe.gradient_steps_per_rollout
