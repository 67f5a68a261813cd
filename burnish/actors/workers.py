"""The parts of a run that live in processes of their own: plain classes, without Ray.

| the course's cast | here |
| --- | --- |
| Generator | ``Generator`` around an engine |
| Scorer | ``Scorer`` around a task and its grader pool |
| Learner | ``LearnerPart`` around a learner |
| ReplayBuffer | ``burnish.rollout.buffer.Buffer`` |
| TrajectoryQueue | the calls in flight of ``burnish.actors.fleet.Fleet``, by number |
| ColocatedWorker | ``burnish.loops.sync.train`` in one process |
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from burnish.actors.transport import Parcel, Receiver, Sender, discard_others
from burnish.engine.protocol import Engine, ProbeCheck, Request
from burnish.errors import EngineError
from burnish.learner.learner import State
from burnish.progress import begin
from burnish.rollout.branches import Steps
from burnish.rollout.length import Shape, unshaped
from burnish.rollout.packing import pack
from burnish.rollout.rollout import Asked, complete, grade
from burnish.types import Completion, Group, Weights

Answers = dict[str, tuple[Completion, ...]]
"""Completions by the id of their request, in the order of their samples."""


class Generator:
    """An engine that takes its weights with the requests that they are for."""

    def __init__(
        self, engine: Engine, *, drains: bool = False, tolerance: float = 1e-4, steps: Steps = None
    ) -> None:
        """``drains``: samples in flight end before new weights are loaded. ``tolerance``: of the
        log-probabilities of a probe."""
        self._steps = steps
        self.engine, self._drains, self._receiver = engine, drains, Receiver()
        self._check_probe = ProbeCheck(tolerance)
        self._loaded: tuple[int, int] | None = None
        self._missing: dict[str, int] = {}
        """Samples in flight, by request."""
        self._done: dict[str, list[Completion]] = {}

    @property
    def sampled(self) -> int:
        return self.engine.sampled

    @property
    def version(self) -> int:
        return self.engine.version

    def sample(self, parcel: Parcel, data: Any, requests: Sequence[Request]) -> Answers:
        """Answers all requests with these weights. They are submitted before the first step, so
        that the same requests give the same bits. ``data`` are the bytes of the parcel, in the
        form of its transport."""
        self._load(parcel, data)
        self._submit(requests)
        wanted, total = [r.request_id for r in requests], sum(r.n for r in requests)
        report = begin("generate", "sampling", total=total, unit="responses")
        while left := sum(self._missing.get(name, 0) for name in wanted):
            report(total - left)
            self._step()
        answers = self._finished(wanted)
        if self._steps is not None:
            own = partial(complete, self.engine)
            found = self._steps.extend(requests, [*answers.values()], own)
            answers = dict(zip(wanted, found, strict=True))
        return answers

    evaluate = sample
    """By this name in a timeline: its responses are not learned from."""

    def advance(
        self, parcel: Parcel | None, data: Any, requests: Sequence[Request], seconds: float
    ) -> Answers:
        """Takes new weights, if there are any, and new requests, and goes on for ``seconds`` or
        until a request is answered. Whoever calls it waits for samples, so there must be some."""
        if parcel is not None:
            self._load(parcel, data)
        self._submit(requests)
        if not self._done:
            raise EngineError("the run waits for samples of a generator that has none in flight")
        begin("generate", "sampling", total=sum(self._missing.values()), unit="responses")
        end = time.monotonic() + seconds
        while True:  # an evaluation may have finished requests before
            whole = [name for name in self._done if name not in self._missing]
            if whole or not self._missing or time.monotonic() > end:
                return self._finished(whole)
            self._step()

    def sample_some(self, parcel: Parcel, data: Any, requests: Sequence[Request]) -> Answers:
        """Takes these requests, too, and goes on until a step completes requests; answers those.

        Nothing else may be asked of it before all are answered: others would change its batches,
        and with them the last bits of its samples."""
        self._load(parcel, data)
        self._submit(requests)
        begin("generate", "sampling", total=sum(self._missing.values()), unit="responses")
        while not (whole := [name for name in self._done if name not in self._missing]):
            self._step()
        return self._finished(whole)

    def forget(self) -> None:
        """Ends all samples in flight: the run was set back to a checkpoint."""
        for name in list(self._missing):
            self.engine.abort(name)
        while self.engine.unfinished:
            self.engine.step()
        self._missing.clear()
        self._done.clear()

    def _load(self, parcel: Parcel, data: Any) -> None:
        if (parcel.incarnation, parcel.version) != self._loaded:
            while self._drains and self._missing:
                self._step()
            with self._receiver.opened(parcel, data) as weights:
                self.engine.load(weights)
            self._check_probe(parcel.version, parcel.probe, self.engine.probe())
            self._loaded = parcel.incarnation, parcel.version

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.submit(request)
            self._missing[request.request_id] = request.n
            self._done[request.request_id] = []

    def _step(self) -> None:
        if not self.engine.unfinished:
            raise EngineError(f"the engine forgot samples of {', '.join(list(self._missing)[:4])}")
        for completion in self.engine.step():
            name = completion.request_id
            self._done[name].append(completion)
            self._missing[name] -= 1
            if not self._missing[name]:
                del self._missing[name]

    def _finished(self, names: Sequence[str]) -> Answers:
        return {
            name: tuple(sorted(self._done.pop(name), key=lambda c: c.sample_index))
            for name in names
        }


class Scorer:
    """A task that grades in a process of its own."""

    def __init__(self, task: Any, shape: Shape = unshaped) -> None:
        """``shape`` changes the rewards of a graded group."""
        self.task, self._shape = task, shape

    def grade(self, asked: Asked, responses: Sequence[tuple[Completion, ...]]) -> list[Group]:
        return grade(self.task, asked, responses, self._shape)


class LearnerPart:
    """A learner, and the function that takes a rollout's gradient steps with it."""

    def __init__(self, learner: Any, learn: Callable[..., Any], how: str, folder: str) -> None:
        """``learn`` is given the learner, the number of the step and the groups; ``how`` names the
        transport of weights, which may leave files in ``folder``."""
        self.learner, self._learn = learner, learn
        self._sender, self._folder, self._has_sent = Sender(how, folder), folder, False
        self.data = self._sender.data
        self._states = partial(Sender, "shared" if how == "shared" else "store", folder)

    @property
    def version(self) -> Any:
        return self.learner.version

    def learn(self, number: int, groups: list[Group]) -> Any:
        """Step ``number``, counted from 1."""
        self.learner.begin(number - 1)
        return self._learn(self.learner, number, groups)

    def weights(self, incarnation: int, in_use: Sequence[str]) -> Parcel:
        """The weights as they are; the spaces ``in_use`` stay as they are."""
        self.learner.incarnation = incarnation
        if not self._has_sent:
            discard_others(self._folder, in_use)  # those of a learner that died
            self._has_sent = True
        parcel = self._sender.send(self.learner.weights(), in_use)
        return parcel._replace(probe=self.learner.policy.probe())

    def held_out_drift(self, groups: list[Group]) -> dict[str, float]:
        found: dict[str, float] = self.learner.held_out_drift(pack(groups).to(self.learner.device))
        return found

    def write(self, folder: Path) -> None:
        """Has ranks write their parts of the state into a folder."""
        self.learner.write(folder)

    def load_shards(self, state: State) -> int:
        """As `load_state`, from files that the ranks read themselves."""
        self.learner.load_state(state)
        return int(self.version)

    def state(self) -> tuple[Parcel | None, Any, dict[str, Any]]:
        state, sender = self.learner.state(), self._states()
        if not state.tensors:  # ranks write them
            return None, None, state.numbers
        parcel = sender.send(Weights(0, 0, dict(state.tensors)))
        return parcel, sender.data(parcel.space), state.numbers

    def load_state(self, parcel: Parcel, data: Any, numbers: dict[str, Any]) -> int:
        """Goes on from a state, and returns its version."""
        with Receiver().opened(parcel, data) as held:
            self.learner.load_state(State(held.tensors, numbers))
        return int(self.version)
