"""The display of a run: a live block on a terminal, lines in a pipe or a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.markup import escape

from burnish.progress import STEP_PHASES, Progress

EVERY = 10.0
"""Seconds after which a line is written to a pipe although nothing new was reported."""
REDRAWS = 5.0
"""Redraws of the live block per second."""
SHOWN = {
    "rollout/reward": "reward",
    "train/loss": "loss",
    "validation/reward": "held out",
    "validation/loss": "held out",
    "kl/initial_k1": "KL",
}
"""Metrics of a step, and the words for them; the loss is left out where there is a reward."""
TROUBLES = {"rollout/grades_timeout": "timed out", "rollout/grades_error": "not graded"}
"""Shares of a step's responses that are shown as counts, where there are any."""


class Display:
    """Shows each ``Progress`` that it is called with, and moves while none comes.

    A thread redraws the block on a terminal, or writes the last state as a line with the seconds
    that have passed. ``quiet`` leaves only a line per finished step.
    """

    def __init__(
        self,
        name: str,
        console: Console,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._console, self._clock, self._is_quiet = console, clock, quiet
        self._began = self._written = self._told = clock()
        self._now, self._figures = Progress("load", "starting"), ""
        self._name = f"[bold]{escape(name)}[/]"
        # CI may pretend to be a terminal.
        self._is_block = not quiet and console.is_terminal and console.file.isatty()
        self._block = console.status(self._name, refresh_per_second=REDRAWS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_moving, daemon=True)

    def __enter__(self) -> Self:
        if self._is_block:
            self._block.start()
        if not self._is_quiet:
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the block or the lines; may be called twice."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        self._block.stop()

    def __call__(self, progress: Progress) -> None:
        if progress.phase == "note":
            self.say(progress.doing)
            return
        before, self._now, self._told = self._now, progress, self._clock()
        is_early = not progress.step and progress.phase not in STEP_PHASES
        if progress.phase == "step":
            self._figures = figures(progress)
            if not self._is_block:
                self._write(f"step {progress.step}/{progress.steps}  {self._figures}{self._left()}")
        elif is_early and progress.doing != before.doing and not self._is_quiet:
            self.beat()

    def say(self, text: str) -> None:
        """A line of its own, above the block."""
        self._console.print(text, soft_wrap=True, markup=False)

    def _keep_moving(self) -> None:
        pause = 1 / REDRAWS if self._is_block else min(EVERY, 1.0)
        while not self._ended.wait(pause):
            if self._is_block or self._clock() - self._written >= EVERY:
                self.beat()

    def beat(self) -> None:
        """Shows the last state: in the block, or as a line."""
        if self._is_block:
            self._block.update(f"{self._name} {escape(self._line())}")
        else:
            self._write(self._line())

    def _write(self, text: str) -> None:
        self._written = self._clock()
        self.say(text)

    def _line(self) -> str:
        now, told = self._now, [self._now.doing]
        if now.step is not None and now.phase in STEP_PHASES:
            told = [f"step {now.step + 1}/{now.steps}: {now.doing}"]
        if now.total:
            told.append(f"{now.done:,}/{now.total:,} {now.unit}")
        if now.tokens_per_second:
            told.append(f"{now.tokens_per_second:,.0f} tokens/s")
        told += [text for text in (now.actors, self._figures) if text]
        passed = _clock(self._clock() - self._began)
        return f"[{passed}] {'  '.join(told)}{self._left()}"

    def _left(self) -> str:
        """The time left, less the time since it was told; empty once it is used up."""
        if self._now.seconds_left is None:
            return ""
        left = self._now.seconds_left - (self._clock() - self._told)
        return f"  {_clock(left)} left" if left >= 0.5 else ""


def figures(progress: Progress) -> str:
    """A step's metrics in one line."""
    metrics = progress.metrics
    without = "train/loss" if "rollout/reward" in metrics else ""
    shown = [(key, word) for key, word in SHOWN.items() if key in metrics and key != without]
    told = [f"{word} {metrics[key]:z.3f}" for key, word in shown]
    for key, word in TROUBLES.items():
        count = round(metrics.get(key, 0.0) * metrics.get("rollout/responses", 0.0))
        told += [f"{count} {word}"] if count else []
    return "  ".join(told)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
