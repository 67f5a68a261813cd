"""The driver's proxy for the learner actor. The driver is the process that runs the loop."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from burnish.actors.rollouts import RemoteRollouts
from burnish.actors.supervisor import Call
from burnish.actors.transport import Receiver, Sender, WeightsHandle, discard
from burnish.errors import ActorError
from burnish.learner.protocol import LearnerState, Metrics, Step
from burnish.model.shards import Shards
from burnish.types import Group, Weights


class RemoteLearner:
    """Trains with the learner actor: each method calls the actor. Rollouts continue while the
    driver waits for a result.

    It is a `burnish.learner.protocol.StepRunner` and `burnish.learner.protocol.Checkpointable`.
    """

    def __init__(self, rollouts: RemoteRollouts, folder: str, transport: str) -> None:
        """``transport`` is the name of the weight transport; "shared" writes files in ``folder``,
        which is in shared memory."""
        self._rollouts, self._folder, self._transport = rollouts, folder, transport
        self.version = self.incarnation = 0
        self._has_warned = False
        """Whether a warning that shared memory is full was printed."""

    def revive(self, others: Sequence[str] = ()) -> None:
        """Restart a dead learner in its initial state, together with ``others``: names of actors
        that can't continue without it. All earlier calls, rollouts and evaluations are discarded,
        so the caller must load a checkpoint next, or start again at step 0."""
        self._rollouts.supervisor.restart("learner", others)
        self._rollouts.discard_all()
        self.version = 0

    def start_step(self, number: int, groups: list[Group]) -> Call:
        """Start training step ``number``, counted from 1, on these groups; return the call without
        waiting for its result."""
        return self._rollouts.supervisor.call("learner", "learn", number, groups)

    def finish_step(self, call: Call) -> Step:
        """Wait for a step that `start_step` has started, and return its result. Only now
        ``version`` becomes the learner's version after the step."""
        step: Step = self._rollouts.wait(call)
        self.version = int(step.metrics["train/version"])
        return step

    def learn(self, number: int, groups: list[Group]) -> Step:
        return self.finish_step(self.start_step(number, groups))

    def publish(self) -> None:
        """Copy the learner's current weights into a buffer, wait for the copy, and make the
        generators sample later requests with these weights. Warn once if shared memory is full."""
        rollouts, in_use = self._rollouts, self._rollouts.buffers_in_use()
        handle: WeightsHandle = rollouts.call_and_wait(
            "learner", "weights", self.incarnation, in_use
        )
        if self._transport == "shared" and not handle.is_file and not self._has_warned:
            self._has_warned = True
            rollouts.log("shared memory is full: weights are sent through Ray's object store")
        rollouts.publish(handle, rollouts.supervisor.buffer_ref("learner", handle.buffer))

    def held_out_drift(self, groups: list[Group]) -> Metrics:
        metrics: Metrics = self._rollouts.call_and_wait("learner", "held_out_drift", groups)
        return metrics

    def state(self) -> LearnerState:
        """Return a copy of the learner's state, in this process's memory; with a mesh, it has no
        tensors, because the ranks write them (`write_shards`). Raise an ActorError if the actor has
        finished a step whose result the driver did not receive: the actor's state then belongs to
        another step than the run's."""
        handle, data, numbers = self._rollouts.call_and_wait("learner", "state")
        if handle is None:
            return LearnerState({}, numbers)
        try:
            if numbers["version"] != self.version:
                raise ActorError(
                    f"the learner is at version {numbers['version']} and the run at "
                    f"{self.version}; the learner's state belongs to another step"
                )
            with Receiver().opened(handle, data) as weights:
                tensors = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        finally:
            discard(handle)
        return LearnerState(tensors, numbers)

    def write_shards(self, folder: Path) -> None:
        """Make the learner's ranks write their shards of the state into a folder."""
        self._rollouts.call_and_wait("learner", "write", folder)

    def load_state(self, state: LearnerState) -> None:
        if isinstance(state.tensors, Shards):
            self.version = self._rollouts.supervisor.call_and_wait("learner", "load_shards", state)
            return
        sender = Sender("shared" if self._transport == "shared" else "store", self._folder)
        handle = sender.send(Weights(0, 0, dict(state.tensors)))
        args = handle, sender.data(handle.buffer), state.numbers
        self.version = self._rollouts.supervisor.call_and_wait("learner", "load_state", *args)
        discard(handle)
