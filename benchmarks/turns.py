"""Processes that take turns: each works only when told to, so that the idle ones cost nothing.

A process prints what a piece of work cost as a line of JSON behind a mark, because libraries print
to stdout as well. Standard library only: this runs in the environments of peers too.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

MARK = "ANSWER "


class Worker:
    """The parent's side of a process."""

    def __init__(self, name: str, command: list[str], *, threads: int, **env: str) -> None:
        """Returns once the process has said that it is ready."""
        self.name = name
        environment = os.environ | env | {"OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if "BENCHMARK_STDERR" in os.environ else subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self._answer()

    def run(self, job: Any = None) -> dict[str, float]:
        """Hands over a job and waits for what it cost."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                answer: dict[str, float] = json.loads(line.removeprefix(MARK))
                return answer
        status = self._process.wait()
        raise SystemExit(f"{self.name} ended with status {status}; BENCHMARK_STDERR=1 shows why")


class Turns:
    """The process's side: `wait` ends a piece of work and returns the next one's job."""

    def __init__(self) -> None:
        self._start, self._cpu = time.perf_counter(), time.process_time()

    def wait(self, figures: dict[str, float]) -> Any:
        """Ends the process when the parent has no more jobs. The first answer means "ready"."""
        cost = {
            "seconds": time.perf_counter() - self._start,
            "cpu": time.process_time() - self._cpu,
            "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        print(MARK + json.dumps(cost | figures), flush=True)
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        self._start, self._cpu = time.perf_counter(), time.process_time()
        return json.loads(line)


def spread(values: list[float], form: str = ".2f") -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):{form}} ({low:{form}} to {high:{form}})"
