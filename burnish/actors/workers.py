"""The components of a run that live in their own processes: plain classes, without Ray.

docs/architecture.md compares them with the actors of other RL systems.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from burnish.actors.transport import Receiver, Sender, WeightsHandle, discard_stale_files
from burnish.console.progress import begin
from burnish.engine.protocol import Engine, ProbeCheck, Request
from burnish.errors import EngineError
from burnish.learner.protocol import Learner, LearnerState, Metrics, Step
from burnish.rollout.length import Shape, unshaped
from burnish.rollout.packing import pack
from burnish.rollout.rollout import NumberedPrompts, complete, grade
from burnish.rollout.step_values import Steps
from burnish.types import Completion, Group, Weights

CompletionsById = dict[str, tuple[Completion, ...]]
"""Completions by request id, sorted by sample index."""


class GeneratorWorker:
    """Samples responses with an engine, in a generator's process. A call carries the weights with
    which its requests are sampled."""

    def __init__(
        self, engine: Engine, *, drains: bool = False, tolerance: float = 1e-4, steps: Steps = None
    ) -> None:
        """``drains``: finish the samples in flight before loading new weights. ``tolerance``: the
        largest accepted difference between the probes of learner and engine, in nats. ``steps``:
        samples more tokens after the responses, to estimate step values or a greedy baseline."""
        self._steps = steps
        self.engine, self._drains, self._receiver = engine, drains, Receiver()
        self._check_probe = ProbeCheck(tolerance)
        self._loaded: tuple[int, int] | None = None
        self._missing: dict[str, int] = {}
        """Number of samples in flight, by request id."""
        self._done: dict[str, list[Completion]] = {}

    @property
    def sampled(self) -> int:
        return self.engine.sampled

    @property
    def version(self) -> int:
        return self.engine.version

    def sample(
        self, handle: WeightsHandle, data: Any, requests: Sequence[Request]
    ) -> CompletionsById:
        """Load the given weights, unless they are loaded already, sample all requests to the end,
        and return their completions by request id. All requests are submitted before the first
        engine step, so that equal requests give bitwise equal results.

        ``data`` are the bytes of the weights (see ``Sender.data``). Raise an EngineError if the
        weights were corrupted, or if the engine's probe differs too much from the learner's."""
        self._load(handle, data)
        self._submit(requests)
        names, total = [r.request_id for r in requests], sum(r.n for r in requests)
        report = begin("generate", "sampling", total=total, unit="responses")
        while left := sum(self._missing.get(name, 0) for name in names):
            report(total - left)
            self._step()
        answers = self._take_finished(names)
        if self._steps is not None:
            own = partial(complete, self.engine)
            found = self._steps.extend(requests, [*answers.values()], own)
            answers = dict(zip(names, found, strict=True))
        return answers

    evaluate = sample
    """Alias, so that evaluation calls appear separately in the timeline."""

    def advance(
        self, handle: WeightsHandle | None, data: Any, requests: Sequence[Request], seconds: float
    ) -> CompletionsById:
        """Load new weights, unless ``handle`` is None, add requests, and sample until a request, of
        this or an earlier call, is complete or ``seconds`` have passed. Return the completions of
        all complete requests, which may be none; each request is returned once.

        Raise an EngineError if there is no request, because the caller waits for samples."""
        if handle is not None:
            self._load(handle, data)
        self._submit(requests)
        if not self._done:
            raise EngineError("the run waits for samples of a generator that has none in flight")
        begin("generate", "sampling", total=sum(self._missing.values()), unit="responses")
        end = time.monotonic() + seconds
        while True:  # an evaluation before this call may have completed requests
            whole = [name for name in self._done if name not in self._missing]
            if whole or not self._missing or time.monotonic() > end:
                return self._take_finished(whole)
            self._step()

    def sample_some(
        self, handle: WeightsHandle, data: Any, requests: Sequence[Request]
    ) -> CompletionsById:
        """Load the given weights, add requests (if any), and sample until at least one request, of
        this or an earlier call, is complete. Return the completions of all complete requests.
        ``data``: as in `sample`.

        While requests are incomplete, call only this method or `forget`: requests of other methods
        would change the batches, and with them the last bits of the samples."""
        self._load(handle, data)
        self._submit(requests)
        begin("generate", "sampling", total=sum(self._missing.values()), unit="responses")
        while not (whole := [name for name in self._done if name not in self._missing]):
            self._step()
        return self._take_finished(whole)

    def forget(self) -> None:
        """Abort all samples in flight, wait until the engine has none, and discard finished ones,
        because the run continues from a checkpoint."""
        for name in list(self._missing):
            self.engine.abort(name)
        while self.engine.unfinished:
            self.engine.step()
        self._missing.clear()
        self._done.clear()

    def _load(self, handle: WeightsHandle, data: Any) -> None:
        if (handle.incarnation, handle.version) != self._loaded:
            while self._drains and self._missing:
                self._step()
            with self._receiver.opened(handle, data) as weights:
                self.engine.load(weights)
            self._check_probe(handle.version, handle.probe, self.engine.probe())
            self._loaded = handle.incarnation, handle.version

    def _submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.engine.submit(request)
            self._missing[request.request_id] = request.n
            self._done[request.request_id] = []

    def _step(self) -> None:
        if not self.engine.unfinished:
            raise EngineError(f"the engine lost samples of {', '.join(list(self._missing)[:4])}")
        for completion in self.engine.step():
            name = completion.request_id
            self._done[name].append(completion)
            self._missing[name] -= 1
            if not self._missing[name]:
                del self._missing[name]

    def _take_finished(self, names: Sequence[str]) -> CompletionsById:
        return {
            name: tuple(sorted(self._done.pop(name), key=lambda c: c.sample_index))
            for name in names
        }


class ScorerWorker:
    """Grades responses with a task, in the scorer's process."""

    def __init__(self, task: Any, shape: Shape = unshaped) -> None:
        """``shape`` changes the rewards of a graded group, for example by a length penalty."""
        self.task, self._shape = task, shape

    def grade(
        self, numbered: NumberedPrompts, responses: Sequence[tuple[Completion, ...]]
    ) -> list[Group]:
        """Grade the responses to each prompt, given in the order of the prompts; return one group
        per prompt."""
        return grade(self.task, numbered, responses, self._shape)


