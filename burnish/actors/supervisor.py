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
from typing import Any

import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from burnish.actors.shell import Pulse, actor_class, pickled
from burnish.errors import ActorDied, ActorError, BurnishError

PULSE = 1.0
"""Seconds between two looks at an actor that somebody waits for."""
SILENCE = 60.0
"""Seconds without a pulse after which an actor's process counts as stopped."""
DEATHS = 3
"""Deaths in a row, with no answer between them, after which an actor is not started again."""


@dataclass(eq=False)
class Call:
    """A call that was made, and is not answered or not yet asked for."""

    actor: str
    method: str
    args: tuple[Any, ...]
    ref: Any = None
    began: float = 0.0
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
    deaths: int = 0
    heard: float = 0.0
    """When the actor last answered a call, or was started."""
    pulse: Pulse | None = None
    felt: float = 0.0
    """When its last pulse came."""
    feeling: Any = None
    """The pulse that was asked for and has not come."""


class Supervisor:
    """Starts actors, calls them, waits for them, and starts the dead ones again."""

    def __init__(
        self,
        deadline: float,
        tell: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``deadline``: seconds in which an actor must answer one of its calls. ``tell`` is given
        a sentence for each death."""
        self.deadline, self.tell, self.clock = deadline, tell, clock
        self.restarts: dict[str, int] = {}
        """How often each actor was started again."""
        self._actors: dict[str, _Actor] = {}

    def restart(self, name: str) -> None:
        """Starts an actor again that has lost its state; its calls are forgotten."""
        actor = self._actors[name]
        actor.calls.clear()
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
        if not actor.calls:
            actor.heard = self.clock()
        actor.calls.append(call)
        self._make(actor, call)
        return call

    def result(self, call: Call) -> Any:
        """Waits for the call's answer."""
        while not call.is_done:
            self.poll([call], PULSE)
        return call.answer

    def ask(self, name: str, method: str, *args: Any) -> Any:
        return self.result(self.call(name, method, *args))

    def poll(self, calls: Sequence[Call], seconds: float) -> list[Call]:
        """The calls that are answered, after at most ``seconds`` if none was before."""
        waiting = [call for call in calls if not call.is_done]
        if len(waiting) == len(calls) and waiting:
            ready, _ = ray.wait([call.ref for call in waiting], timeout=seconds)
            for call in [call for call in waiting if call.ref in ready]:
                self._take(call)
            if not ready:
                for name in {call.actor for call in waiting}:
                    self._check(self._actors[name])
        return [call for call in calls if call.is_done]

    def open(self, name: str) -> list[Call]:
        """The calls of an actor that are not answered."""
        return [call for call in self._actors[name].calls if call.method != "build"]

    def places(self) -> dict[str, dict[str, Any]]:
        """The machine and the process of each actor that has given a sign of life."""
        return {
            name: {"host": actor.pulse.host, "pid": actor.pulse.pid}
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
        kind = actor_class(actor.name.partition("-")[0].capitalize())
        actor.handle = kind.options(**actor.options).remote(pickled(actor.make))
        actor.heard = actor.felt = self.clock()
        actor.feeling = actor.pulse = None
        build = Call(actor.name, "build", ())
        actor.calls.insert(0, build)
        for call in actor.calls:
            call.args = call.args if call.renew is None else call.renew()
            self._make(actor, call)

    def _make(self, actor: _Actor, call: Call) -> None:
        call.began = self.clock()
        if call.method == "build":
            call.ref = actor.handle.build.remote()
        else:
            call.ref = actor.handle.call.remote(call.method, *call.args)

    def _take(self, call: Call) -> None:
        """Takes an answer; calls of a dead actor are made again."""
        actor = self._actors[call.actor]
        try:
            call.answer = ray.get(call.ref)
        except RayTaskError as error:
            raise _cause(error) from None
        except (RayActorError, ObjectLostError) as error:
            self._restart(actor, error)
            return
        call.is_done = True
        if actor.pulse is None:
            actor.pulse, actor.felt = ray.get(actor.handle.pulse.remote()), self.clock()
        actor.deaths, actor.heard = 0, self.clock()
        actor.calls = [other for other in self.open(actor.name) if other is not call]

    def _restart(self, actor: _Actor, error: Exception) -> None:
        found = re.search(r"exit type: (\w+)", str(error))
        why = f"exit type {found.group(1)}" if found else str(error).strip().splitlines()[-1]
        if not actor.restarts:
            raise ActorDied(f"{actor.name} died ({why})")
        actor.deaths += 1
        if actor.deaths >= DEATHS:
            raise ActorError(f"{actor.name} died {DEATHS} times in a row; the last time: {why}")
        actor.calls = [call for call in actor.calls if not self._is_answered(call)]
        lost = ", ".join(call.method for call in actor.calls)
        self.tell(f"{actor.name} died and is started again{lost and ' for '}{lost}")
        self.restarts[actor.name] = self.restarts.get(actor.name, 0) + 1
        self._begin(actor)

    def _is_answered(self, call: Call) -> bool:
        """Whether a call of an actor that died was answered before; then its answer is taken."""
        if call.method == "build":
            return True  # the new actor is built anyway
        if ray.wait([call.ref], timeout=0)[0]:
            try:
                call.answer, call.is_done = ray.get(call.ref), True
            except (RayActorError, ObjectLostError):
                return False
        return call.is_done

    def _check(self, actor: _Actor) -> None:
        """Asks for a pulse; raises if the actor is silent for too long."""
        now = self.clock()
        if actor.feeling is None:
            actor.feeling = actor.handle.pulse.remote()
        elif ray.wait([actor.feeling], timeout=0)[0]:
            try:
                actor.pulse, actor.felt = ray.get(actor.feeling), now
            except RayActorError as error:
                self._restart(actor, error)
                return
            actor.feeling = None
        if now - actor.heard > self.deadline or now - actor.felt > min(SILENCE, self.deadline):
            raise ActorError(self._silence(actor, now))

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


def _cause(error: RayTaskError) -> BaseException:
    """The error of the actor's method: a message for the user, or the whole traceback."""
    cause = error.cause
    return cause if isinstance(cause, BurnishError) else ActorError(str(error))


def _process_state(pid: int) -> str:
    """The state of a process of this machine in words; empty if it runs, or is not here."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return ""
    return "; its process is stopped" if stat.rpartition(")")[2].split()[0] in "Tt" else ""
