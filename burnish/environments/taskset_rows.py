"""The rows of a run on a taskset of verifiers: its tasks, as another process describes them."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from functools import lru_cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from burnish.console.text import printable
from burnish.environments.taskset import TasksetSource, load_taskset, require_verifiers, row_of
from burnish.errors import ChildError, DataError
from burnish.machine.process import ChildProcess

LOAD_SECONDS = 300.0
"""Time to import verifiers and a taskset and to load its tasks."""


def describe_tasks(source: TasksetSource, *, timeout: float = LOAD_SECONDS) -> list[dict[str, Any]]:
    """Return a row for each task, with its place, its key and its prompt. A process of its own
    loads the taskset, so that its code runs nowhere else.

    Raise a DataError if it can't be loaded within ``timeout`` seconds, and a MissingExtra error if
    verifiers is not installed.
    """
    require_verifiers()
    return [dict(row) for row in _described(json.dumps(asdict(source), sort_keys=True), timeout)]


@lru_cache(maxsize=8)
def _described(given: str, timeout: float) -> tuple[dict[str, Any], ...]:
    """Return the rows of a source given as JSON; a run needs them more than once."""
    taskset = json.loads(given)["taskset"]
    ours, theirs = Pipe()
    code = "import sys; sys.path.insert(0, sys.argv[1]); "
    code += "from burnish.environments.taskset_rows import tell_tasks; "
    code += f"tell_tasks({theirs.fileno()})"
    try:
        child = ChildProcess(
            [sys.executable, "-P", "-u", "-c", code, str(Path(__file__).parents[2])],
            name=f"the taskset {taskset}",
            inherited=[theirs],
        )
    except ChildError:
        ours.close()
        theirs.close()
        raise
    try:
        ours.send((given, [os.path.abspath(entry) for entry in sys.path]))
        answer = child.receive(ours, timeout)
    except ChildError as error:
        raise DataError(printable(f"task.taskset = {taskset!r}: {error}")) from None
    finally:
        ours.close()
        child.close()
    if isinstance(answer, str):
        raise DataError(answer)
    return tuple(answer)


def tell_tasks(descriptor: int) -> None:
    """Main function of the process of ``describe_tasks``: send the rows, or an error's text."""
    with Connection(descriptor) as pipe:
        given, path = pipe.recv()
        sys.path.extend(entry for entry in path if entry not in sys.path)
        try:
            loaded = load_taskset(TasksetSource(**json.loads(given)))
            pipe.send([row_of(task) for task in loaded.tasks])
        except DataError as error:
            pipe.send(str(error))
