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

import itertools
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
from burnish.environments.agent import AgentSettings, proxy_exceptions
from burnish.environments.episode import EnvironmentLimits as EnvironmentLimits
from burnish.environments.loading import split_spec
from burnish.environments.protocol import EnvironmentCall, Observation, failed_observation
from burnish.environments.supervisor import EnvironmentFacts, PlayCall, PlayReply
from burnish.environments.tools import ToolSettings
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


UNREPLAYED = "; only a deterministic environment can be replayed"
"""End of the error of a process that was killed, and whose episode is not replayed."""


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
    number: int | None = None
    """Number of the call that the present process has not answered; None if there is none."""
    called: float = 0.0
    """Time of that call."""
    is_ended: bool = False
    """Whether the pool has ended the process, so that its replies are ignored."""

    @property
    def next_call(self) -> tuple[EnvironmentCall, Any] | None:
        """The next call of the present process and its argument; None if the process has answered
        all calls, or the episode has failed."""
        if self.failure or self.position > len(self.actions):
            return None
        if not self.position:
            return "reset", (dict(self.row), self.seed)
        return "step", self.actions[self.position - 1]

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
            self.failure = replace(found, error=found.error + said)
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

    def lose(self, found: Observation, *, deterministic: bool) -> None:
        """Note that someone has killed the episode's process, which ``found`` describes; replay it
        if that is possible."""
        self.is_running = False
        if self.failure:
            return
        if deterministic and not self.was_replayed:
            self.was_replayed, self.position = True, 0
            return
        said = ", and had been replayed once before" if deterministic else UNREPLAYED
        self.failure = replace(found, error=f"{found.error}{said}", was_killed=True)


