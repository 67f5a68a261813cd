"""Generators and a scorer in processes of their own, and the rollouts that they work on.

Groups go to generators by number, and every call carries the weights that it samples with. So a
rollout's bits depend on its groups, its weights and the number of generators, and on nothing else;
a generator that dies is started again and samples the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from burnish.actors.supervisor import PULSE, Call, Supervisor
from burnish.actors.transport import Parcel
from burnish.draws import Stream
from burnish.engine.protocol import Request
from burnish.rollout.rollout import Asked, Note, ignore, requests_of
from burnish.types import Completion, Group, SamplingParams


@dataclass
class _Rollout:
    asked: Asked
    samples: list[Call]
    grading: Call | None = None


class Fleet:
    """Samples and grades rollouts, oldest first. It is a ``Server`` too, for evaluations."""

    def __init__(
        self,
        supervisor: Supervisor,
        generators: Sequence[str],
        *,
        size: int,
        params: SamplingParams,
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        """``size``: samples of a group. ``tell`` is given a line for every new version."""
        self.tell, self._versions = tell, dict.fromkeys(generators, -1)
        self.supervisor, self.generators = supervisor, generators
        self._size, self._params = size, params
        self.version = 0
        self.weights: tuple[Parcel | None, Any] = None, None
        """The weights that were published last: their parcel, and a reference to its bytes."""
        self.note: Note = ignore
        """Is told of groups and of actors' work."""
        self._rollouts: deque[_Rollout] = deque()
        self._waiting: list[Request] = []
        self._evaluating: list[Call] = []

    def listen(self, note: Note) -> None:
        self.note = self.supervisor.note = note

    def publish(self, parcel: Parcel, data: Any) -> None:
        """From now on the requests are sampled with these weights."""
        self.tell(f"learner publishes version {parcel.version}")
        self.version = parcel.version
        self.weights = parcel, data

    def in_use(self) -> list[str]:
        """The spaces of weights that were published last, or that a call in flight names."""
        calls = [call for name in self.generators for call in self.supervisor.open(name)]
        given = [*self.weights, *(arg for call in calls for arg in call.args)]
        return [one.space for one in given if isinstance(one, Parcel)]

    def requests(self, asked: Asked) -> list[Request]:
        return requests_of(asked, self._size, self._params, Stream.TRAIN)

    def issue(self, asked: Asked, *, first: bool = False) -> None:
        """Begins a rollout with the weights that were published last; ``first``: it is collected
        next."""
        begun = _Rollout(asked, self._call("sample", self.requests(asked)))
        (self._rollouts.appendleft if first else self._rollouts.append)(begun)

    def collect(self) -> list[Group]:
        """Waits for the oldest rollout, and removes it."""
        groups = self._graded(self._rollouts[0])
        self._rollouts.popleft()
        return groups

    def in_flight(self) -> list[Callable[[], list[Group]]]:
        """A function for each rollout in flight, oldest first, that waits for its groups."""
        return [partial(self._graded, rollout) for rollout in self._rollouts]

    def _graded(self, rollout: _Rollout) -> list[Group]:
        while rollout.grading is None or not rollout.grading.is_done:
            self._pump()
        groups: list[Group] = rollout.grading.answer
        return groups

    def forget(self) -> None:
        """Gives up all rollouts and evaluations, and ends the samples that generators have in
        flight. Whoever has called them forgets the calls."""
        self.restore([])
        calls = [self.supervisor.call(name, "forget") for name in self.generators]
        while waiting := [call for call in calls if not call.is_done]:
            self.supervisor.poll(waiting, PULSE)

    def restore(self, rollouts: Sequence[list[Group]]) -> None:
        """Puts rollouts in flight that are graded already: a checkpoint held them."""
        self._rollouts.clear()
        self._waiting, self._evaluating = [], []
        for groups in rollouts:
            done = Call("checkpoint", "grade", (), answer=groups, is_done=True)
            self._rollouts.append(_Rollout([], [], done))

    def wait(self, call: Call) -> Any:
        """The answer of another call; rollouts go on meanwhile."""
        while not call.is_done:
            self._pump(call)
        return call.answer

    def _call(self, method: str, requests: Sequence[Request]) -> list[Call]:
        shares: dict[str, list[Request]] = {}
        for request in requests:
            name = self.generators[request.group % len(self.generators)]
            shares.setdefault(name, []).append(request)
        call = self.supervisor.call
        return [call(name, method, *self.weights, share) for name, share in shares.items()]

    def _pump(self, *others: Call) -> None:
        """Waits a little, and sends rollouts whose samples are all there to be graded."""
        calls = [*others]
        for rollout in self._rollouts:
            calls += rollout.samples if rollout.grading is None else [rollout.grading]
        self.supervisor.poll([call for call in calls if not call.is_done], PULSE)
        for rollout in self._rollouts:
            if rollout.grading is None and all(call.is_done for call in rollout.samples):
                found = {name: cs for call in rollout.samples for name, cs in call.answer.items()}
                responses = [found[f"group-{index}"] for index, _ in rollout.asked]
                for call in rollout.samples:
                    self.sampled_by(call)
                rollout.grading = self.supervisor.call("scorer", "grade", rollout.asked, responses)

    def sampled_by(self, call: Call) -> None:
        """Notes the groups that a generator has answered."""
        for name, completions in call.answer.items():
            versions = np.concatenate([c.versions for c in completions])
            newest = int(versions.max(initial=0))
            if newest > self._versions[call.actor]:
                self._versions[call.actor] = newest
                self.tell(f"{call.actor} samples with version {newest}")
            self.note(
                "sampled",
                group=int(name.removeprefix("group-")),
                by=call.actor,
                oldest=int(versions.min(initial=self.version)),
                newest=newest,
            )

    # Evaluations: requests are submitted, and answered by all generators.

    @property
    def unfinished(self) -> int:
        requests = [request for call in self._evaluating for request in call.args[2]]
        return sum(request.n for request in [*self._waiting, *requests])

    @property
    def sampled(self) -> int:
        pulses = [self.supervisor.pulse(name) for name in self.generators]
        return sum(pulse.sampled for pulse in pulses if pulse is not None)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        if self._waiting:
            self._evaluating += self._call("evaluate", self._waiting)
            self._waiting = []
        done = self.supervisor.poll(self._evaluating, PULSE)
        self._evaluating = [call for call in self._evaluating if not call.is_done]
        found: list[Completion] = []
        for call in done:
            found += [completion for own in call.answer.values() for completion in own]
        return found
