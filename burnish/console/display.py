"""The progress display of a run: a live status on a terminal, lines in a pipe or a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Self

from rich.console import Console
from rich.text import Text

from burnish.console.progress import STEP_PHASES, Progress

EVERY = 10.0
"""Seconds after which a line is written to a pipe even if nothing new was reported."""
QUIET_EVERY = 30.0
"""The same for a quiet display."""
REDRAWS = 5.0
"""Redraws of the live status per second."""
SHOWN = {
    "rollout/reward": "reward",
    "train/loss": "loss",
    "validation/reward": "held out",
    "validation/loss": "held out",
    "kl/initial_k1": "KL",
}
"""Metrics of a step and their labels. The loss is left out if there is a reward."""
TROUBLES = {"rollout/grades_timeout": "timed out", "rollout/grades_error": "not graded"}
"""Metrics with the share of responses whose grading failed, and their labels. The number of these
responses is displayed unless it is 0."""


class Display:
    """Callback that displays each ``Progress``, and keeps updating the elapsed time in between.

    On a terminal, a thread redraws a live status. In a pipe or a file, each finished step is a
    line, and a thread writes the current work with the elapsed time after `EVERY` seconds without a
    line. With ``quiet``, a terminal gets lines, too, and the time is `QUIET_EVERY` seconds. Use a
    display as a context manager, which runs the thread. ``name``: the title of the live status.
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
        self._began = self._written = self._reported = clock()
        self._now, self._figures = Progress("load", "starting"), ""
        self._name = Text(name, style="bold")
        # CI may pretend to be a terminal.
        self._is_live = not quiet and console.is_terminal and console.file.isatty()
        self._status = console.status(self._name, refresh_per_second=REDRAWS)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_moving, daemon=True)

    def __enter__(self) -> Self:
        if self._is_live:
            self._status.start()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the display. May be called more than once."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(1.0)
        self._status.stop()

    def __call__(self, progress: Progress) -> None:
        if progress.phase == "note":
            self.print_line(progress.doing)
            return
        before, self._now, self._reported = self._now, progress, self._clock()
        is_early = not progress.step and progress.phase not in STEP_PHASES
        if progress.phase == "step":
            self._figures = figures(progress)
            if not self._is_live:
                self._write(f"step {progress.step}/{progress.steps}  {self._figures}{self._left()}")
        elif is_early and progress.doing != before.doing and not self._is_quiet:
            self.beat()

    def print_line(self, text: str) -> None:
        """Print a line, above the live status if there is one."""
        self._console.print(text, soft_wrap=True, markup=False, emoji=False)

    def _keep_moving(self) -> None:
        every = QUIET_EVERY if self._is_quiet else EVERY
        pause = 1 / REDRAWS if self._is_live else min(every, 1.0)
        while not self._ended.wait(pause):
            if self._is_live or self._clock() - self._written >= every:
                self.beat()

    def beat(self) -> None:
        """Display the last state, in the live status or as a line."""
        if self._is_live:
            self._status.update(Text.assemble(self._name, " ", self._line()))
        else:
            self._write(self._line())

    def _write(self, text: str) -> None:
        self._written = self._clock()
        self.print_line(text)

    def _line(self) -> str:
        now, parts = self._now, [self._now.doing]
        if now.step is not None and now.phase in STEP_PHASES:
            parts = [f"step {now.step + 1}/{now.steps}: {now.doing}"]
        if now.total:
            parts.append(f"{now.done:,}/{now.total:,} {now.unit}")
        if now.turn:
            parts.append(now.turn)
        if now.tokens_per_second:
            parts.append(f"{now.tokens_per_second:,.0f} tokens/s")
        parts += [text for text in (now.grading, now.actors, self._figures) if text]
        passed = _clock(self._clock() - self._began)
        return f"[{passed}] {'  '.join(parts)}{self._left()}"

    def _left(self) -> str:
        """Return the remaining time as text, counted down since the last report; empty if it is
        unknown or over."""
        if self._now.seconds_left is None:
            return ""
        left = self._now.seconds_left - (self._clock() - self._reported)
        return f"  {_clock(left)} left" if left >= 0.5 else ""


def figures(progress: Progress) -> str:
    """Format the most important metrics of a finished step in one line, such as "reward 0.512  KL
    0.003", with the number of responses whose grading failed; empty if there are none of these."""
    metrics = progress.metrics
    without = "train/loss" if "rollout/reward" in metrics else ""
    shown = [(key, word) for key, word in SHOWN.items() if key in metrics and key != without]
    parts = [f"{word} {metrics[key]:z.3f}" for key, word in shown]
    for key, word in TROUBLES.items():
        count = round(metrics.get(key, 0.0) * metrics.get("rollout/responses", 0.0))
        parts += [f"{count} {word}"] if count else []
    return "  ".join(parts)


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
