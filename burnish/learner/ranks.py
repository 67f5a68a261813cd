"""The processes that learn one model together, as the learner sees them: one, or a mesh."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from burnish.rollout.packing import Pack
from burnish.types import PackedBatch

Model = TypeVar("Model", bound=nn.Module)
Named = tuple[str, Tensor]
"""A parameter's name in its model, and the parameter or its gradient."""


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor that a mesh has cut; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    with torch.no_grad():
        return tensor if to_local is None else to_local()


class Ranks(Protocol):
    """Every rank makes the same calls in the same order, with the same whole batches."""

    casts: bool
    """Whether `place` makes the forward pass run in the compute precision, so that the optimizer
    needs no copy of the weights in it."""

    def place(self, model: Model, precision: str) -> Model:
        """The model with this rank's part of its weights."""

    def gathered(self, *models: nn.Module | None) -> AbstractContextManager[None]:
        """Within it, ranks that share weights may keep those that they have gathered."""

    def frozen(self, policy: Any, precision: str) -> Any:
        """A copy of a policy that does not learn."""

    def divide(self, batch: PackedBatch, cut: Callable[[PackedBatch], list[Pack]]) -> list[Pack]:
        """This rank's packs of a batch; all ranks have equally many."""

    def join(self, stream: Tensor) -> Tensor:
        """The sum over the ranks that have packs of their own, which may be written over it: of a
        number, or of streams [N, …], which are 0 in the slots of other ranks."""

    def norm(self, gradients: Iterable[Named]) -> float:
        """Of the whole gradient."""

    def exchange(self, policy: Any, precision: str) -> Mapping[str, Tensor]:
        """The whole weights that learn under Hugging Face's names, as `Transformer.exchange` gives
        them: copies, or a mapping that all ranks must read in the same order."""

    def fill(self, views: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        """Writes whole tensors of a learner's state into this rank's parts of them."""


class Alone:
    """The one process of a learner without a mesh."""

    casts = False

    def place(self, model: Model, precision: str) -> Model:
        return model

    def gathered(self, *models: nn.Module | None) -> AbstractContextManager[None]:
        return nullcontext()

    def divide(self, batch: PackedBatch, cut: Callable[[PackedBatch], list[Pack]]) -> list[Pack]:
        return cut(batch)

    def join(self, stream: Tensor) -> Tensor:
        return stream

    def norm(self, gradients: Iterable[Named]) -> float:
        return float(nn.utils.get_total_norm([gradient for _, gradient in gradients]))

    def exchange(self, policy: Any, precision: str) -> Mapping[str, Tensor]:
        views: dict[str, Tensor] = policy.exchange(learned=True)
        return {name: view.clone() for name, view in views.items()}

    def frozen(self, policy: Any, precision: str) -> Any:
        """It shares the weights that never change."""
        shared = {id(p): p for p in policy.parameters() if not p.requires_grad}
        return copy.deepcopy(policy, shared).requires_grad_(False)

    def fill(self, views: Mapping[str, Tensor], whole: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            view.copy_(whole[name])
