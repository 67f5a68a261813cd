"""Functions of a script that are called during a run, and the records that they receive."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from burnish.errors import CallbackError
from burnish.types import Group


class StepRecord(NamedTuple):
    """A finished training step, for ``on_step``."""

    step: int
    metrics: Mapping[str, float]
    """The step's row of metrics.jsonl."""
    timings: Mapping[str, float]
    """The step's row of timings.jsonl."""
    groups: Sequence[Group]
    """The groups of graded responses that the step learned from; empty in a supervised run."""


class ValidationRecord(NamedTuple):
    """A finished validation, for ``on_validation``."""

    step: int
    """Number of finished steps; 0 before the first step."""
    metrics: Mapping[str, float]
    groups: Sequence[Group]
    """The graded responses to the held-out prompts; empty in a supervised run."""


class CheckpointRecord(NamedTuple):
    """A saved checkpoint, for ``on_checkpoint``."""

    step: int
    path: Path
    score: float | None
    """Score that selects the best checkpoint; None if the step was not validated."""


CallbackRecord = StepRecord | ValidationRecord | CheckpointRecord


class Callbacks(NamedTuple):
    """Functions that a run calls in the process that drives it, after the results in the record
    were written to the run's files. A function that returns True stops the run; a function that
    raises an error fails it."""

    on_step: Callable[[StepRecord], Any] | None = None
    on_validation: Callable[[ValidationRecord], Any] | None = None
    on_checkpoint: Callable[[CheckpointRecord], Any] | None = None

    def ask_to_stop(self, record: CallbackRecord) -> bool:
        """Call the function for this kind of record; return whether it returned True, which asks
        the run to stop. Return False if no function was given for it.

        An error of the function is raised again as a ``CallbackError`` that names the function."""
        names: dict[type, str] = {
            StepRecord: "on_step",
            ValidationRecord: "on_validation",
            CheckpointRecord: "on_checkpoint",
        }
        name = names[type(record)]
        callback = getattr(self, name)
        if callback is None:
            return False
        try:
            result = callback(record)
        except Exception as error:
            raise CallbackError(
                f"{name} raised {type(error).__name__} at step {record.step}: {error}; correct the "
                "function, pass it again, and continue with burnish.resume"
            ) from error
        return isinstance(result, bool | np.bool_) and bool(result)
