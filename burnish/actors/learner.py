"""The learner in a process of its own, as the driver of a run sees it."""

from __future__ import annotations

from typing import Any

from burnish.actors.fleet import Fleet
from burnish.actors.supervisor import Call
from burnish.actors.transport import Parcel, Receiver, Sender, discard
from burnish.learner.learner import State
from burnish.types import Group, Weights


class RemoteLearner:
    """Has the same state as the learner that it stands for; rollouts go on while it waits."""

    def __init__(self, fleet: Fleet, folder: str, how: str) -> None:
        """``folder`` is in shared memory; ``how`` names the transport."""
        self._fleet, self._folder, self._how = fleet, folder, how
        self.version = self.incarnation = 0

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
        in_use = self._fleet.files_in_use()
        call = self._fleet.supervisor.call("learner", "weights", self.incarnation, in_use)
        parcel: Parcel = self._fleet.wait(call)
        self._fleet.publish(parcel, call.ref)

    def held_out_drift(self, groups: list[Group]) -> dict[str, float]:
        found: dict[str, float] = self._fleet.supervisor.ask("learner", "held_out_drift", groups)
        return found

    def state(self) -> State:
        parcel, numbers = self._fleet.supervisor.ask("learner", "state")
        with Receiver().opened(parcel) as weights:
            tensors = {name: tensor.clone() for name, tensor in weights.tensors.items()}
        discard(parcel)
        return State(tensors, numbers)

    def load_state(self, state: State) -> None:
        parcel = Sender(self._how, self._folder).send(Weights(0, 0, state.tensors))
        ask = self._fleet.supervisor.ask
        self.version = ask("learner", "load_state", parcel, state.numbers)
        discard(parcel)
