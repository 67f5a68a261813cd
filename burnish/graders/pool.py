"""A pool of grader workers: hard deadlines, bounded memory, answers in order.

``GraderPool.grade`` returns when it has every answer. Its waits, each with a deadline:

    waits for                    at most            then
    a worker that starts         start_seconds      GraderError, names the worker
    an answer                    cpu_seconds        the kernel kills the worker, or a fork of it
    an answer                    wall_seconds       the pool kills the worker
    another thread's grades      LOCK_SECONDS       GraderError

A late item, and one for which memory runs out, is an error; in a comparison of answers it is a
timeout, which scores 0. A worker that dies by itself makes its item an error. In each case another
worker is started, and the items that the dead one had not begun go to the others. There are no
threads and no forks here, so a pool works from any thread, and from a script without a main guard.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from burnish.errors import DataError, GraderError
from burnish.graders.rewards import BUILT_IN, Source
from burnish.graders.worker import exceeded, frame
from burnish.types import Grade, Status

Items = Sequence[tuple[str, Mapping[str, Any]]]
"""(response, row) of each."""
SLICE = 0.05
"""Seconds between two looks at workers that say nothing."""
LOCK_SECONDS = 3600.0
BATCH_ITEMS, BATCH_CHARACTERS = 128, 200_000
INSIDE = "BURNISH_GRADER_WORKER"


@dataclass(frozen=True)
class Limits:
    workers: int = 2
    cpu_seconds: float = 2.0
    """Per item, in the worker's own CPU time, so that a busy machine changes no reward."""
    wall_seconds: float = 20.0
    """Per item; for a reward that sleeps or waits."""
    start_seconds: float = 120.0
    """To load the reward; no item's deadline runs before that."""
    memory_bytes: int = 1 << 30
    """Beyond what the loaded reward takes; Linux only."""
    characters: int = 100_000
    """A longer response is not looked at: unparsed, reward 0."""


@dataclass
class _Worker:
    name: str
    process: subprocess.Popen[bytes]
    ready: bool = False
    closed: bool = False
    waited: float = 0.0
    """Seconds since it was last heard of, as far as the pool was there to listen."""
    items: deque[int] = field(default_factory=deque)
    """What it was given and has not answered; it is on the first."""
    untimed: int = 0
    """Batches of which it has not yet said what they took."""
    incoming: bytearray = field(default_factory=bytearray)
    outgoing: bytearray = field(default_factory=bytearray)


