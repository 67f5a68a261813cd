"""A module and a linear layer in a chain, without storing the tensor between them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from burnish.model.matmul import fuses


def chained(
    first: Callable[[Tensor], Tensor],
    second: Callable[[Tensor], Tensor],
    x: Tensor,
    *,
    keep: bool = False,
) -> Tensor:
    """Compute second(first(x)). On a GPU, the backward pass computes first(x) again, with the same
    bits, instead of storing it as the input of ``second``. With ``keep``, the tensor is stored.

    ``first`` must be deterministic and save x for its own gradient, as RMSNorm and SwiGLU do.
    ``second`` is a linear layer. While it runs, outer hooks for saved tensors are not called, so a
    caller that recomputes the whole chain (`torch.utils.checkpoint`) must set ``keep``.
    """
    between = first(x)
    if keep or not (between.requires_grad and fuses(between)):
        return second(between)
    held = [between]

    def pack(saved: Tensor) -> Tensor | None:
        # Not `is`, because with tensor parallelism the linear layer gets a view.
        return None if saved.is_set_to(held[0]) else saved

    def unpack(packed: Tensor | None) -> Tensor:
        if packed is not None:
            return packed
        with torch.no_grad():
            return first(x)

    with saved_tensors_hooks(pack, unpack):
        out = second(between)
    held.clear()  # `pack` lives as long as the graph
    return out
