"""Progress reports: a record of the current work, and the callback that receives it.

Code at any depth calls ``tell`` or ``begin``, which call the callback that ``showing`` has set.
Reports are frequent and must be cheap: a display only stores the last record, and draws it at its
own pace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

STEP_PHASES = ("generate", "grade", "score", "learn", "publish")
"""Phases of a step; all others come before the first step or between two steps."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The current work, or in phase "step" the results of a finished step."""

    phase: str
    """check, load, download, convert, compile, evaluate, one of ``STEP_PHASES``, checkpoint,
    report, step, actors (``doing`` describes their work), or note (``doing`` is printed as a line
    that stays)."""
    doing: str
    """Description, such as "evaluating 64 prompts before the first step"."""
    done: int = 0
    """Number of completed units."""
    total: int | None = None
    """Total number of units; None if it is unknown."""
    unit: str = ""
    """Unit of ``done`` and ``total``, such as "responses"."""
    tokens_per_second: float | None = None
    """Sampling rate since the phase began; None if nothing is sampled."""
    step: int | None = None
    """Number of finished steps; None outside of a run."""
    steps: int | None = None
    """Number of steps of the run; None outside of a run."""
    seconds_left: float | None = None
    """Estimated remaining time of the run; None until the first step is finished."""
    actors: str = ""
    """Description of the actors' work; empty if there are no actors."""
    grading: str = ""
    """Progress of the grading and its failures so far, such as "12 of 64 graded, 3 timed out";
    empty if nothing is being graded."""
    turn: str = ""
    """Turn of the episodes that are being sampled, such as "turn 3 of 12"; empty if there are no
    episodes."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the step in phase "step"; empty in other phases."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Timings of the step in phase "step"; empty in other phases."""


T = TypeVar("T")
Show = Callable[[Progress], None]
_show: ContextVar[Show] = ContextVar("_show", default=lambda progress: None)


class Report(Protocol):
    """Callback for the progress of one phase: the number of units that are done, the total number
    of units (None for the total that `begin` received), and the number of tokens sampled since the
    phase began."""

    def __call__(self, done: int, total: int | None = None, *, tokens: int = 0) -> None: ...


def unheard(done: int, total: int | None = None, *, tokens: int = 0) -> None:
    """Callback that ignores all reports of a phase."""


_report: ContextVar[Report] = ContextVar("_report", default=unheard)
"""Callback for the phase that began last."""
_last: ContextVar[list[Progress] | None] = ContextVar("_last", default=None)
"""The last report of the phase that began last, in a list; None if no phase has begun."""


@contextmanager
def showing(show: Show) -> Iterator[None]:
    """Pass progress reports inside the block, in this thread, to ``show``; afterwards the previous
    callback receives them again."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


def current_show() -> Show:
    """Return the callback that receives progress reports in this context."""
    return _show.get()


def tell(phase: str, doing: str, **more: Any) -> None:
    """Pass a ``Progress`` with these fields to the callback that ``showing`` has set."""
    if phase not in ("note", "actors"):  # they belong to the phase that began last
        _last.set(None)
    _show.get()(Progress(phase, doing, **more))


def begin(phase: str, doing: str, *, total: int | None = None, unit: str = "") -> Report:
    """Report the start of a phase; return the callback for the phase's progress.

    ``total`` and ``unit``: see ``Progress``; a call of the callback may give another total. The
    callback's ``tokens`` is the number of tokens sampled since the phase began; the sampling rate
    is computed from it.
    """
    began, expected, show = time.monotonic(), total, _show.get()
    last = [Progress(phase, doing)]

    def report(done: int, total: int | None = None, *, tokens: int = 0) -> None:
        speed = tokens / max(time.monotonic() - began, 1e-3) if tokens else None
        whole = expected if total is None else total
        now = replace(last[0], done=done, total=whole, unit=unit, tokens_per_second=speed)
        last[0] = now
        show(now)

    _report.set(report)
    _last.set(last)
    report(0)
    return report


def tell_grading(done: int, total: int, *, late: int, failed: int) -> None:
    """Report the progress of grading, as a part of the phase that began last: ``done`` of ``total``
    responses are graded, ``late`` comparisons of answers timed out, and ``failed`` responses got no
    grade. Do nothing if that phase was not reported by `begin`."""
    last = _last.get()
    if last is None:
        return
    counts = {"timed out": late, "not graded": failed}
    failures = [f"{count:,} {word}" for word, count in counts.items() if count]
    last[0] = replace(last[0], grading=", ".join([f"{done:,} of {total:,} graded", *failures]))
    _show.get()(last[0])


def tell_turn(text: str) -> None:
    """Report the turn of the episodes that are being sampled, as a part of the phase that began
    last. Do nothing if that phase was not reported by `begin`."""
    last = _last.get()
    if last is not None and last[0].turn != text:
        last[0] = replace(last[0], turn=text)
        _show.get()(last[0])


def format_progress(progress: Progress) -> str:
    """Return a text with the current work, its progress and the sampling rate."""
    words = [progress.doing]
    if progress.total:
        words.append(f"{progress.done:,} of {progress.total:,} {progress.unit}".strip())
    words.append(progress.turn)
    if progress.tokens_per_second is not None:
        words.append(f"{progress.tokens_per_second:,.0f} tokens per second")
    words.append(progress.grading)
    return ", ".join(filter(None, words))


def each(items: Sequence[T]) -> Iterator[T]:
    """Yield the items. After each one, report how many are done as the progress of the phase that
    began last."""
    for done, item in enumerate(items, 1):
        yield item
        _report.get()(done, len(items))


def after(report: Report, done: int, tokens: int = 0) -> Report:
    """Return a callback for the next part of a phase of which ``done`` units and ``tokens`` tokens
    are already finished. It adds these numbers to the counts that it receives, and calls
    ``report``, the phase's callback, with the sums. It ignores the part's total."""
    first, before = done, tokens

    def further(done: int, total: int | None = None, *, tokens: int = 0) -> None:
        report(first + done, tokens=before + tokens)

    return further
