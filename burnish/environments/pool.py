"""Run the environments of many episodes at the same time, each in a process of its own.

    wait for                    timeout               on timeout
    the environment to load     start_seconds         DataError
    a call of an environment    cpu_seconds           the kernel kills the episode's process
    a call of an environment    wall_seconds          the supervisor kills the episode's process
    a supervisor's answer       wall_seconds + SLACK  the supervisor is replaced

An episode that fails has an observation with an error; the other episodes go on. If someone else
kills an episode's process or the supervisor, the episodes of a deterministic environment are
replayed, each at most once: the same row, seed and actions must give the observations that the pool
has recorded. Otherwise these episodes fail. This process starts no threads and does not fork, so a
pool works from any thread, and from a script without a main guard.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple, Self

from burnish.console.text import printable
from burnish.environments.episode import EnvironmentLimits as EnvironmentLimits
from burnish.environments.loading import split_spec
from burnish.environments.protocol import Observation, failed_observation
from burnish.environments.supervisor import PlayCall, PlayReply
from burnish.environments.worker import GRACE_SECONDS
from burnish.errors import ChildError, DataError
from burnish.machine.process import ChildProcess

INSIDE = "BURNISH_ENVIRONMENT_WORKER"
"""Environment variable that is set in supervisors and episodes."""
SLACK = 60.0
"""Seconds that a supervisor may take beyond the timeout of its episodes."""
EXIT_SECONDS = GRACE_SECONDS + 15.0
"""Seconds that the guardian has to kill all processes and exit."""
LOG_BYTES = 1 << 20
"""Size at which the log of a supervisor is emptied."""
SLICE_SECONDS = 0.2
"""Interval at which the size of the log is checked while the pool waits."""


class _Supervisor(NamedTuple):
    process: ChildProcess
    connection: Connection


@dataclass(eq=False)
class _Record:
    """An episode as the pool has recorded it: enough to replay it."""

    name: str
    row: Mapping[str, Any]
    seed: int
    actions: list[Mapping[str, Any]] = field(default_factory=list)
    observed: list[Observation] = field(default_factory=list)
    """Observations of ``reset`` and of the steps, in their order."""
    position: int = 0
    """Number of calls that the episode's present process has answered."""
    is_running: bool = False
    """Whether the supervisor has a process of this episode."""
    was_replayed: bool = False
    failure: Observation | None = None

    @property
    def next_call(self) -> PlayCall | None:
        """The next call of the present process; None if it has answered all calls, or failed."""
        if self.failure or self.position > len(self.actions):
            return None
        if not self.position:
            return PlayCall(self.name, "reset", (dict(self.row), self.seed))
        return PlayCall(self.name, "step", self.actions[self.position - 1])

    @property
    def latest(self) -> Observation:
        """The observation of the last call, or the error because of which there is none."""
        if len(self.observed) > len(self.actions):
            return self.observed[-1]
        assert self.failure is not None
        return self.failure

    def fail(self, error: str, seconds: float = 0.0) -> None:
        self.failure = failed_observation(error, seconds)

    def take(self, found: Observation) -> None:
        """Record the observation of the next call, or compare it with the recorded one."""
        self.is_running = found.error is None
        said = "" if self.position >= len(self.observed) else ", in a replay after a kill"
        if found.error is not None:
            self.fail(found.error + said, found.seconds)
        elif not said:
            self.observed.append(found)
        elif replace(found, seconds=0.0) != replace(self.observed[self.position], seconds=0.0):
            name = f"step {self.position}" if self.position else "reset"
            self.fail(
                f"the environment was killed and replayed, but the observation of {name} differs; "
                "use the seed for all randomness, or set deterministic = False",
                found.seconds,
            )
        self.position += 1

    def lose(self, reason: str, *, deterministic: bool) -> None:
        """Note that someone has killed the episode's process; replay it if that is possible."""
        self.is_running = False
        if self.failure:
            return
        if not deterministic:
            self.fail(f"{reason}; only a deterministic environment can be replayed")
        elif self.was_replayed:
            self.fail(f"{reason}, and had been replayed once before")
        else:
            self.was_replayed, self.position = True, 0


