"""A reference policy that follows the policy as an exponential moving average of its weights."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from burnish.learner.ranks import local
from burnish.model import lora
from burnish.model.protocol import Module


class MovingAverage:
    """Moves a reference after each gradient step that changed the policy.

        θ_ref ← decay · θ_ref + (1 − decay) · θ

    Zhang & Ba 2026, https://arxiv.org/abs/2602.04417 (EMA-PG). θ are the trainable master weights.
    The average has their precision, whatever the compute precision of the reference, because a
    16-bit number would not change by a small share of a small difference. Each rank of a mesh
    averages its own shards. Of an adapter, A and B are averaged, each on its own: the reference
    computes with the product of the averages, which is not the average of the products. B starts at
    0, so that the reference starts at the base model, as without an average.
    Differs from the paper in nothing; the authors' code averages every 10 training steps.
    """

    def __init__(self, decay: float, reference: Module, masters: Module) -> None:
        """``reference`` is a frozen copy of the policy whose master weights are ``masters``. In an
        adapter of the reference, B is overwritten with 0."""
        self.decay, self.reference, self.masters = decay, reference, masters
        self.wide: dict[str, Tensor] = {}
        """Averages of weights that the reference holds in a lower precision; other averages are the
        reference's own weights."""
        for name, average, master in self._learned():
            if average.dtype != master.dtype:
                self.wide[name] = master.detach().clone()
            if lora.is_second_factor(name):
                for tensor in (average, self.wide.get(name, average)):
                    local(tensor.detach()).zero_()

    @torch.no_grad()
    def move(self) -> None:
        """Move the averages and the reference towards the current weights."""
        averages = [local(average) for average in self.state().values()]
        masters = [local(master) for _, _, master in self._learned()]
        torch._foreach_lerp_(averages, masters, 1 - self.decay)
        self.round()

    @torch.no_grad()
    def round(self) -> None:
        """Write the averages to the reference's weights, for weights that it holds in a lower
        precision. Call it after the tensors of `state` have been overwritten."""
        rounded = [local(weight) for name, weight, _ in self._learned() if name in self.wide]
        if rounded:
            torch._foreach_copy_(rounded, [local(average) for average in self.wide.values()])

    def state(self) -> dict[str, Tensor]:
        """Return views of the averages of the trainable weights, by the name of the weight."""
        return {name: self.wide.get(name, weight.detach()) for name, weight, _ in self._learned()}

    def to(self, device: str) -> None:
        """Move the averages that are stored apart from the reference to a device. The reference,
        which holds the other averages, must be moved separately."""
        self.wide = {name: average.to(device) for name, average in self.wide.items()}

    def _learned(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each trainable weight, the reference's weight and the master."""
        both = zip(self.reference.parameters(), self.masters.named_parameters(), strict=True)
        for weight, (name, master) in both:
            if master.requires_grad:
                yield name, weight, master
