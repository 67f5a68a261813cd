"""Protocols of the models that a learner can train.

The transformer, the sorting model and the reward model implement them; the learner does not know
which one it has.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, Self, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from burnish.types import Measured, PackedBatch, ResponseRewards

Output_co = TypeVar("Output_co", bound=Measured | ResponseRewards, covariant=True)


class Module(Protocol):
    """The methods of ``nn.Module`` that training uses."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]: ...

    def named_parameters(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]: ...

    def get_parameter(self, target: str) -> nn.Parameter: ...

    def modules(self) -> Iterator[nn.Module]: ...

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]: ...

    def requires_grad_(self, requires_grad: bool = True) -> Self: ...

    def to(self, dtype: torch.dtype, /) -> Self: ...


class Exchanging(Module, Protocol):
    """A model whose weights can be sent to an engine."""

    def exchange(self, *, learned: bool = False) -> dict[str, Tensor]:
        """Return views of the weights, without gradients, under the names that engines read. With
        ``learned``, return only the trainable weights."""


class Trainable(Exchanging, Protocol[Output_co]):
    """A model with an output per token: a policy (``Measured``) or a reward model
    (``ResponseRewards``)."""

    @property
    def lower_layers(self) -> int:
        """Number of frozen layers below the first layer with trainable weights."""

    def score(self, batch: PackedBatch, lower: Tensor | None = None) -> Output_co:
        """Compute the model's output for each slot of a batch, [N]. ``lower`` [N, d] are the hidden
        states that enter the trainable layers, the result of `lower`; None to compute them here."""

    def lower(self, batch: PackedBatch) -> Tensor:
        """Compute the hidden states [N, d] that enter the trainable layers. They depend on frozen
        layers only, so they are the same for all copies of a policy."""


@runtime_checkable
class Probed(Protocol):
    """A policy with a probe: the log-probabilities of fixed tokens. Comparing them with an engine's
    probe shows whether the engine has the policy's weights."""

    def probe(self) -> tuple[float, ...]: ...


@runtime_checkable
class HiddenStates(Protocol[Output_co]):
    """A policy whose hidden states a critic can read."""

    def hidden(self, batch: PackedBatch, lower: Tensor | None = None) -> Tensor:
        """Compute the hidden states [N, d] after the final norm. ``lower`` is that of
        `Trainable.score`."""

    def read(self, batch: PackedBatch, lower: Tensor | None = None) -> tuple[Output_co, Tensor]:
        """Return the output of `Trainable.score`, and the hidden states [N, d] after the final
        norm, from one forward pass. ``lower`` is that of `Trainable.score`."""