class LearnerWorker:
    """Runs training steps with a learner and sends its weights and its state, in the learner's
    process."""

    def __init__(
        self,
        learner: Learner,
        train_step: Callable[[Learner, int, list[Group]], Step],
        transport: str,
        folder: str,
        write_shards: Callable[[Path], None] | None = None,
    ) -> None:
        """``train_step`` receives the learner, the number of the step and its groups. ``transport``
        is the name of the weight transport, which may write files in ``folder``. ``write_shards``
        makes the ranks of a mesh write their shards of the state; None without a mesh."""
        self.learner, self._train_step, self._write_shards = learner, train_step, write_shards
        self._sender, self._folder, self._has_sent = Sender(transport, folder), folder, False
        self.data = self._sender.data
        self._state_sender = partial(Sender, "shared" if transport == "shared" else "store", folder)

    @property
    def version(self) -> int:
        return self.learner.version

    def learn(self, number: int, groups: list[Group]) -> Step:
        """Train on the groups of step ``number``, counted from 1; return the step's result."""
        return self._train_step(self.learner, number, groups)

    def weights(self, incarnation: int, in_use: Sequence[str]) -> WeightsHandle:
        """Copy the current weights into a buffer that is not ``in_use``; return a handle that
        describes them and includes the learner's probe (see ``WeightsHandle``). ``incarnation`` is
        the number of restarts of the run. The first call also removes the files of a learner that
        has died, except the buffers ``in_use``."""
        self.learner.incarnation = incarnation
        if not self._has_sent:
            discard_stale_files(self._folder, in_use)  # files of a learner that died
            self._has_sent = True
        handle = self._sender.send(self.learner.weights(), in_use)
        return handle._replace(probe=self.learner.probe())

    def held_out_drift(self, groups: list[Group]) -> Metrics:
        return self.learner.held_out_drift(pack(groups).to(self.learner.device))

    def write(self, folder: Path) -> None:
        """Make the ranks of a mesh write their shards of the state into a folder."""
        assert self._write_shards is not None, "only the learner of a mesh writes shards"
        self._write_shards(folder)

    def load_shards(self, state: LearnerState) -> int:
        """Load a sharded state, whose files each rank reads itself; return the weight version."""
        self.learner.load_state(state)
        return self.version

    def state(self) -> tuple[WeightsHandle | None, Any, dict[str, Any]]:
        """Return the handle and the bytes of the tensors of the learner's state, and its numbers.
        Handle and bytes are None if the ranks of a mesh write the tensors themselves."""
        state, sender = self.learner.state(), self._state_sender()
        if not state.tensors:
            return None, None, state.numbers
        handle = sender.send(Weights(0, 0, dict(state.tensors)))
        return handle, sender.data(handle.buffer), state.numbers

    def load_state(self, handle: WeightsHandle, data: Any, numbers: dict[str, Any]) -> int:
        """Load a state, given as in the result of `state`; return its weight version."""
        with Receiver().opened(handle, data) as held:
            self.learner.load_state(LearnerState(held.tensors, numbers))
        return self.version
