"""Calls of actors: each has a name and a deadline, and an actor that dies is started again.

A call is made again on the new actor with the same arguments, so every method that is called here
must give the same result for the same arguments, whatever was called before.
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

from burnish.actors.cluster import NOBODY, Exchange, head_problem
from burnish.actors.shell import Pulse, actor_class
from burnish.errors import ActorDied, ActorError, BurnishError
from burnish.rollout.rollout import Note, ignore

PULSE = 1.0
"""Seconds between two looks at an actor that somebody waits for."""
SILENCE = 60.0
"""Seconds without a pulse after which an actor's process counts as stopped."""
LOOK = 2.0
"""Seconds between two looks at Ray's head node."""
FULL = (ObjectStoreFullError, OutOfDiskError)
DEATHS = 3
"""Deaths in a row, with no answer between them, after which an actor is not started again."""


@dataclass(eq=False)
class Call:
    """A call that was made, and is not answered or not yet asked for."""

    actor: str
    method: str
    args: tuple[Any, ...]
    ref: Any = None
    span: Any = None
    """A reference to the call's part of a row in the timeline."""
    answer: Any = None
    is_done: bool = False
    renew: Callable[[], tuple[Any, ...]] | None = None
    """The arguments with which it is made again; None if they are the same."""


@dataclass
class _Actor:
    name: str
    make: Callable[[], Any]
    options: dict[str, Any]
    restarts: bool
    """Whether a dead actor is started again here; otherwise its death is an error."""
    handle: Any = None
    calls: list[Call] = field(default_factory=list)
    """Not answered, in the order in which they were made."""
    life: int = 0
    """Processes that it has had."""
    deaths: int = 0
    heard: float = 0.0
    """When the actor last answered a call, or was started."""
    pulse: Pulse | None = None
    felt: float = 0.0
    """When its last pulse came."""
    feeling: Any = None
    """The pulse that was asked for and has not come."""
    checked: float = 0.0
    """When somebody who waited last looked at it."""