class GraderPool:
    """Grades by one reward in worker processes; close it, or use it in a ``with``."""

    def __init__(self, source: Source, limits: Limits | None = None) -> None:
        """Starts the workers and waits until one of them has loaded the reward."""
        if INSIDE in os.environ:
            raise GraderError(
                "a file that starts graders was loaded by a grader; put what the file does under "
                'if __name__ == "__main__":'
            )
        self.source = source
        self.limits = limits or Limits()
        self.counts: Counter[str] = Counter()
        """Grades by status, and ``restarts`` of workers."""
        self.cpu_seconds = 0.0
        """What the workers spent on batches that came back whole."""
        self._lock = threading.Lock()
        self._started = 0
        self._workers: list[_Worker] = []
        self._grades: list[Grade | None] = []
        self._pending: deque[int] = deque()
        self._finalizer = weakref.finalize(self, _end, self._workers, os.getpid())
        try:
            for _ in range(self.limits.workers):
                self._workers.append(self._start())
            with selectors.DefaultSelector() as selector:
                while not any(worker.ready for worker in self._workers):
                    self._listen(selector, SLICE)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        """A pool that is unpickled starts workers of its own."""
        return GraderPool, (self.source, self.limits)

    @property
    def closed(self) -> bool:
        return not self._finalizer.alive

    def close(self) -> None:
        """Ends the workers and all that they started; a pool may be closed twice."""
        self._finalizer()

    def grade(self, items: Items) -> list[Grade]:
        """The grades in the items' order."""
        if not self._lock.acquire(timeout=LOCK_SECONDS):
            raise GraderError(f"waited {LOCK_SECONDS:g} s for another thread's {self.source.spec}")
        try:
            if self.closed:
                raise GraderError(f"the graders of {self.source.spec} are closed")
            grades = self._grade(items)
        except BaseException:
            self.close()  # answers to what was already sent would be taken for the next call's
            raise
        finally:
            self._lock.release()
        self.counts.update(str(grade.status) for grade in grades)
        return grades

    def _grade(self, items: Items) -> list[Grade]:
        longest = self.limits.characters
        too_long = Grade(0.0, status=Status.UNPARSED, message=f"longer than {longest} characters")
        self._grades = [too_long if len(text) > longest else None for text, _ in items]
        self._pending = deque(index for index, grade in enumerate(self._grades) if grade is None)
        self._tried_again: set[int] = set()
        with selectors.DefaultSelector() as selector:
            self._listen(selector, 0)  # finds those that died since the last call
            while self._pending or any(w.items or w.untimed for w in self._workers):
                for worker in self._workers:
                    self._feed(worker, items)
                self._listen(selector, SLICE)
        grades = [grade for grade in self._grades if grade is not None]
        assert len(grades) == len(items)
        return grades

    def _feed(self, worker: _Worker, items: Items) -> None:
        """Gives a batch to a worker that runs out of items, so that none waits for the pool."""
        if not worker.ready or len(worker.items) > BATCH_ITEMS // 2 or not self._pending:
            return
        most = min(BATCH_ITEMS, math.ceil(len(self._pending) / len(self._workers)))
        batch: list[int] = []
        characters = 0
        while self._pending and len(batch) < most and characters < BATCH_CHARACTERS:
            batch.append(self._pending.popleft())
            characters += len(items[batch[-1]][0])
        try:
            worker.outgoing += frame([items[index] for index in batch])
        except (TypeError, ValueError) as error:
            raise DataError(f"a row for {self.source.spec} is not JSON: {error}") from error
        worker.waited = worker.waited if worker.items else 0.0
        worker.items.extend(batch)
        worker.untimed += 1

    def _listen(self, selector: selectors.BaseSelector, timeout: float) -> None:
        """Takes what the workers say within a moment, and sees to those that are late or dead."""
        for worker in self._workers:
            _watch(selector, worker)
        began = time.monotonic()
        for key, event in selector.select(timeout):
            _write(key.data) if event & selectors.EVENT_WRITE else self._read(key.data)
        # A pool that was itself stopped for a while does not blame its workers.
        passed = min(time.monotonic() - began, 10 * SLICE)
        for position, worker in enumerate(self._workers):
            worker.waited += passed
            allowed = self.limits.wall_seconds if worker.ready else self.limits.start_seconds
            busy = bool(worker.items) or worker.untimed > 0 or not worker.ready
            late = busy and worker.waited > allowed
            if late or worker.closed or worker.process.poll() is not None:
                _watch(selector, worker, forget=True)
                self._workers[position] = self._replace(worker, late)

    def _read(self, worker: _Worker) -> None:
        """Takes every frame that lies ready."""
        assert worker.process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(worker.process.stdout.fileno(), 1 << 16):
                worker.incoming += chunk
                worker.waited = 0.0
            worker.closed = True
        *lines, worker.incoming = worker.incoming.split(b"\n")
        for line in lines:
            self._take(worker, json.loads(line))

    def _take(self, worker: _Worker, said: Any) -> None:
        if isinstance(said, list):
            status, reward, parts, message = said
            self._grades[worker.items.popleft()] = Grade(reward, parts, Status(status), message)
        elif "failed" in said:
            raise DataError(said["failed"])
        elif "ready" in said:
            worker.ready = True
        else:
            self.cpu_seconds += said["cpu_seconds"]
            worker.untimed -= 1

    def _replace(self, worker: _Worker, late: bool) -> _Worker:
        """Another worker for one that is late or dead; the item it was on gets its grade here."""
        suspect = worker.items[0] if worker.items else None
        code = _kill(worker)
        self._read(worker)  # what it said last
        worker.process.stdout.close()  # type: ignore[union-attr]
        if not worker.ready:
            how = f"within {self.limits.start_seconds:g} s" if late else f"and {_ended(code)}"
            raise GraderError(f"{worker.name} did not load {self.source.spec} {how}")
        # Killed from outside, perhaps before it saw the item: that one is tried once more.
        outside = code == -signal.SIGKILL and not late and worker.items
        if outside and worker.items[0] not in self._tried_again:
            self._tried_again.add(worker.items[0])
        elif worker.items and not (late and worker.items[0] != suspect):
            self._grades[worker.items.popleft()] = self._verdict(code, late)
        self._pending.extendleft(reversed(worker.items))
        self.counts["restarts"] += 1
        return self._start()

    def _verdict(self, code: int, late: bool) -> Grade:
        limits = self.limits
        too_much = exceeded(code, (limits.cpu_seconds, limits.memory_bytes))
        if late:
            too_much = f"took more than {limits.wall_seconds:g} s (task.wall_seconds)"
        if too_much and self.source.compares_answers:
            return Grade(0.0, {}, Status.TIMEOUT, too_much)
        return Grade(math.nan, {}, Status.ERROR, too_much or f"the worker {_ended(code)}")

    def _start(self) -> _Worker:
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        process = subprocess.Popen(
            [sys.executable, "-P", "-u", "-m", "burnish.graders.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # What a user's reward prints is theirs to see; a library's warnings may quote a model.
            stderr=subprocess.DEVNULL if _is_ours(self.source) else None,
            env={"OMP_NUM_THREADS": "1", **os.environ, "PYTHONPATH": path, INSIDE: "1"},
            start_new_session=True,
            bufsize=0,
        )
        for pipe in (process.stdin, process.stdout):
            os.set_blocking(pipe.fileno(), False)  # type: ignore[union-attr]
        self._started += 1
        worker = _Worker(f"grader worker {self._started} (pid {process.pid})", process)
        setup = {
            "source": self.source,
            "parent": os.getpid(),
            "path": [os.path.abspath(entry) for entry in sys.path],
            "cpu_seconds": self.limits.cpu_seconds,
            "memory_bytes": self.limits.memory_bytes,
        }
        worker.outgoing += frame(setup)
        return worker


def _watch(selector: selectors.BaseSelector, worker: _Worker, *, forget: bool = False) -> None:
    """Listens to a worker, and for room in its pipe while there is something to send."""
    wanted = (
        (worker.process.stdout, selectors.EVENT_READ, not forget),
        (worker.process.stdin, selectors.EVENT_WRITE, bool(worker.outgoing) and not forget),
    )
    for pipe, event, want in wanted:
        assert pipe is not None
        if want != (pipe in selector.get_map()):
            selector.register(pipe, event, worker) if want else selector.unregister(pipe)


def _write(worker: _Worker) -> None:
    assert worker.process.stdin is not None
    try:
        sent = os.write(worker.process.stdin.fileno(), worker.outgoing)
    except BlockingIOError:
        return
    except BrokenPipeError:  # it is dead, and found so before long
        sent = len(worker.outgoing)
    del worker.outgoing[:sent]


def _kill(worker: _Worker) -> int:
    """Ends a worker and whatever it started; how it had ended, if it had."""
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(worker.process.pid, signal.SIGKILL)
    try:
        return worker.process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        raise GraderError(f"{worker.name} does not die; the system holds it") from None


def _end(workers: list[_Worker], owner: int) -> None:
    """Lets the workers end by themselves, and ends those that do not within a second."""
    if os.getpid() != owner:  # a fork of the owner exits; the workers are not its own
        return
    for worker in workers:
        worker.process.stdin.close()  # type: ignore[union-attr]
    deadline = time.monotonic() + 1
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        _kill(worker)
        worker.process.stdout.close()  # type: ignore[union-attr]
    workers.clear()


def _is_ours(source: Source) -> bool:
    return source.spec in BUILT_IN or source.module.startswith("burnish.")


def _ended(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