class EnvironmentPool:
    """Episodes of one environment, each in its own process. Close it after use.

    The supervisor starts with the first call of ``reset``, and again after ``close``, in a fork of
    this process, or if it has died.
    """

    deterministic: bool
    """Whether the environment says that it is deterministic; set by ``start``."""

    def __init__(self, spec: str, limits: EnvironmentLimits | None = None) -> None:
        """``spec`` is FILE.py:NAME. If ``limits`` is None, the defaults of `EnvironmentLimits`
        apply. Raise a DataError if ``spec`` has another form."""
        path, name = split_spec(spec)
        self.spec = f"{path}:{name}"
        self.limits = limits or EnvironmentLimits()
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        self._is_script = main is not None and Path(main).resolve() == path
        self._lock = threading.RLock()
        self._owner = 0
        self._supervisor: _Supervisor | None = None
        self.waited = 0.0
        """Seconds for which this pool has waited for calls of environments so far."""
        self._episodes: dict[str, _Record] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return EnvironmentPool, (self.spec, self.limits), {"_is_script": self._is_script}

    def start(self) -> Self:
        """Start the supervisor unless it is running; return this pool when it has loaded the
        environment's file. Raise a DataError if it can't load the file."""
        with self._lock:
            if self._owner != os.getpid():  # a fork: the episodes are the parent's
                self._owner, self._supervisor, self._episodes = os.getpid(), None, {}
            if self._supervisor is None:
                if INSIDE in os.environ:
                    raise DataError(
                        "a file that starts environments was loaded as an environment; move the "
                        'code that starts them below if __name__ == "__main__":'
                    )
                self._load()
        return self

    def reset(self, episodes: Sequence[tuple[str, Mapping[str, Any], int]]) -> list[Observation]:
        """Begin episodes, each given by its name, its data row and its seed; return their first
        observations in the same order.

        A running episode of the same name is ended first.
        """
        with self._lock:
            self.start()
            _check_distinct([name for name, _, _ in episodes])
            self.end([name for name, _, _ in episodes])
            records = [_Record(*episode) for episode in episodes]
            self._episodes |= {record.name: record for record in records}
            self._advance(records)
            return [record.latest for record in records]

    def step(self, actions: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Observation]:
        """Give each named episode the model's message; return the observations in the same order.

        An episode that has failed returns its error again. Raise a ValueError if an episode has not
        been reset, or is named twice.
        """
        with self._lock:
            self.start()
            _check_distinct([name for name, _ in actions])
            unknown = [name for name, _ in actions if name not in self._episodes]
            if unknown:
                raise ValueError(
                    f"an episode must be reset before its first step, but {unknown[0]!r} was not, "
                    "or has ended"
                )
            records = [self._episodes[name] for name, _ in actions]
            for record, (_, message) in zip(records, actions, strict=True):
                record.actions.append(dict(message))
            self._advance(records)
            return [record.latest for record in records]

    def end(self, names: Iterable[str]) -> None:
        """Call ``close`` of the named episodes' environments, and end their processes. Names of
        episodes that do not run are ignored."""
        with self._lock:
            if self._owner != os.getpid():
                return
            records = [self._episodes.pop(name) for name in set(names) & self._episodes.keys()]
            self._end_processes(records)

    def close(self) -> None:
        """End all episodes and the supervisor. Closing again does nothing."""
        with self._lock:
            try:
                self.end(list(self._episodes))
            finally:
                self._episodes = {}
                self._stop()

    def _load(self) -> None:
        """Start a supervisor and wait until it has loaded the environment's file."""
        path = [os.path.abspath(entry) for entry in sys.path]
        try:
            self._supervisor = _start_supervisor(self.spec)
            self._supervisor.connection.send((self.spec, self.limits, path, self._is_script))
            self.deterministic = self._receive(self.limits.start_seconds, "start_seconds")
        except (ChildError, OSError) as error:
            self._stop()
            said = f"environment {self.spec}: the file can't be loaded: {error}"
            raise DataError(printable(said)) from None
        except BaseException:
            self._stop()
            raise

    def _advance(self, records: Sequence[_Record]) -> None:
        """Call the environments of these episodes until each has answered all of its calls or has
        failed, in rounds of one call per episode."""
        while True:
            waiting = [(one, call) for one in records if (call := one.next_call)]
            if not waiting:
                break
            self.start()
            try:
                for reply in self._call([call for _, call in waiting]):
                    self._take(waiting[reply.place][0], reply)
            except ChildError as error:
                self._lose(error)
        self._end_processes([one for one in records if one.failure])  # a replay that differed

    def _end_processes(self, records: Sequence[_Record]) -> None:
        """Call ``close`` of the environments whose processes run, and end these processes."""
        calls = [PlayCall(one.name, "close", None) for one in records if one.is_running]
        for record in records:
            record.is_running = False
        try:
            for _ in self._call(calls) if calls and self._supervisor else ():
                pass
        except ChildError as error:
            self._lose(error)

    def _take(self, record: _Record, reply: PlayReply) -> None:
        if reply.was_killed and reply.observation.error:
            record.lose(reply.observation.error, deterministic=self.deterministic)
        else:
            record.take(reply.observation)

    def _call(self, calls: Sequence[PlayCall]) -> Iterable[PlayReply]:
        """Send calls to the supervisor; yield the replies as they arrive.

        Raise a ChildError if the supervisor dies or does not respond. After any other error, such
        as a KeyboardInterrupt, the supervisor is stopped, because its replies would be mistaken for
        the replies to the next calls.
        """
        assert self._supervisor is not None
        process, connection = self._supervisor
        is_complete, began = False, time.perf_counter()
        try:
            try:
                connection.send(calls)
            except BlockingIOError:
                raise ChildError(f"{process.name} did not take a call within {SLACK:g} s") from None
            except OSError:
                raise process.failure() from None
            for _ in calls:
                reply = self._receive(self.limits.wall_seconds + SLACK)
                assert isinstance(reply, PlayReply)
                yield reply
            is_complete = True
        except ChildError:
            is_complete = True  # the caller stops the supervisor
            raise
        finally:
            self.waited += time.perf_counter() - began
            if not is_complete:
                self._lose(ChildError("the pool was interrupted"))

    def _receive(self, timeout: float, limit: str = "") -> Any:
        """Return the supervisor's next answer; raise an answer that is an exception.

        Raise a ChildError if the supervisor has died, or sends nothing within ``timeout`` seconds,
        the setting ``limit``.
        """
        assert self._supervisor is not None
        process, connection = self._supervisor
        deadline = time.monotonic() + timeout
        late = f"{process.name} did not respond within {timeout:g} s{limit and f' ({limit})'}"
        process.limit_log(LOG_BYTES)
        while not connection.poll(max(0.0, min(SLICE_SECONDS, deadline - time.monotonic()))):
            process.limit_log(LOG_BYTES)
            if time.monotonic() >= deadline:
                raise ChildError(process.with_tail(late))
        try:
            answer = connection.recv()
        except BlockingIOError:  # it stopped in the middle of an answer
            raise ChildError(process.with_tail(late)) from None
        except (EOFError, OSError):
            raise process.failure() from None
        if isinstance(answer, Exception):
            raise answer
        return answer

    def _lose(self, error: ChildError) -> None:
        """Stop a supervisor that has failed; replay its episodes, if that is possible, with the
        next supervisor."""
        self._stop()
        for record in self._episodes.values():
            record.lose(printable(str(error)), deterministic=self.deterministic)

    def _stop(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None and self._owner == os.getpid():
            supervisor.connection.close()
            supervisor.process.close(EXIT_SECONDS)


def _start_supervisor(spec: str) -> _Supervisor:
    ours, theirs = Pipe()
    # Neither a call nor an answer can block the pool if the supervisor stops in its middle.
    limit = struct.pack("ll", int(SLACK), 0)
    with closing(socket.socket(fileno=os.dup(ours.fileno()))) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
    code = "import sys; sys.path.insert(0, sys.argv[1]); from burnish.environments import worker"
    arguments = [
        f"{code}; worker.run_environments({theirs.fileno()})",
        str(Path(__file__).parents[2]),
    ]
    # Replays need the same order of sets in every supervisor.
    env = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    try:
        process = ChildProcess(
            [sys.executable, "-P", "-u", "-c", *arguments],
            name=f"the supervisor of {spec}",
            inherited=[theirs],
            env=env | {INSIDE: "1"},
        )
    except ChildError:
        ours.close()
        theirs.close()
        raise
    return _Supervisor(process, ours)


def _check_distinct(names: Sequence[str]) -> None:
    twice = (
        [name for name in names if names.count(name) > 1] if len(set(names)) < len(names) else []
    )
    if twice:
        raise ValueError(f"each episode may have one call at a time, but {twice[0]!r} has several")
