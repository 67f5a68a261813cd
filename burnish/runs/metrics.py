"""Rows of metrics and timings: measuring them, putting several into one, and reading them back."""

from __future__ import annotations

import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from burnish.errors import RunError

Metrics = dict[str, float]
Series = dict[str, list[tuple[float, float]]]
"""Metric -> (step, value), by step."""
COUNTS = ("train/skipped",)
"""Metrics that add up over a step's gradient steps."""
LAST = ("drift/update",)
"""Metrics of the last gradient step."""


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


def combine(rows: Iterable[Mapping[str, float]]) -> Metrics:
    """One row for several: least of ``…_min``, greatest of ``…_max``, sum of ``COUNTS``, last of
    ``LAST``, else mean."""
    columns: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            columns.setdefault(name, []).append(value)

    def one(name: str, values: list[float]) -> float:
        if name.endswith("_min"):
            return min(values)
        if name.endswith("_max"):
            return max(values)
        if name in LAST:
            return values[-1]
        return sum(values) if name in COUNTS else sum(values) / len(values)

    return {name: one(name, values) for name, values in columns.items()}


def window(steps: int) -> int:
    """How many steps the means at a run's two ends take: ten, or a third of a short run."""
    return max(1, min(10, steps // 3))


def end_means(values: Sequence[float]) -> tuple[float, float]:
    """The means over the first and the last steps of a run, a window each."""
    size = window(len(values))
    return sum(values[:size]) / size, sum(values[-size:]) / size


def smooth(values: Sequence[float]) -> list[float]:
    """Means over up to five neighbouring steps, fewer near the ends and in a short run."""
    most, last = min(2, len(values) // 16), len(values) - 1
    reach = [min(most, i, last - i) for i in range(len(values))]
    return [sum(values[i - n : i + n + 1]) / (2 * n + 1) for i, n in enumerate(reach)]


def collect(rows: Iterable[Mapping[str, Any]]) -> Series:
    """The finite numbers of the rows, by metric."""
    series: Series = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and isinstance(value, int | float) and math.isfinite(value):
                series.setdefault(name, []).append((row["step"], float(value)))
    return series


def iterate_rows(path: Path, reach: int | None = None) -> Iterator[dict[str, Any]]:
    """The rows of a JSONL file, which may be missing or empty; a last line that a crash cut short
    is left out.

    reach: how many bytes are read at each end of the file, None for all of it.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        tail = 0 if reach is None else os.fstat(file.fileno()).st_size - reach
        for line in file:
            if reach is not None and reach < file.tell() < tail:
                file.seek(tail)
                file.readline()  # most likely a part of one
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                if line.endswith(b"\n"):  # otherwise it is the last, and not yet written whole
                    raise RunError(f"{path}: {line[:60]!r} is not JSON: {error}") from error
