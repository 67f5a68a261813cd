"""How far the work is: one small record, and the function that shows it.

Work of any depth calls ``tell`` or ``begin``, which find the function that ``showing`` has set.
They are called often and must cost next to nothing, so a display keeps the last record and draws it
when it likes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

STEP_PHASES = ("generate", "grade", "score", "learn", "publish")
"""Phases of a step; all others come before the first step or between two steps."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The work that is being done now; in phase "step", the results of a finished step."""

    phase: str
    """check, load, download, convert, compile, evaluate, one of ``STEP_PHASES``, checkpoint,
    report, step, actors (``doing`` is their work), or note: a sentence that is shown and stays."""
    doing: str
    """The phase in words, such as "evaluating 64 prompts before the first step"."""
    done: int = 0
    total: int | None = None
    """None if nobody knows how much there is to do."""
    unit: str = ""
    """The things that ``done`` and ``total`` count."""
    tokens_per_second: float | None = None
    """Sampled since the phase began; None if nothing is sampled."""
    step: int | None = None
    """Finished steps; None outside of a run."""
    steps: int | None = None
    """Steps of the whole run."""
    seconds_left: float | None = None
    """None until the first step is finished."""
    actors: str = ""
    """The work of actors in words; empty if there are none."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the step, in phase "step"; empty otherwise, as are the timings."""
    timings: Mapping[str, float] = field(default_factory=dict)


T = TypeVar("T")
Show = Callable[[Progress], None]
_show: ContextVar[Show] = ContextVar("_show", default=lambda progress: None)


class Report(Protocol):
    """Is told how far one phase is."""

    def __call__(self, done: int, total: int | None = None, *, tokens: int = 0) -> None: ...


def unheard(done: int, total: int | None = None, *, tokens: int = 0) -> None:
    """Reports to nobody."""


_report: ContextVar[Report] = ContextVar("_report", default=unheard)
"""Of the phase that was announced last."""


@contextmanager
def showing(show: Show) -> Iterator[None]:
    """Progress inside the block is shown by ``show``."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


def current_show() -> Show:
    """The function that shows progress here."""
    return _show.get()


def tell(phase: str, doing: str, **more: Any) -> None:
    """Shows a ``Progress`` of these fields."""
    _show.get()(Progress(phase, doing, **more))


def begin(phase: str, doing: str, *, total: int | None = None, unit: str = "") -> Report:
    """Announces a phase and returns the function that reports how far it is.

    A report may name another total. Its tokens were sampled since the phase began.
    """
    began, expected, show = time.monotonic(), total, _show.get()

    def report(done: int, total: int | None = None, *, tokens: int = 0) -> None:
        speed = tokens / max(time.monotonic() - began, 1e-3) if tokens else None
        whole = expected if total is None else total
        show(Progress(phase, doing, done, whole, unit, tokens_per_second=speed))

    _report.set(report)
    report(0)
    return report


def spelled(progress: Progress) -> str:
    """How far the work is, in words."""
    words = [progress.doing]
    if progress.total:
        words.append(f"{progress.done:,} of {progress.total:,} {progress.unit}".strip())
    if progress.tokens_per_second is not None:
        words.append(f"{progress.tokens_per_second:,.0f} tokens per second")
    return ", ".join(filter(None, words))


def each(items: Sequence[T]) -> Iterator[T]:
    """The items one after another; the phase is told how many are done."""
    for done, item in enumerate(items, 1):
        yield item
        _report.get()(done, len(items))


def after(report: Report, done: int, tokens: int = 0) -> Report:
    """The same report for a later part of the work, which begins when ``done`` of it is done."""
    first, before = done, tokens

    def further(done: int, total: int | None = None, *, tokens: int = 0) -> None:
        report(first + done, tokens=before + tokens)

    return further
