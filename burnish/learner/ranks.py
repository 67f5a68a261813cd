"""The processes that train one model together, as the learner sees them: one process, or a mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from burnish.model.protocol import Exchanging, Module
from burnish.rollout.packing import Pack
from burnish.types import PackedBatch

Model = TypeVar("Model", bound=Module)
Named = tuple[str, Tensor]
"""A pair: the name of a parameter in its model, and the parameter or its gradient."""


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; return any other tensor unchanged."""
    to_local = getattr(tensor, "to_local", None)
    with torch.no_grad():
        return tensor if to_local is None else to_local()


class Ranks(Protocol):
    """The operations of a learner that involve all of its processes: sharding the model, dividing
    batches, summing results. Every rank makes the same calls in the same order, with the same
    complete batches."""

    casts: bool
    """Whether `place` makes the forward pass run in the compute precision, so that the optimizer
    needs no copy of the weights in that precision."""

    def place(self, model: Model, precision: str) -> Model:
        """Shard a complete model in place, so that this rank keeps only its part of the weights;
        return the model. ``precision`` is the compute precision."""

    def gathered(self, *models: Module | None) -> AbstractContextManager[None]:
        """Return a context in which the ranks may keep the complete weights of the models, once
        they have gathered them for a forward pass, instead of gathering them again for the next
        pass. A model that is None is skipped."""

    def frozen(self, policy: Model, precision: str) -> Model:
        """Return a copy of a policy that is not trained, in compute precision."""

    def divide(self, batch: PackedBatch, split: Callable[[PackedBatch], list[Pack]]) -> list[Pack]:
        """Select the responses of a batch that this rank computes, cut them into packs with
        ``split``, and return the packs. Their slots are slots of ``batch``. All ranks get the same
        number of packs."""

    def join(self, stream: Tensor) -> Tensor:
        """Return the elementwise sum of ``stream``, a number or a tensor [N, …], over the
        data-parallel ranks (an all-reduce). To assemble a tensor from the slots that each rank has
        computed, fill the other slots with 0. The argument may be overwritten."""

    def norm(self, gradients: Iterable[Named]) -> float:
        """Return the L2 norm of the complete gradients of all ranks. It may sum partial gradients
        over the ranks in place, so call it exactly once before each optimizer step."""

    def exchange(self, policy: Exchanging, precision: str) -> Mapping[str, Tensor]:
        """Return the complete trainable weights under the names that engines read
        (`Exchanging.exchange`). They are copies, or a mapping that gathers a weight from all ranks
        when it is read: then all ranks must read the same weights in the same order."""

    def fill(self, views: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        """Overwrite ``views``, this rank's parts of the tensors of a learner's state, with the
        corresponding parts of the complete tensors ``whole``. Both are keyed by name, and ``whole``
        has every name of ``views``."""


class SingleProcess:
    """`Ranks` of a learner that runs in one process: nothing is sharded, divided or summed."""

    casts = False

    def place(self, model: Model, precision: str) -> Model:
        return model

    def gathered(self, *models: Module | None) -> AbstractContextManager[None]:
        return nullcontext()

    def divide(self, batch: PackedBatch, split: Callable[[PackedBatch], list[Pack]]) -> list[Pack]:
        return split(batch)

    def join(self, stream: Tensor) -> Tensor:
        return stream

    def norm(self, gradients: Iterable[Named]) -> float:
        return float(nn.utils.get_total_norm([gradient for _, gradient in gradients]))

    def exchange(self, policy: Exchanging, precision: str) -> Mapping[str, Tensor]:
        return {name: view.clone() for name, view in policy.exchange(learned=True).items()}

    def frozen(self, policy: Model, precision: str) -> Model:
        """Return a copy of a policy that is not trained. It shares the weights that are frozen in
        the policy."""
        shared: dict[int, Any] = {id(p): p for p in policy.parameters() if not p.requires_grad}
        return copy.deepcopy(policy, shared).requires_grad_(False)

    def fill(self, views: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            view.copy_(whole[name])
