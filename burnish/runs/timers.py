"""Where the wall clock goes, phase by phase."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timers:
    """Seconds per phase since the last ``take``; time that no phase claims is ``other``."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._began = clock()
        self._phases: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self._phases[phase] += self._clock() - began

    def take(self) -> dict[str, float]:
        """The phases as ``time/…``, with ``time/step`` the whole; starts anew."""
        now = self._clock()
        whole = now - self._began
        phases = {f"time/{name}": seconds for name, seconds in self._phases.items()}
        other = whole - sum(phases.values())
        self._began = now
        self._phases.clear()
        return phases | {"time/other": other, "time/step": whole}
