"""The progress display of a run in a notebook: one output that is updated in place."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from html import escape
from typing import Any, Self

from burnish.console.display import figures
from burnish.console.progress import Progress, format_progress
from burnish.console.text import duration

UPDATES = 2.0
"""Largest number of updates per second, except for finished steps."""


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook, which displays HTML."""
    ipython = sys.modules.get("IPython")
    shell: Any = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookDisplay:
    """Callback that displays each ``Progress`` in one output of a notebook cell. Use it as a
    context manager.

    ``name`` is the title. ``publish`` displays its argument, HTML, in place of the previous HTML;
    None to let IPython display it in the current cell.
    """

    def __init__(
        self,
        name: str,
        publish: Callable[[str], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._clock, self._began = name, clock, clock()
        self._publish = publish or _publisher()
        self._now, self._figures = Progress("load", "starting"), ""
        self._notes: list[str] = []
        self._updated = float("-inf")

    def __enter__(self) -> Self:
        self._publish(self._html())
        return self

    def __exit__(self, *error: object) -> None:
        self._publish(self._html(is_over=True))

    def __call__(self, progress: Progress) -> None:
        if progress.phase == "note":
            self._notes.append(progress.doing)
        else:
            self._now = progress
        if progress.phase == "step":
            self._figures = figures(progress)
        now, is_rare = self._clock(), progress.phase in ("note", "step")
        if is_rare or now - self._updated >= 1 / UPDATES:
            self._updated = now
            self._publish(self._html())

    def _html(self, *, is_over: bool = False) -> str:
        now, passed = self._now, duration(self._clock() - self._began)
        parts = [f"<b>{escape(self._name)}</b>"]
        if now.steps:
            done = now.step or 0
            parts.append(f'<progress value="{done}" max="{now.steps}"></progress>')
            parts.append(f"step {done} of {now.steps}")
        if self._figures:
            parts.append(escape(self._figures))
        left = now.seconds_left
        if not is_over:
            parts.append(escape(format_progress(now)))
        ends = "" if is_over or left is None else f", about {duration(left)} left"
        notes = "".join(f"<br>{escape(note)}" for note in self._notes)
        return f"<div>{' · '.join(filter(None, parts))} · {passed}{ends}{notes}</div>"


def _publisher() -> Callable[[str], None]:
    """Display an empty output in the current notebook cell; return a function that replaces the
    output by HTML."""
    from IPython.display import HTML, display

    handle: Any = display(HTML(""), display_id=True)
    return lambda html: handle.update(HTML(html))
