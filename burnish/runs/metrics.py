"""Rows of metrics and timings: measuring, combining and reading them."""

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
"""Metric → (step, value) pairs in the order of steps."""
COUNTS = ("train/skipped",)
"""Metrics that ``combine`` sums, because they count events."""
LAST = ("drift/update",)
"""Metrics of which ``combine`` keeps the last value."""


class Timers:
    """Measures the seconds that are spent in each phase, as in ``with timers("learn"):``. Time
    outside of all phases counts as ``other``.

    ``waited`` returns the seconds for which this process has waited for environments so far; they
    count as ``environments`` and not for the phase in which they passed, except in evaluations,
    whose time stays whole. None if the run has no environments.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        waited: Callable[[], float] | None = None,
    ) -> None:
        self._clock, self._waited = clock, waited
        self._began, self._waited_before = clock(), self._waiting()
        self._phases: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        began, before = self._clock(), self._waiting()
        try:
            yield
        finally:
            spent = self._waiting() - before
            if phase == "evaluate":
                self._waited_before += spent
                spent = 0.0
            self._phases[phase] += self._clock() - began - spent

    def _waiting(self) -> float:
        return 0.0 if self._waited is None else self._waited()

    def take(self) -> dict[str, float]:
        """Return the seconds of each phase since the last ``take`` as ``time/…``, and the total as
        ``time/step``; start again at 0."""
        now = self._clock()
        whole = now - self._began
        phases = {f"time/{name}": seconds for name, seconds in self._phases.items()}
        if self._waited is not None:
            waiting = self._waiting()
            phases["time/environments"] = waiting - self._waited_before
            self._waited_before = waiting
        other = whole - sum(phases.values())
        self._began = now
        self._phases.clear()
        return phases | {"time/other": other, "time/step": whole}


def combine(rows: Iterable[Mapping[str, float]]) -> Metrics:
    """Combine rows into one: minimum of ``…_min``, maximum of ``…_max``, sum of ``COUNTS``, last
    value of ``LAST``, mean of all others. A row without a metric does not count for it."""
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
    """Return the number of steps in the means over a run's start and end: ten, or for a run of
    fewer than 30 ``steps`` a third of them, at least one."""
    return max(1, min(10, steps // 3))


def end_means(values: Sequence[float]) -> tuple[float, float]:
    """Return the means over the first and over the last steps of a run; `window` is their number.

    ``values`` has one value per step, at least one.
    """
    size = window(len(values))
    return sum(values[:size]) / size, sum(values[-size:]) / size


def smooth(values: Sequence[float]) -> list[float]:
    """Return the centred moving average at each step, over up to five steps; over fewer near the
    ends and in a short run."""
    most, last = min(2, len(values) // 16), len(values) - 1
    reach = [min(most, i, last - i) for i in range(len(values))]
    return [sum(values[i - n : i + n + 1]) / (2 * n + 1) for i, n in enumerate(reach)]


def collect(rows: Iterable[Mapping[str, Any]], *, finite: bool = True) -> Series:
    """Return each metric's (step, value) pairs from the rows. Values that are not numbers are left
    out, and with ``finite`` also those that are not finite."""
    series: Series = {}
    for row in rows:
        for name, value in row.items():
            is_number = name != "step" and isinstance(value, int | float)
            if is_number and (not finite or math.isfinite(value)):
                series.setdefault(name, []).append((row["step"], float(value)))
    return series


def iterate_rows(path: Path, reach: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the rows of a JSONL file, which may be missing or empty. An incomplete last line is
    skipped; any other line that is not JSON raises a ``RunError``.

    ``reach`` is the number of bytes that are read from each end of the file; None to read all.
    """
    if not path.is_file():
        return
    with path.open("rb") as file:
        tail = 0 if reach is None else os.fstat(file.fileno()).st_size - reach
        for line in file:
            if reach is not None and reach < file.tell() < tail:
                file.seek(tail)
                file.readline()  # the rest of a line
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                if line.endswith(b"\n"):  # otherwise it is the last line, written only in part
                    raise RunError(f"{path}: {line[:60]!r} is not JSON: {error}") from error
