"""Rank 0 conducts: each call of its learner is made by the learners of all ranks.

A loop on rank 0 sees one learner. The other ranks follow: they wait for a call, make it with the
same arguments, and drop the result.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from burnish.errors import BurnishError
from burnish.learner.learner import Learner, State
from burnish.learner.parallel import Gathered, Mesh
from burnish.learner.watch import Watch
from burnish.runs import shards
from burnish.types import Weights

CALLS = (
    *("begin", "score", "step", "finish", "logprobs", "held_out_drift", "load_state", "probe"),
)
"""Calls of a learner, and of its policy, that all ranks make together."""

NEEDED = ("score", "step", "logprobs", "held_out_drift", "gather", "load_state", "probe")
"""Those of them that need the weights on their device."""


class Channel:
    """Hands objects from rank 0 to the others, as they wait."""

    def __init__(self, group: Any, watch: Watch, device: str) -> None:
        """``group`` has all ranks and moves data of the processor; it waits for a call as long as
        rank 0 samples, because ``watch`` tells if rank 0 is gone. ``device`` is this rank's."""
        self._group, self.watch, self._device = group, watch, device

    def send(self, given: Any) -> None:
        buffer = io.BytesIO()
        torch.save(given, buffer)
        self._pass([buffer.getvalue()])

    def receive(self) -> Any:
        box = self._pass([None])
        return torch.load(io.BytesIO(box[0]), map_location=self._device, weights_only=False)

    def _pass(self, box: list[Any]) -> list[Any]:
        dist.broadcast_object_list(box, 0, self._group)
        return box

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """A call of which all ranks make one. An error of another rank has this rank's name."""
        if self.watch.verdict is not None:
            raise self.watch.blame(RuntimeError())
        try:
            return function(*args)
        except RuntimeError as error:
            raise self.watch.blame(error) from error


class Conductor:
    """The learner that a loop on rank 0 sees."""

    def __init__(self, learner: Learner, mesh: Mesh, channel: Channel) -> None:
        self._learner, self._mesh, self._channel = learner, mesh, channel

    @property
    def incarnation(self) -> int:
        return self._learner.incarnation

    @incarnation.setter
    def incarnation(self, number: int) -> None:
        self._learner.incarnation = number

    @property
    def policy(self) -> Conductor:
        """It can be probed."""
        return self

    def __getattr__(self, name: str) -> Any:
        if name in CALLS:
            return partial(self._call, name)
        return getattr(self._learner, name)

    def _call(self, name: str, *args: Any) -> Any:
        return self._channel.call(self._together, name, args)

    def _together(self, name: str, args: tuple[Any, ...]) -> Any:
        self._channel.send((name, args))
        return make(self._learner, self._mesh, name, args)

    def weights(self) -> Weights:
        """The ranks gather each tensor when it is asked for; if the GPU is to be free before the
        engine has them, rank 0 keeps all of them in main memory."""
        weights = self._learner.weights()
        tensors = Gathered(self._mesh.shape, partial(self._call, "gather"))
        if not self._mesh.offload:
            return weights._replace(tensors=tensors)
        kept = {name: tensor.cpu() for name, tensor in tensors.items()}
        self._call("rest")
        return weights._replace(tensors=kept)

    def state(self) -> State:
        """Without tensors: `write` has all ranks write them."""
        return State({}, self._learner.state().numbers)

    def write(self, folder: Path) -> None:
        """Has every rank write its pieces of the state into the folder, which all ranks see."""
        self._call("write", folder)

    def close(self) -> None:
        """Lets the other ranks go."""
        if self._channel.watch.verdict is None:
            self._call("close")
            dist.destroy_process_group()
        self._channel.watch.end()


def follow(learner: Learner, mesh: Mesh, channel: Channel) -> None:
    """Makes the calls of rank 0 until it lets this rank go."""
    name = ""
    while name != "close":
        name, args = channel.call(channel.receive)
        try:
            channel.call(make, learner, mesh, name, args)
        except BurnishError:
            if channel.watch.verdict is not None:
                raise
            # Rank 0 has raised the same error, and decides what comes of it.
    channel.watch.end()
    dist.destroy_process_group()


def make(learner: Learner, mesh: Mesh, name: str, args: tuple[Any, ...]) -> Any:
    """A call of one rank."""
    if name == "close":
        return None
    if name == "rest":
        return mesh.move(learner, "cpu")
    if name == "write":
        (folder,) = args
        shards.write(folder, dist.get_rank(), mesh.pieces(learner.state().tensors))
        return dist.barrier()  # rank 0 reads the files next
    if mesh.offload and name in NEEDED:
        mesh.move(learner, mesh.device)
    if name == "gather":
        return mesh.gather(learner.policy, learner.train.precision, *args)
    found = getattr(learner.policy if name == "probe" else learner, name)(*args)
    if mesh.offload and name in ("probe", "held_out_drift"):
        mesh.move(learner, "cpu")
    return found
