"""status.json: where a run is while it runs, and how it ended, for whoever looks from outside.

It is replaced as a whole, so that a reader sees the old one or the new one. A resumed run does not
cut it back: it holds clocks, and nothing that a run goes on from.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from burnish.progress import Progress
from burnish.runs.directory import replace_file

FILE = "status.json"
State = Literal["running", "finished", "stopped", "failed"]


def write(run: Path, state: State, progress: Progress, *, started: float, updated: float) -> None:
    """Writes a run's status; ``started`` and ``updated`` are seconds since 1970."""
    status = {
        "state": state,
        "phase": progress.phase,
        "doing": progress.doing,
        "done": progress.done,
        "total": progress.total,
        "unit": progress.unit,
        "step": progress.step,
        "steps": progress.steps,
        "tokens_per_second": progress.tokens_per_second,
        "seconds_left": progress.seconds_left,
        "started": started,
        "updated": updated,
        "pid": os.getpid(),
    }
    replace_file(run / FILE, json.dumps(status) + "\n")
