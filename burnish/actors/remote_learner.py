"""The learner in a process of its own, as the driver of a run sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from burnish.actors.fleet import Fleet
from burnish.actors.supervisor import Call
from burnish.actors.transport import Parcel, Receiver, Sender, discard
from burnish.errors import ActorError
from burnish.learner.learner import State
from burnish.runs.shards import Shards
from burnish.types import Group, Weights


class RemoteLearner:
    """Has the same state as the learner that it stands for; rollouts go on while it waits."""

    def __init__(self, fleet: Fleet, folder: str, how: str) -> None:
        """``folder`` is in shared memory; ``how`` names the transport."""
        self._fleet, self._folder, self._how = fleet, folder, how
        self.version = self.incarnation = 0
        self._is_told = False
        """Whether a note has said that shared memory is full."""

    def revive(self, others: Sequence[str] = ()) -> None:
        """Starts a dead learner again, as it was before the first step, and ``others``: actors that
        can't go on without it. Nothing goes on that was begun before."""
        self._fleet.supervisor.restart("learner", others)
        self._fleet.forget()
        self.version = 0

    def begin(self, number: int, groups: list[Group]) -> Call:
        """Begins step ``number``, counted from 1."""
        return self._fleet.supervisor.call("learner", "learn", number, groups)

    def take(self, call: Call) -> Any:
        """The step that a call learned."""
        step = self._fleet.wait(call)
        self.version = int(step.metrics["train/version"])
        return step

    def learn(self, number: int, groups: list[Group]) -> Any:
        return self.take(self.begin(number, groups))

    def publish(self) -> None:
        """From now on generators sample with the weights as they are."""
        ask, in_use = self._fleet.supervisor.call, self._fleet.in_use()
        parcel: Parcel = self._fleet.wait(ask("learner", "weights", self.incarnation, in_use))
        if self._how == "shared" and not parcel.is_file and not self._is_told:
            self._is_told = True
            self._fleet.tell("shared memory is full: weights travel by Ray's object store")
        self._fleet.publish(parcel, self._fleet.supervisor.hand("learner", parcel.space))

    def held_out_drift(self, groups: list[Group]) -> dict[str, float]:
        found: dict[str, float] = self._fleet.ask("learner", "held_out_drift", groups)
        return found

    def state(self) -> State:
        """Raises if a step that was given up here has changed the learner's state since."""
        parcel, data, numbers = self._fleet.ask("learner", "state")
        if parcel is None:
            return State({}, numbers)
        try:
            if numbers["version"] != self.version:
                told = f"version {numbers['version']}, and the run at {self.version}"
                raise ActorError(f"the learner is at {told}; its state is of another step")
            with Receiver().opened(parcel, data) as weights:
                tensors = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        finally:
            discard(parcel)
        return State(tensors, numbers)

    def write(self, folder: Path) -> None:
        """Has ranks write their parts of the state into a folder."""
        self._fleet.ask("learner", "write", folder)

    def load_state(self, state: State) -> None:
        if isinstance(state.tensors, Shards):
            self.version = self._fleet.supervisor.ask("learner", "load_shards", state)
            return
        sender = Sender("shared" if self._how == "shared" else "store", self._folder)
        parcel = sender.send(Weights(0, 0, dict(state.tensors)))
        sent, ask = (parcel, sender.data(parcel.space)), self._fleet.supervisor.ask
        self.version = ask("learner", "load_state", *sent, state.numbers)
        discard(parcel)
