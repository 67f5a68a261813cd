"""The learner of a mesh: rank 0 drives it, and the learners of all ranks make each call together.

A loop on rank 0 sees one learner. Every other rank waits for a call, makes it with the same
arguments on its own part of the model, and discards the result.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from burnish.errors import BurnishError
from burnish.learner.learner import LocalLearner
from burnish.learner.mesh.heartbeat import Heartbeat
from burnish.learner.mesh.mesh import Gathered, Mesh
from burnish.learner.protocol import LearnerState, Metrics, Program
from burnish.model import shards
from burnish.rollout.packing import Pack
from burnish.types import LearnBatch, Measured, PackedBatch, Scores, Weights

Result = TypeVar("Result")
RankLearner = LocalLearner[Measured]
"""The learner of one rank, which holds that rank's part of the model."""


def _gather(learner: RankLearner, mesh: Mesh, name: str) -> Tensor:
    return mesh.gather(learner.policy, learner.train.precision, name)


def _write_shards(learner: RankLearner, mesh: Mesh, folder: Path) -> None:
    shards.write_shards(folder, dist.get_rank(), mesh.shards(learner.state().tensors))
    dist.barrier()  # rank 0 reads the files next


CALLS: dict[str, Callable[..., Any]] = {
    "begin": lambda learner, mesh, *args: learner.begin(*args),
    "score": lambda learner, mesh, *args: learner.score(*args),
    "step": lambda learner, mesh, *args: learner.step(*args),
    "finish": lambda learner, mesh: learner.finish(),
    "held_out_drift": lambda learner, mesh, *args: learner.held_out_drift(*args),
    "held_out_metrics": lambda learner, mesh, *args: learner.held_out_metrics(*args),
    "load_state": lambda learner, mesh, *args: learner.load_state(*args),
    "probe": lambda learner, mesh: learner.probe(),
    "gather": _gather,
    "write_shards": _write_shards,
    "offload": lambda learner, mesh: mesh.move(learner, "cpu"),
    "close": lambda learner, mesh: None,
}
"""The operations that all ranks run together, by name: functions that take the rank's learner, its
mesh and the arguments of the call."""
ON_DEVICE = {
    *("score", "step", "held_out_drift", "held_out_metrics", "gather", "load_state", "probe"),
}
"""Calls that need the weights on the rank's device, if they are offloaded between steps."""
OFFLOAD_AFTER = {"probe", "held_out_drift"}
"""Calls between two steps after which the weights are moved back to main memory, if weights are
offloaded between steps."""


def run_call(learner: RankLearner, mesh: Mesh, name: str, args: tuple[Any, ...]) -> Any:
    """Run the operation ``name`` of `CALLS` with this rank's learner and return its result. With
    ``mesh.offload``, first move the learner to the device if the operation is in `ON_DEVICE`, and
    afterwards to main memory if it is in `OFFLOAD_AFTER`."""
    if mesh.offload and name in ON_DEVICE:
        mesh.move(learner, mesh.device)
    result = CALLS[name](learner, mesh, *args)
    if mesh.offload and name in OFFLOAD_AFTER:
        mesh.move(learner, "cpu")
    return result


