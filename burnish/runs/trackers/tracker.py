"""The protocol of an experiment tracker, and what a tracker is told about a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

Values = Mapping[str, float]
"""Metrics and timings of a step, by name."""
Sample = dict[str, Any]
"""A row of a table of sample responses; all rows of a table have the same keys."""
Tables = Mapping[str, Sequence[Sample]]
"""Tables of sample responses, by name. No table is empty."""


class TrackedRun(NamedTuple):
    """The description of a run that a tracker stores."""

    path: Path
    """The run's directory, whose name is the name of the tracker's run."""
    project: str
    group: str | None
    """Name by which the tracker groups runs; None if the recipe sets none."""
    recipe: dict[str, Any]
    """The resolved recipe, by section."""
    environment: dict[str, Any]
    """The content of environment.json."""


class Tracker(Protocol):
    """Sends the results of one run to an experiment tracker. The methods are called in the order
    of their definition, ``log`` once for each step."""

    def start(self, run: TrackedRun, kept: str | None) -> str:
        """Create the tracker's run, or continue the run ``kept``, and store its description.
        Return an id with which another process can continue the tracker's run."""

    def log(self, step: int, values: Values, tables: Tables) -> None:
        """Store the values of a step, and tables of its sample responses. Steps increase, also over
        several processes."""

    def finish(self, state: str, files: Sequence[Path]) -> None:
        """Store the files (report.html and others) and the state with which the run ended:
        finished, stopped, failed, or crashed. Wait until everything is stored."""
