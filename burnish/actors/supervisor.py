"""The supervisor of actors: it calls them, enforces deadlines, and restarts actors that die.

After a restart, the pending calls of the actor are retried. Every method that is called here must
therefore return the same result for the same arguments, whichever calls came before it.
"""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import ray
from ray import cloudpickle
from ray.exceptions import (
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
    RayTaskError,
)

from burnish.actors.actor import ActorStatus, actor_class
from burnish.actors.cluster import NO_GROUP, TransportGroup, head_node_problem
from burnish.errors import ActorDied, ActorError, BurnishError, ClusterError
from burnish.rollout.rollout import Note, ignore

POLL_SECONDS = 1.0
"""Longest single wait for a call, and the interval between two heartbeats of an actor."""
HEARTBEAT_TIMEOUT = 60.0
"""Seconds without a heartbeat after which an actor's process counts as stopped."""
HEAD_CHECK_SECONDS = 2.0
"""Interval between two checks of Ray's head node."""
STORE_FULL = (ObjectStoreFullError, OutOfDiskError)
READ_BUFFER = "read_buffer"
"""The method of an actor that returns a buffer; it is not recorded in the timeline."""
MAX_DEATHS = 3
"""An actor that dies this many times in a row, without returning a result, is not restarted."""


@dataclass(eq=False)
class Call:
    """A call of an actor's method, and its result when it has returned."""

    actor: str
    method: str
    args: tuple[Any, ...]
    ref: Any = None
    """Ray's reference to the result."""
    span: Any = None
    """Reference to the columns that the actor adds to the call's row in the timeline."""
    answer: Any = None
    """The result; None before it was received."""
    is_done: bool = False
    retry_args: Callable[[], tuple[Any, ...]] | None = None
    """Returns the arguments of a retry; None if they are the same."""


@dataclass
class _Actor:
    name: str
    make: Callable[[], Any]
    options: dict[str, Any]
    restarts: bool
    """Whether the supervisor restarts the actor when it dies; otherwise its death is an error."""
    handle: Any = None
    calls: list[Call] = field(default_factory=list)
    """Pending calls, oldest first."""
    process: int = 0
    """Number of its current process, counted from 1."""
    deaths: int = 0
    """Consecutive deaths without a result between them."""
    last_result: float = 0.0
    """Time of its last result, of its start, or of the first call after it was idle."""
    status: ActorStatus | None = None
    """Status from its last heartbeat; None before the first."""
    last_heartbeat: float = 0.0
    heartbeat: Any = None
    """Reference to a heartbeat that was requested and has not arrived; None if there is none."""
    last_check: float = 0.0
    """Time of the last heartbeat check."""