class Channel:
    """Broadcasts objects from rank 0 to the other ranks, and explains failed collective calls."""

    def __init__(self, group: Any, heartbeat: Heartbeat, device: str) -> None:
        """``group`` is a process group of all ranks for CPU data. Its timeout must be long, because
        ranks wait for a call while rank 0 samples; ``heartbeat`` detects a dead rank. ``device`` is
        this rank's device."""
        self._group, self.heartbeat, self._device = group, heartbeat, device

    def send(self, message: Any) -> None:
        """Send a message to all other ranks; only rank 0 calls it."""
        buffer = io.BytesIO()
        torch.save(message, buffer)
        self._broadcast([buffer.getvalue()])

    def receive(self) -> Any:
        """Wait for the next message of rank 0 and return it, with tensors on this rank's device;
        all ranks but rank 0 call it."""
        box = self._broadcast([None])
        return torch.load(io.BytesIO(box[0]), map_location=self._device, weights_only=False)

    def _broadcast(self, box: list[Any]) -> list[Any]:
        dist.broadcast_object_list(box, 0, self._group)
        return box

    def call(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function that all ranks call together, and return its result. If the call raises
        a RuntimeError, or if a rank has already failed, raise an ActorError that names the rank
        that caused it."""
        if self.heartbeat.failure is not None:
            raise self.heartbeat.explain(RuntimeError())
        try:
            return function(*args)
        except RuntimeError as error:
            raise self.heartbeat.explain(error) from error


class MeshLearner:
    """The `burnish.learner.protocol.Learner` of the loop on rank 0: it sends each call to the other
    ranks, runs it on rank 0 as well, and returns rank 0's result."""

    def __init__(self, learner: RankLearner, mesh: Mesh, channel: Channel) -> None:
        """``learner`` is the learner of rank 0."""
        self._learner, self._mesh, self._channel = learner, mesh, channel

    @property
    def version(self) -> int:
        return self._learner.version

    @property
    def incarnation(self) -> int:
        return self._learner.incarnation

    @incarnation.setter
    def incarnation(self, number: int) -> None:
        self._learner.incarnation = number

    @property
    def program(self) -> Program:
        return self._learner.program

    @property
    def device(self) -> torch.device:
        return self._learner.device

    def begin(self, number: int) -> None:
        self._call("begin", number)

    def score(self, batch: PackedBatch, parts: Sequence[Pack] | None = None) -> Scores:
        scores: Scores = self._call("score", batch, parts)
        return scores

    def step(self, learn: LearnBatch) -> Metrics:
        metrics: Metrics = self._call("step", learn)
        return metrics

    def finish(self) -> tuple[Metrics, Tensor | None]:
        finished: tuple[Metrics, Tensor | None] = self._call("finish")
        return finished

    def held_out_drift(self, batch: PackedBatch) -> Metrics:
        metrics: Metrics = self._call("held_out_drift", batch)
        return metrics

    def held_out_metrics(self, batch: PackedBatch) -> Metrics:
        metrics: Metrics = self._call("held_out_metrics", batch)
        return metrics

    def probe(self) -> tuple[float, ...]:
        probed: tuple[float, ...] = self._call("probe")
        return probed

    def weights(self) -> Weights:
        """Return the trainable weights. The ranks gather each tensor when it is read. With
        ``mesh.offload``, rank 0 instead copies all tensors to main memory now, and the ranks free
        their GPU memory before an engine loads the weights."""
        weights = self._learner.weights()
        tensors = Gathered(self._mesh.shape, partial(self._call, "gather"))
        if not self._mesh.offload:
            return weights._replace(tensors=tensors)
        kept = {name: tensor.cpu() for name, tensor in tensors.items()}
        self._call("offload")
        return weights._replace(tensors=kept)

    def state(self) -> LearnerState:
        """Return the counters of the state without its tensors, which `write_shards` writes."""
        return LearnerState({}, self._learner.state().numbers)

    def load_state(self, state: LearnerState) -> None:
        self._call("load_state", state)

    def write_shards(self, folder: Path) -> None:
        """Make every rank write its shards of the state into a folder that all ranks can access."""
        self._call("write_shards", folder)

    def close(self) -> None:
        """End the other ranks, unless a rank has failed, and stop this rank's heartbeat."""
        if self._channel.heartbeat.failure is None:
            self._call("close")
            dist.destroy_process_group()
        self._channel.heartbeat.end()

    def _call(self, name: str, *args: Any) -> Any:
        return self._channel.call(self._send_and_run, name, args)

    def _send_and_run(self, name: str, args: tuple[Any, ...]) -> Any:
        self._channel.send((name, args))
        return run_call(self._learner, self._mesh, name, args)


def follow_rank_zero(learner: RankLearner, mesh: Mesh, channel: Channel) -> None:
    """Run the main loop of a rank other than rank 0: receive the calls of rank 0 and run them with
    this rank's learner, until rank 0 calls "close". Then destroy the process group.

    Raises an ActorError once a rank is known to have failed. Other burnish errors of a call are
    ignored, because rank 0 raises the same error and decides how to continue.
    """
    name = ""
    while name != "close":
        name, args = channel.call(channel.receive)
        try:
            channel.call(run_call, learner, mesh, name, args)
        except BurnishError:
            if channel.heartbeat.failure is not None:
                raise
            # Rank 0 raises the same error and decides how to continue.
    channel.heartbeat.end()
    dist.destroy_process_group()