class Supervisor:
    """Starts actors, calls them, waits for them, and starts the dead ones again."""

    def __init__(
        self,
        deadline: float,
        tell: Callable[[str], None] = lambda text: None,
        show: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        group: Exchange = NOBODY,
    ) -> None:
        """``deadline``: seconds in which an actor must answer one of its calls. ``tell`` is given
        a sentence for each death, ``show`` the actors' work in words while somebody waits.
        ``group``: the actors that send each other tensors directly."""
        self.deadline, self.tell, self.show, self.clock = deadline, tell, show, clock
        self._group = group
        self.note: Note = ignore
        """Is told of each call that was answered."""
        self._actors: dict[str, _Actor] = {}
        self._looked, self._is_ending = 0.0, False
        """When the head node last answered, and whether Ray is known to end."""

    def restart(self, name: str, others: Sequence[str] = ()) -> None:
        """Starts an actor again that has lost its state, and others that can't go on without it.

        The run goes back, so nobody waits for a call that was made before: the calls of all actors
        are forgotten, or one of them would be made again when its actor dies later."""
        self._count_death(self._actors[name], "it could not go on")
        for actor in self._actors.values():
            actor.calls.clear()
        for actor in (self._actors[one] for one in (name, *others)):
            ray.kill(actor.handle)
            self._begin(actor)

    def start(
        self, name: str, make: Callable[[], Any], *, restarts: bool = True, **options: Any
    ) -> None:
        """Starts an actor that holds the object that ``make`` builds; ``options`` are Ray's."""
        actor = _Actor(name, make, options, restarts)
        self._actors[name] = actor
        self._begin(actor)

    def call(
        self,
        name: str,
        method: str,
        *args: Any,
        renew: Callable[[], tuple[Any, ...]] | None = None,
    ) -> Call:
        """Makes a call; ``renew`` gives the arguments with which it is made again after a death,
        by default the same."""
        call = Call(name, method, args, renew=renew)
        actor = self._actors[name]
        if not actor.calls:  # it was idle: nobody listened
            actor.heard = actor.felt = actor.checked = self.clock()
        actor.calls.append(call)
        self._make(actor, call)
        return call

    def hand(self, name: str, space: str) -> Any:
        """A reference to the bytes of a space of an actor; who is called with it gets them."""
        call = Call(name, "give", (space,))
        self._make(self._actors[name], call)
        return call.ref

    def ask(self, name: str, method: str, *args: Any) -> Any:
        """Makes a call, and waits for its answer."""
        call = self.call(name, method, *args)
        while not call.is_done:
            self.poll([call], PULSE)
        return call.answer

    def poll(self, calls: Sequence[Call], seconds: float) -> list[Call]:
        """The calls that are answered, after at most ``seconds`` if none was before.

        Whoever waits names the calls: an actor that has none has no deadline, and would be waited
        for without end."""
        assert calls, "a run waits for calls of actors, and was given none to wait for"
        self._look()
        waiting = [call for call in calls if not call.is_done]
        if len(waiting) == len(calls):
            ready, _ = ray.wait([call.ref for call in waiting], timeout=seconds)
            for call in [call for call in waiting if call.ref in ready]:
                self._take(call)
            # Also if others answer all the time.
            for name in {call.actor for call in waiting if not call.is_done}:
                self._check(self._actors[name])
        return [call for call in calls if call.is_done]

    def open(self, name: str) -> list[Call]:
        """The calls of an actor that are not answered."""
        return self._actors[name].calls

    def life(self, name: str) -> int:
        """The number of an actor's process, counted from 1: another one has lost all that the
        process before it was given."""
        return self._actors[name].life

    def places(self) -> dict[str, dict[str, Any]]:
        """The machine and the process of each actor that has given a sign of life."""
        return {
            name: {"host": actor.pulse.host, "node": actor.pulse.node, "pid": actor.pulse.pid}
            for name, actor in self._actors.items()
            if actor.pulse is not None
        }

    def pulse(self, name: str) -> Pulse | None:
        """The last sign of life of an actor; None before its first."""
        return self._actors[name].pulse

    def stop(self) -> None:
        for actor in self._actors.values():
            ray.kill(actor.handle)
        self._actors.clear()

    def _begin(self, actor: _Actor) -> None:
        is_direct = actor.name in self._group.members
        kind = actor_class(actor.name.partition("-")[0].capitalize(), is_direct)
        make = cloudpickle.dumps(actor.make)  # type: ignore[no-untyped-call]
        actor.handle = kind.options(**actor.options).remote(make, is_direct)
        actor.handle.build.remote()
        actor.life += 1
        actor.heard = actor.felt = actor.checked = self.clock()
        actor.feeling = actor.pulse = None
        for call in actor.calls:
            call.args = call.args if call.renew is None else call.renew()
            self._make(actor, call)

    def _make(self, actor: _Actor, call: Call) -> None:
        try:
            if actor.name in self._group.members:
                handles = [self._actors[name].handle for name in self._group.members]
                self._group.join(handles, self.deadline)
            if call.method == "give":
                call.ref = self._group.carried(actor.handle.give).remote(*call.args)
            else:
                call.ref, call.span = actor.handle.call.remote(call.method, *call.args)
        except FULL as error:
            raise _full(actor, call, error) from None
        except (RayActorError, ValueError) as error:  # Ray finds no sender or no receiver
            self._check_learner()
            raise ActorError(f"no tensors go to or from {actor.name}: {error}") from None

    def _take(self, call: Call) -> None:
        """Takes an answer; calls of a dead actor are made again."""
        actor = self._actors[call.actor]
        try:
            call.answer, span = ray.get([call.ref, call.span])
            if actor.pulse is None:
                felt, _ = ray.wait([actor.handle.pulse.remote()], timeout=PULSE)
                actor.pulse, actor.felt = next(iter(ray.get(felt)), None), self.clock()
        except RayTaskError as error:
            if isinstance(error.cause, FULL):
                raise _full(actor, call, error.cause) from None
            self._check_learner()
            is_member = actor.name in self._group.members
            if is_member and isinstance(error.cause, TimeoutError | RayError):
                raise ActorDied(f"{actor.name} did not get its weights ({error.cause})") from None
            if isinstance(error.cause, BurnishError):
                raise error.cause from None
            raise ActorError(str(error)) from None
        except (RayActorError, ObjectLostError) as error:
            self._check_learner()
            self._restart(actor, error)
            return
        actor.deaths, actor.heard = 0, self.clock()
        actor.calls.remove(call)
        self.note("worked", actor=call.actor, what=call.method, **span)
        call.is_done = True

    def _look(self, *, now: bool = False) -> None:
        """Raises if Ray's head node has died: once, so that a checkpoint can be saved after it."""
        if self._is_ending or (not now and self.clock() - self._looked < LOOK):
            return
        if problem := head_problem():
            self._end(problem)
        self._looked = self.clock()

    def _end(self, problem: str) -> NoReturn:
        self._is_ending = True
        raise ActorError(f"{problem}; start your cluster again, and continue with `burnish resume`")

    def _restart(self, actor: _Actor, error: Exception) -> None:
        self._look(now=True)
        if self._is_ending or "its owner has died" in str(error):
            self._end("the Ray node of this process has died")
        found = re.search(r"exit type: (\w+)", str(error))
        why = f"exit type {found.group(1)}" if found else str(error).strip().splitlines()[-1]
        if not actor.restarts:
            raise ActorDied(f"{actor.name} died ({why})")
        self._count_death(actor, why)
        lost = ", ".join(call.method for call in actor.calls)
        self.tell(f"{actor.name} died and is started again{lost and ' for '}{lost}")
        self._begin(actor)

    def _count_death(self, actor: _Actor, why: str) -> None:
        actor.deaths += 1
        if actor.deaths >= DEATHS:
            raise ActorError(f"{actor.name} died {DEATHS} times in a row; the last time: {why}")

    def _check_learner(self) -> None:
        """Raises if an actor is dead that is not started again: others fail because of it."""
        for actor in self._actors.values():
            if not actor.restarts:
                try:
                    ray.get(ray.wait([actor.handle.pulse.remote()], timeout=10 * PULSE)[0])
                except RayActorError as error:
                    self._restart(actor, error)

    def _check(self, actor: _Actor) -> None:
        """Asks for a pulse, once in a while; raises if the actor is silent for too long."""
        now = self.clock()
        if now - actor.checked < PULSE:
            return
        actor.checked = now
        if actor.feeling is not None and ray.wait([actor.feeling], timeout=0)[0]:
            try:
                actor.pulse, actor.felt = ray.get(actor.feeling), now
            except RayActorError as error:
                self._restart(actor, error)
                return
            actor.feeling = None
        if actor.feeling is None:
            actor.feeling = actor.handle.pulse.remote()
        if now - actor.heard > self.deadline or now - actor.felt > min(SILENCE, self.deadline):
            raise ActorError(self._silence(actor, now))
        busy = [(a.name, a.pulse.doing) for a in self._actors.values() if a.calls and a.pulse]
        self.show("; ".join(f"{name}: {doing}" for name, doing in busy if doing))

    def _silence(self, actor: _Actor, now: float) -> str:
        call = actor.calls[0]
        theirs = "It has not begun to work." if actor.pulse is None else actor.pulse.stack
        ours = "".join(traceback.format_stack(limit=8)[:-3])
        state = "" if actor.pulse is None else _process_state(actor.pulse.pid)
        return (
            f"the run waited {now - actor.heard:.0f} s for {actor.name} to answer {call.method!r} "
            f"(runtime.deadline = {self.deadline:g}); its last sign of life came "
            f"{now - actor.felt:.0f} s ago{state}.\nThe run waits here:\n{ours}"
            f"{actor.name} was last seen here:\n{theirs}"
        )


def _full(actor: _Actor, call: Call, error: Exception) -> ActorError:
    told = str(error).partition("Tip:")[0].strip().replace("\n", " ")
    return ActorError(
        f"Ray's object store is full: {actor.name} could not do {call.method!r} ({told}); give Ray "
        "more with `ray start --object-store-memory`, or free the disk that it spills to"
    )


def _process_state(pid: int) -> str:
    """The state of a process of this machine in words; empty if it runs, or is not here."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    return "; its process is stopped" if stat.rpartition(")")[2].split()[0] in "Tt" else ""