class Supervisor:
    """Starts actors, calls their methods, waits for results, and restarts actors that die."""

    def __init__(
        self,
        deadline: float,
        log: Callable[[str], None] = lambda text: None,
        show: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        group: TransportGroup = NO_GROUP,
    ) -> None:
        """``deadline``: seconds within which an actor with pending calls must return a result.
        ``log``: callback that receives a sentence for each death. ``show``: callback that displays
        the actors' activity while the driver waits. ``group``: the actors that send each other
        tensors directly."""
        self.deadline, self.log, self.show, self.clock = deadline, log, show, clock
        self._group = group
        self.note: Note = ignore
        """Callback that appends one row to the timeline for each call that has returned."""
        self._actors: dict[str, _Actor] = {}
        self._last_head_check = 0.0
        self._is_ending = False
        """Whether Ray's head node or this node is known to be dead."""

    def restart(self, name: str, others: Sequence[str] = ()) -> None:
        """Kill and start again an actor that has lost its state, and ``others``, the names of
        actors that can't continue without it. Raise an ActorError if the first actor has now died
        `MAX_DEATHS` times without returning a result in between.

        The run continues from a checkpoint, so nobody waits for earlier calls. The pending calls of
        all actors are discarded; otherwise they would be retried when their actor dies later."""
        self._count_death(self._actors[name], "it could not continue")
        for actor in self._actors.values():
            actor.calls.clear()
        for actor in (self._actors[one] for one in (name, *others)):
            ray.kill(actor.handle)
            self._start(actor)

    def start(
        self, name: str, make: Callable[[], Any], *, restarts: bool = True, **options: Any
    ) -> None:
        """Start an actor that hosts the object that ``make`` builds there; return without waiting
        for it. ``restarts``: whether the actor is restarted when it dies; otherwise its death
        raises an ActorDied in `poll`. ``options`` are Ray's options for the actor."""
        actor = _Actor(name, make, options, restarts)
        self._actors[name] = actor
        self._start(actor)

    def call(
        self,
        name: str,
        method: str,
        *args: Any,
        retry_args: Callable[[], tuple[Any, ...]] | None = None,
    ) -> Call:
        """Call an actor's method and return the call without waiting for its result (see `poll`).
        ``retry_args`` is called if the actor dies before it answers, and returns the arguments with
        which the restarted actor is called; None if they are the same."""
        call = Call(name, method, args, retry_args=retry_args)
        actor = self._actors[name]
        if not actor.calls:  # an idle actor is not checked, so its times are old
            actor.last_result = actor.last_heartbeat = actor.last_check = self.clock()
        actor.calls.append(call)
        self._submit(actor, call)
        return call

    def buffer_ref(self, name: str, buffer: str) -> Any:
        """Return a Ray reference to the bytes of an actor's buffer, to pass as an argument of a
        call."""
        call = Call(name, READ_BUFFER, (buffer,))
        self._submit(self._actors[name], call)
        return call.ref

    def call_and_wait(self, name: str, method: str, *args: Any) -> Any:
        """Call an actor's method, wait for its result, and return it."""
        call = self.call(name, method, *args)
        while not call.is_done:
            self.poll([call], POLL_SECONDS)
        return call.answer

    def poll(self, calls: Sequence[Call], seconds: float) -> list[Call]:
        """Wait at most ``seconds`` until one of the calls has returned, and not at all if one
        already has; return the calls that have returned. ``calls`` must not be empty.

        An actor that dies meanwhile is restarted, and its calls are retried. Raise the error of a
        method that failed, an ActorDied if an actor must not be restarted, an ActorError after a
        missed deadline or too many deaths, and a ClusterError if the cluster is lost."""
        assert calls, "there are no calls to wait for"
        self._check_head_node()
        waiting = [call for call in calls if not call.is_done]
        if len(waiting) == len(calls):
            ready, _ = ray.wait([call.ref for call in waiting], timeout=seconds)
            for call in [call for call in waiting if call.ref in ready]:
                self._receive(call)
            # Check the other actors even if some results arrive all the time.
            for name in {call.actor for call in waiting if not call.is_done}:
                self._check_heartbeat(self._actors[name])
        return [call for call in calls if call.is_done]

    def pending(self, name: str) -> list[Call]:
        """Return an actor's calls whose results were not received yet, oldest first."""
        return self._actors[name].calls

    def process_number(self, name: str) -> int:
        """Return the number of an actor's current process, counted from 1. It increases with each
        restart; a new process has none of the data that earlier ones received."""
        return self._actors[name].process

    def places(self) -> dict[str, dict[str, Any]]:
        """Return the host, Ray node and pid of each actor that has sent a heartbeat, by name."""
        return {
            name: {"host": actor.status.host, "node": actor.status.node, "pid": actor.status.pid}
            for name, actor in self._actors.items()
            if actor.status is not None
        }

    def status(self, name: str) -> ActorStatus | None:
        """Return an actor's status at its last heartbeat; None before its first."""
        return self._actors[name].status

    def stop(self) -> None:
        """Kill all actors, without waiting for their calls."""
        for actor in self._actors.values():
            ray.kill(actor.handle)
        self._actors.clear()

    def _start(self, actor: _Actor) -> None:
        """Start a new process for an actor, and submit its pending calls again."""
        is_direct = actor.name in self._group.members
        kind = actor_class(actor.name.partition("-")[0].capitalize(), is_direct)
        make = cloudpickle.dumps(actor.make)  # type: ignore[no-untyped-call]
        actor.handle = kind.options(**actor.options).remote(make, is_direct)
        actor.handle.build.remote()
        actor.process += 1
        actor.last_result = actor.last_heartbeat = actor.last_check = self.clock()
        actor.heartbeat = actor.status = None
        for call in actor.calls:
            call.args = call.args if call.retry_args is None else call.retry_args()
            self._submit(actor, call)

    def _submit(self, actor: _Actor, call: Call) -> None:
        try:
            if actor.name in self._group.members:
                handles = [self._actors[name].handle for name in self._group.members]
                self._group.join(handles, self.deadline)
            if call.method == READ_BUFFER:
                read = self._group.with_transport(actor.handle.read_buffer)
                call.ref = read.remote(*call.args)
            else:
                call.ref, call.span = actor.handle.call.remote(call.method, *call.args)
        except STORE_FULL as error:
            raise _store_full(actor, call, error) from None
        except (RayActorError, ValueError) as error:  # Ray finds no sender or no receiver
            self._check_learner()
            raise ActorError(f"{actor.name} can't send or receive tensors: {error}") from None

    def _receive(self, call: Call) -> None:
        """Receive the result of a call that has returned; raise the error if the method failed. If
        the actor has died, restart it and retry its calls."""
        actor = self._actors[call.actor]
        try:
            call.answer, span = ray.get([call.ref, call.span])
            if actor.status is None:
                ready, _ = ray.wait([actor.handle.heartbeat.remote()], timeout=POLL_SECONDS)
                actor.status, actor.last_heartbeat = next(iter(ray.get(ready)), None), self.clock()
        except RayTaskError as error:
            if isinstance(error.cause, STORE_FULL):
                raise _store_full(actor, call, error.cause) from None
            self._check_learner()
            is_member = actor.name in self._group.members
            if is_member and isinstance(error.cause, TimeoutError | RayError):
                raise ActorDied(
                    f"{actor.name} did not receive its weights ({error.cause})"
                ) from None
            if isinstance(error.cause, BurnishError):
                raise error.cause from None
            raise ActorError(str(error)) from None
        except (RayActorError, ObjectLostError) as error:
            self._check_learner()
            self._restart(actor, error)
            return
        actor.deaths, actor.last_result = 0, self.clock()
        actor.calls.remove(call)
        self.note("worked", actor=call.actor, what=call.method, **span)
        call.is_done = True

    def _check_head_node(self, *, now: bool = False) -> None:
        """Check Ray's head node, every two seconds or ``now``, and raise if it has died. Raise only
        once, so that the run can still save a checkpoint."""
        is_recent = self.clock() - self._last_head_check < HEAD_CHECK_SECONDS
        if self._is_ending or (is_recent and not now):
            return
        if problem := head_node_problem():
            self._end(problem)
        self._last_head_check = self.clock()

    def _end(self, problem: str) -> NoReturn:
        self._is_ending = True
        raise ClusterError(
            f"{problem}; restart the cluster if the run has joined one (runtime.address), and "
            "continue with `burnish resume`"
        )

    def _restart(self, actor: _Actor, error: Exception) -> None:
        self._check_head_node(now=True)
        if self._is_ending or "its owner has died" in str(error):
            self._end("the Ray node of this process has died")
        found = re.search(r"exit type: (\w+)", str(error))
        why = f"exit type {found.group(1)}" if found else str(error).strip().splitlines()[-1]
        if not actor.restarts:
            raise ActorDied(f"{actor.name} died ({why})")
        self._count_death(actor, why)
        lost = ", ".join(call.method for call in actor.calls)
        self.log(f"{actor.name} died and is restarted{lost and '; retrying '}{lost}")
        self._start(actor)

    def _count_death(self, actor: _Actor, why: str) -> None:
        actor.deaths += 1
        if actor.deaths >= MAX_DEATHS:
            raise ActorError(f"{actor.name} died {MAX_DEATHS} times in a row; the last time: {why}")

    def _check_learner(self) -> None:
        """Raise if an actor that is not restarted (the learner or one of its ranks) has died: its
        death is then the reason why another actor failed."""
        for actor in self._actors.values():
            if not actor.restarts:
                try:
                    ready, _ = ray.wait(
                        [actor.handle.heartbeat.remote()], timeout=10 * POLL_SECONDS
                    )
                    ray.get(ready)
                except RayActorError as error:
                    self._restart(actor, error)

    def _check_heartbeat(self, actor: _Actor) -> None:
        """Receive an actor's heartbeat and request the next one, at most once per second. Restart
        the actor if it has died; raise if it exceeds the deadline or the heartbeat timeout."""
        now = self.clock()
        if now - actor.last_check < POLL_SECONDS:
            return
        actor.last_check = now
        if actor.heartbeat is not None and ray.wait([actor.heartbeat], timeout=0)[0]:
            try:
                actor.status, actor.last_heartbeat = ray.get(actor.heartbeat), now
            except RayActorError as error:
                self._restart(actor, error)
                return
            actor.heartbeat = None
        if actor.heartbeat is None:
            actor.heartbeat = actor.handle.heartbeat.remote()
        silence, limit = now - actor.last_heartbeat, min(HEARTBEAT_TIMEOUT, self.deadline)
        if now - actor.last_result > self.deadline or silence > limit:
            raise ActorError(self._timeout_message(actor, now))
        busy = [(a.name, a.status.activity) for a in self._actors.values() if a.calls and a.status]
        self.show("; ".join(f"{name}: {activity}" for name, activity in busy if activity))

    def _timeout_message(self, actor: _Actor, now: float) -> str:
        call = actor.calls[0]
        theirs = "It has not started to work." if actor.status is None else actor.status.stack
        ours = "".join(traceback.format_stack(limit=8)[:-3])
        state = "" if actor.status is None else _process_state(actor.status.pid)
        return (
            f"the run waited {now - actor.last_result:.0f} s for {actor.name} to answer "
            f"{call.method!r} (runtime.deadline = {self.deadline:g}); its last heartbeat was "
            f"{now - actor.last_heartbeat:.0f} s ago{state}.\nThe run waits here:\n{ours}"
            f"{actor.name} was last seen here:\n{theirs}"
        )


def _store_full(actor: _Actor, call: Call, error: Exception) -> ActorError:
    reason = str(error).partition("Tip:")[0].strip().replace("\n", " ")
    return ActorError(
        f"Ray's object store is full: {actor.name} could not run {call.method!r} ({reason}); give "
        "Ray more memory with `ray start --object-store-memory`, or free space on the disk to "
        "which it spills"
    )


def _process_state(pid: int) -> str:
    """Return "; its process is stopped" if a process was suspended by a signal; empty if it runs,
    or is on another machine."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    return "; its process is stopped" if stat.rpartition(")")[2].split()[0] in "Tt" else ""
