"""SwiGLU, silu(gate) · up, which keeps its input alone for the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def swiglu(gate_up: Tensor) -> Tensor:
    """[N, 2 · f] -> [N, f]; the first half of a row is the gate."""
    out: Tensor = _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
    return out


class _SwiGLU(torch.autograd.Function):
    """silu(gate) is made again in the backward pass: kept, it would be a tenth of all activations.

    Both halves of the gradient go where they belong at once; autograd would join them by a copy.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, dim=-1)
        gradient = torch.empty_like(gate_up)
        to_gate, to_up = gradient.chunk(2, dim=-1)
        torch.mul(upstream, F.silu(gate), out=to_up)
        torch.ops.aten.silu_backward.grad_input(upstream * up, gate, grad_input=to_gate)
        return gradient
