"""Grade responses in this process: for functions that only this process has, and for built-in
rewards that need no limits."""

from __future__ import annotations

import contextvars
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any

from burnish.graders.rewards import (
    Outcome,
    Reward,
    late,
    score,
    score_batch,
    score_concurrently,
    style_of,
)
from burnish.graders.tally import Items, Tally, as_grade
from burnish.types import Grade

SECONDS = 20.0
"""Wall-clock limit of an async reward if no limit is given."""


class InProcess:
    """Grades responses in this process by the same rules as a ``GraderPool``, but without limits of
    CPU time and memory.

    The wall-clock limit of a function or a batched reward works only in the main thread of a
    program that does not use SIGALRM itself, and it can't end a call that executes no Python code.
    Where the limit does not work, a call that does not return blocks the run. The limit of an
    ``async def`` that is not batched works in any thread, but only while the call awaits.
    """

    def __init__(self, reward: Reward, wall_seconds: float | None = None) -> None:
        """``wall_seconds`` is the limit of each call. None means no limit, except for an async
        reward, whose limit then is `SECONDS`."""
        self.reward, self.wall_seconds = reward, wall_seconds

    def grade(self, items: Items) -> list[Grade]:
        return [as_grade(outcome) for outcome in self.outcomes(items, Tally(items))]

    def outcomes(self, items: Items, tally: Tally) -> list[Outcome]:
        """Return one outcome per item, in the order of the items.

        ``tally`` counts each outcome; it raises a GraderError once too many items have errors (see
        `limiting_errors`).
        """
        found: dict[int, Outcome] = {}

        def take(index: int, outcome: Outcome) -> None:
            found[index] = outcome
            tally.add(index, outcome.status, outcome.message)

        style = style_of(self.reward)
        if style == "async":
            seconds = self.wall_seconds or SECONDS
            run_coroutine(score_concurrently(self.reward, items, seconds, take))
        elif style == "batched":
            for index, outcome in enumerate(self._score_batch(items)):
                take(index, outcome)
        else:
            for index, item in enumerate(items):
                take(index, self._score(*item))
        return [found[i] for i in range(len(items))]

    def _score(self, response: str, row: Any) -> Outcome:
        try:
            with interrupting(self.wall_seconds):
                return score(self.reward, response, row)
        except Overdue:
            return late(self.wall_seconds or 0.0)

    def _score_batch(self, items: Items) -> list[Outcome]:
        if not items:
            return []
        responses, rows = zip(*items, strict=True)
        try:
            with interrupting(self.wall_seconds):
                return score_batch(self.reward, responses, rows, run_coroutine)
        except Overdue:
            return [late(self.wall_seconds or 0.0)] * len(items)

    def close(self) -> None:
        """Do nothing: there are no processes to end."""


class Overdue(BaseException):
    """A call exceeded its limit of wall-clock time. A reward's ``except Exception`` does not catch
    it."""


def can_interrupt() -> bool:
    """Return whether ``interrupting`` has an effect: it needs the main thread, and a program that
    does not use SIGALRM itself."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL


@contextmanager
def interrupting(seconds: float | None) -> Iterator[None]:
    """Raise `Overdue` in the block once it has run for ``seconds``.

    Do nothing if ``seconds`` is None, or if `can_interrupt` returns False.
    """
    if seconds is None or not can_interrupt():
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise Overdue

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def run_coroutine(coroutine: Any) -> Any:
    """Run a coroutine and return its result.

    If this thread already runs an event loop, as in a notebook, the coroutine runs in a daemon
    thread, and this thread waits for it. An exception that a signal handler raises meanwhile ends
    the waiting, and the coroutine is abandoned.
    """
    import asyncio

    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    context, done = contextvars.copy_context(), Future[Any]()

    def run() -> None:
        try:
            done.set_result(context.run(asyncio.run, coroutine))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result()
