"""Chaos tests: kill the actors of a run on Ray at random moments, and check in the run's ledger
that each group of responses was learned from as intended."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import suppress
from pathlib import Path

from burnish.recipe.recipe import Recipe
from burnish.recipe.runtime import AnyLoop, BufferConfig, FreeLoop
from burnish.recipe.selection import SelectionConfig
from burnish.runs.directory import load_json
from burnish.runs.ledger import LedgerVerdict, judge


class Killer(threading.Thread):
    """A thread that kills the processes of a run's actors in turn, at random moments, until it has
    killed ``kills`` of them or is ended with `end`. ``killed`` lists the actors' names.

    An actor is killed only after the previous one has been restarted in another process. Actors on
    other machines are not killed.
    """

    def __init__(self, run: Path, kills: int, seed: int, pause: float) -> None:
        """``run`` is the run's directory, whose actors.json names the processes. ``pause`` is the
        longest time between two kills, in seconds."""
        super().__init__(daemon=True)
        self._actors, self._kills, self._pause = run / "actors.json", kills, pause
        self._chance, self._ended = random.Random(seed), threading.Event()
        self.killed: list[str] = []

    def run(self) -> None:
        pid = None
        while len(self.killed) < self._kills:
            if self._ended.wait(self._pause * self._chance.uniform(0.2, 1.0)):
                return
            actors = load_json(self._actors) if self._actors.is_file() else {}
            pids = {
                name: place["pid"]
                for name, place in sorted(actors.items())
                if place["host"] == os.uname().nodename  # elsewhere, the pid is another process
            }
            if not pids or pid in pids.values():
                continue
            name = list(pids)[len(self.killed) % len(pids)]
            pid = pids[name]
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                self.killed.append(name)

    def end(self) -> None:
        self._ended.set()


def verdict(run: Path, recipe: Recipe) -> LedgerVerdict:
    """Check the ledger of a run: no group is lost, and each is learned from as often and with as
    much lag as the recipe allows."""
    batch, versions = recipe.prompts_per_rollout, recipe.gradient_steps_per_rollout
    window, max_lag = bounds_of(recipe.loop, recipe.selection, recipe.buffer, batch, versions)
    uses = 1 if recipe.buffer is None else recipe.buffer.max_uses
    return judge(run, batch=batch, window=window, max_uses=uses, max_lag=max_lag)


def bounds_of(
    loop: AnyLoop,
    chosen: SelectionConfig,
    buffer: BufferConfig | None,
    batch: int,
    versions: int,
) -> tuple[int, int | None]:
    """Return the arguments ``window`` and ``max_lag`` of `burnish.runs.ledger.judge`: the largest
    number of groups that may be open at once, and the largest lag in versions. The lag is None,
    which means unbounded, if groups are taken from a replay buffer.

    A rollout has ``batch`` groups; its gradient steps produce ``versions`` versions of the weights.
    """
    if isinstance(loop, FreeLoop):
        # A group that replaces another one starts under a new number while earlier groups are still
        # open. Dead groups stay open until the next step closes them.
        again = loop.on_stale == "drop" or chosen.fills
        waiting = (1 + loop.max_lag // versions) * batch
        dead = batch * chosen.max_asked if chosen.fills else 0
        return (loop.window or batch) + again * waiting + dead, loop.max_lag
    # Groups that fill up a rollout have higher numbers than the rollouts in flight, or numbers that
    # were reserved for the rollout.
    most = chosen.max_asked if chosen.dead_groups == "active" else 1
    window = batch * most * (1 + loop.lag) if chosen.fills else batch
    if buffer is not None:
        return window + buffer.capacity, None
    return window, loop.lag * versions