class EnvironmentPool:
    """Episodes of one environment, each in its own process. Close it after use.

    The supervisor starts with the first call of ``reset``, and again after ``close``, in a fork of
    this process, or if it has died.
    """

    deterministic: bool
    """Whether the environment and all tools say that they are deterministic; set by ``start``."""
    schemas: tuple[Mapping[str, Any], ...]
    """JSON schemas of the tools; set by ``start``."""

    def __init__(
        self,
        spec: str,
        limits: EnvironmentLimits | None = None,
        tools: ToolSettings | AgentSettings | None = None,
    ) -> None:
        """``spec`` is FILE.py:NAME. If ``limits`` is None, the defaults of `EnvironmentLimits`
        apply; if ``tools`` is None, there are none, and `AgentSettings` say that ``spec`` names an
        agent. Raise a DataError if ``spec`` has another form."""
        path, name = split_spec(spec)
        self.spec = f"{path}:{name}"
        self.limits, self._tools = limits or EnvironmentLimits(), tools
        main = getattr(sys.modules.get("__main__"), "__file__", None)
        self._script = None if main is None else Path(main).resolve()
        self._lock = threading.RLock()
        self._owner = 0
        self._supervisor: _Supervisor | None = None
        self.waited = 0.0
        """Seconds for which this pool has waited for calls of environments so far."""
        self._episodes: dict[str, _Record] = {}
        self._numbers = itertools.count()
        self._pending: dict[int, _Record] = {}
        """Episodes whose environments are called, by the number of the call."""
        self._awaited: dict[str, _Record] = {}
        """Episodes whose observation the caller has not received."""

    def __reduce__(self) -> tuple[Any, ...]:
        return EnvironmentPool, (self.spec, self.limits, self._tools), {"_script": self._script}

    def start(self) -> Self:
        """Start the supervisor unless it is running; return this pool when it has loaded the
        environment's file. Raise a DataError if it can't load the file."""
        with self._lock:
            if self._owner != os.getpid():  # a fork: the episodes are the parent's
                self._owner, self._supervisor, self._episodes = os.getpid(), None, {}
                self._pending, self._awaited = {}, {}
            if self._supervisor is None:
                if INSIDE in os.environ:
                    raise DataError(
                        "a file that starts environments was loaded as an environment; move the "
                        'code that starts them below if __name__ == "__main__":'
                    )
                self._load()
        return self

    def reset(
        self,
        episodes: Sequence[tuple[str, Mapping[str, Any], int]],
        replayed: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    ) -> list[Observation]:
        """Begin episodes, each given by its name, its data row and its seed; return their first
        observations in the same order.

        ``replayed`` has the messages of the model with which episodes begin, by name: the
        environment steps with each of them, and the last observation is returned (`observed`
        returns all); None if all episodes begin with their first turn. A running episode of the
        same name is ended first.
        """
        with self._lock:
            self._wait(records := self._reset(episodes, replayed or {}))
            return [record.latest for record in records]

    def begin_reset(
        self,
        episodes: Sequence[tuple[str, Mapping[str, Any], int]],
        replayed: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    ) -> None:
        """Like `reset`, without waiting: `poll` returns the observations."""
        with self._lock:
            self._reset(episodes, replayed or {})

    def observed(self, name: str) -> list[Observation]:
        """Return all observations of an episode so far, the one of ``reset`` first."""
        with self._lock:
            return list(self._episodes[name].observed)

    def _reset(
        self,
        episodes: Sequence[tuple[str, Mapping[str, Any], int]],
        replayed: Mapping[str, Sequence[Mapping[str, Any]]],
    ) -> list[_Record]:
        self.start()
        _check_distinct([name for name, _, _ in episodes])
        self.end([name for name, _, _ in episodes])
        records = [
            _Record(name, row, seed, [dict(action) for action in replayed.get(name, ())])
            for name, row, seed in episodes
        ]
        self._episodes |= {record.name: record for record in records}
        self._begin(records)
        return records

    def step(self, actions: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Observation]:
        """Give each named episode the model's message; return the observations in the same order.

        An episode that has failed returns its error again. Raise a ValueError if an episode has not
        been reset, is named twice, or has not answered its last call.
        """
        with self._lock:
            self._wait(records := self._step(actions))
            return [record.latest for record in records]

    def begin_step(self, actions: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        """Like `step`, without waiting: `poll` returns the observations."""
        with self._lock:
            self._step(actions)

    def _step(self, actions: Sequence[tuple[str, Mapping[str, Any]]]) -> list[_Record]:
        self.start()
        _check_distinct([name for name, _ in actions])
        unknown = [name for name, _ in actions if name not in self._episodes]
        if unknown:
            raise ValueError(
                f"an episode must be reset before its first step, but {unknown[0]!r} was not, or "
                "has ended"
            )
        if busy := [name for name, _ in actions if name in self._awaited]:
            raise ValueError(
                f"each episode may have one call at a time, but {busy[0]!r} has not answered the "
                "last one; wait with poll"
            )
        records = [self._episodes[name] for name, _ in actions]
        for record, (_, message) in zip(records, actions, strict=True):
            record.actions.append(dict(message))
        self._begin(records)
        return records

    def poll(self, seconds: float = 0.0) -> dict[str, Observation]:
        """Return the observations, by the episode's name, that calls of `begin_reset` and
        `begin_step` have had since the last poll. If there is none, wait for the first one, up to
        ``seconds``."""
        with self._lock:
            if self._owner != os.getpid():
                return {}
            until, left = time.monotonic() + seconds, 0.0
            while True:
                while self._advance(list(self._awaited.values()), left):
                    left = 0.0  # take what has arrived already
                done = [one for one in self._awaited.values() if one.next_call is None]
                left = until - time.monotonic()
                if done or left <= 0 or not self._awaited:
                    break
            self._wait(done)
            return {record.name: record.latest for record in done}

    @property
    def readable(self) -> list[Connection]:
        """The connection on which the next answer of a called environment arrives, to wait for it
        together with others; empty if no environment is called."""
        with self._lock:
            supervisor = self._supervisor if self._owner == os.getpid() else None
            return [] if supervisor is None or not self._pending else [supervisor.connection]

    def end(self, names: Iterable[str], *, waits: bool = True) -> None:
        """Call ``close`` of the named episodes' environments, and end their processes, also if they
        are called at the moment. Return when they have ended or, unless ``waits``, at once. Names
        of episodes that do not run are ignored."""
        with self._lock:
            if self._owner != os.getpid():
                return
            records = [self._episodes.pop(name) for name in set(names) & self._episodes.keys()]
            for record in records:
                self._awaited.pop(record.name, None)
            self._end_processes(records, waits=waits)

    def close(self) -> None:
        """End all episodes and the supervisor. Closing again does nothing."""
        with self._lock:
            try:
                self.end(list(self._episodes))
            finally:
                self._episodes = {}
                self._stop()
                self._pending, self._awaited = {}, {}

    def _load(self) -> None:
        """Start a supervisor and wait until it has loaded the environment's file."""
        path = [os.path.abspath(entry) for entry in sys.path]
        try:
            self._supervisor = _start_supervisor(
                self.spec, is_agent=isinstance(self._tools, AgentSettings)
            )
            given = (self.spec, self.limits, path, self._tools, self._script)
            self._supervisor.connection.send(given)
            facts = self._receive(self.limits.start_seconds, "start_seconds")
            assert isinstance(facts, EnvironmentFacts)
            self.deterministic, self.schemas = facts
        except (ChildError, OSError) as error:
            self._stop()
            said = f"environment {self.spec}: the file can't be loaded: {error}"
            raise DataError(printable(said)) from None
        except BaseException:
            self._stop()
            raise

    def _begin(self, records: Sequence[_Record]) -> None:
        """Call the environments of these episodes, which the caller awaits."""
        self._awaited |= {record.name: record for record in records}
        self._send_calls(records)

    def _wait(self, records: Sequence[_Record]) -> None:
        """Wait until each of these episodes has answered all of its calls or has failed."""
        while any(record.next_call is not None for record in records):
            self._advance(records, None)
        for record in records:
            self._awaited.pop(record.name, None)
        self._end_processes([one for one in records if one.failure])  # a replay that differed

    def _advance(self, records: Sequence[_Record], seconds: float | None) -> bool:
        """Receive one reply, waiting for at most ``seconds`` (None: until the supervisor is late),
        and make the next calls of these episodes, which replays have. Return False if there was no
        reply."""
        try:
            found = self._take_reply(seconds)
        except ChildError as error:
            self._lose(error)
            found = True
        self._send_calls(records)
        return found

    def _send_calls(self, records: Iterable[_Record]) -> None:
        """Send the next calls of those episodes whose environments are not called already."""
        waiting = [(one, call) for one in records if one.number is None and (call := one.next_call)]
        if waiting:
            self.start()
            self._send([self._call(record, *call) for record, call in waiting])

    def _call(self, record: _Record, call: EnvironmentCall, argument: Any) -> PlayCall:
        """Return the next call of an environment, whose reply is awaited."""
        record.number, record.called = next(self._numbers), time.monotonic()
        self._pending[record.number] = record
        return PlayCall(record.number, record.name, call, argument)

    def _send(self, calls: Sequence[PlayCall]) -> None:
        """Send calls to the supervisor, which is lost if it does not take them."""
        assert self._supervisor is not None
        process, connection = self._supervisor
        try:
            connection.send(calls)
        except BlockingIOError:
            self._lose(ChildError(f"{process.name} did not take a call within {SLACK:g} s"))
        except OSError:
            self._lose(process.failure())
        except BaseException:
            self._lose(ChildError("the pool was interrupted"))
            raise

    def _take_reply(self, seconds: float | None) -> bool:
        """Wait for a reply, for at most ``seconds`` (None: until the supervisor is late), and
        record it. Return False if there was none, or if no call runs.

        Raise a ChildError if the supervisor dies or does not respond. After any other error, such
        as a KeyboardInterrupt, it is stopped, because a part of its reply may be lost.
        """
        if not self._pending or self._supervisor is None:
            return False
        oldest = min(record.called for record in self._pending.values())
        began = time.perf_counter()
        left = max(0.0, oldest + self.limits.wall_seconds + SLACK - time.monotonic())
        try:
            waits = seconds is None or seconds >= left
            if not waits and not self._supervisor.connection.poll(seconds):
                return False
            reply = self._receive(left)
        except ChildError:
            raise
        except BaseException:
            self._lose(ChildError("the pool was interrupted"))
            raise
        finally:
            self.waited += time.perf_counter() - began
        assert isinstance(reply, PlayReply)
        record = self._pending.pop(reply.number, None)
        if record is not None:  # otherwise the episode has been ended
            record.number = None
            if not record.is_ended:
                self._take(record, reply)
        return True

    def _end_processes(self, records: Sequence[_Record], *, waits: bool = True) -> None:
        """Call ``close`` of the environments whose processes run, and end these processes."""
        calls = []
        for record in records:
            if record.number is not None:
                del self._pending[record.number]
            elif not record.is_running:
                continue
            record.is_running, record.is_ended = False, True
            calls.append(self._call(record, "close", None))
        if not waits:  # the replies are ignored
            for call in calls:
                del self._pending[call.number]
        if calls and self._supervisor is not None:
            self._send(calls)
        while not {call.number for call in calls}.isdisjoint(self._pending):
            self._advance((), None)

    def _take(self, record: _Record, reply: PlayReply) -> None:
        if reply.was_killed and reply.observation.error:
            record.lose(reply.observation, deterministic=self.deterministic)
        else:
            record.take(reply.observation)

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
        self._pending.clear()
        found = failed_observation(printable(str(error)))
        for record in self._episodes.values():
            record.number = None
            record.lose(found, deterministic=self.deterministic)

    def _stop(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        if supervisor is not None and self._owner == os.getpid():
            supervisor.connection.close()
            supervisor.process.close(EXIT_SECONDS)


def _start_supervisor(spec: str, *, is_agent: bool) -> _Supervisor:
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
    if is_agent:
        env |= proxy_exceptions(os.environ)
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
