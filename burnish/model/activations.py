"""RMSNorm and SwiGLU with hand-written gradients, whose backward pass needs little memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from burnish.model.matmul import fuses

TILE = 2**17
"""Elements that are normalised at a time, few enough to stay in the cache."""


class RMSNorm(nn.RMSNorm):
    """y = w · x · r, where r = 1 / √(mean x² + ε), computed in at least float32.

    A GPU has one kernel for it. On a CPU, PyTorch runs a dozen operations and keeps two copies of x
    in float32 for the backward pass; this version keeps x alone and takes a third of the time.
    """

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type != "cpu":
            return super().forward(x)
        out: Tensor = _Norm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out


class _Norm(torch.autograd.Function):
    """`RMSNorm` on a CPU, a tile of rows at a time. Gradients, with n = x · r and u the gradient of
    y:

    ∂/∂w = Σ u · n        ∂/∂x = r · (u · w − n · mean(u · w · n))
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        wide = torch.promote_types(x.dtype, torch.float32)
        whole, r = torch.empty_like(x), rows.new_empty(len(rows), 1, dtype=wide)
        out = whole.view(rows.shape)
        for tile in _tiles(rows):
            part = rows[tile].to(wide, copy=True)
            r[tile] = part.square().mean(1, keepdim=True).add_(eps).rsqrt_()
            out[tile] = part.mul_(r[tile]).mul_(weight)
        ctx.save_for_backward(x, weight, r)
        return whole

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, r = ctx.saved_tensors
        rows, up = (t.reshape(-1, x.shape[-1]) for t in (x, up))
        w = weight.to(r.dtype)
        to_x, to_weight = torch.empty_like(rows), torch.zeros_like(w)
        for tile in _tiles(rows):
            u, n = up[tile].to(r.dtype, copy=True), rows[tile].to(r.dtype, copy=True).mul_(r[tile])
            product = u * n
            to_weight += product.sum(0)
            mean = (product @ w).mul_(1 / len(w))[:, None]
            to_x[tile] = u.mul_(w).addcmul_(n, mean, value=-1).mul_(r[tile])
        return to_x.view(x.shape), to_weight.to(weight.dtype), None


def _tiles(rows: Tensor) -> Iterator[slice]:
    size = max(1, TILE // rows.shape[1])
    return (slice(i, i + size) for i in range(0, len(rows), size))


def swiglu(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) · up: [N, 2 · f] -> [N, f]. The first half of a row is the gate, the
    second half is up."""
    out: Tensor = _SwiGLU.apply(gate_up)  # type: ignore[no-untyped-call]
    return out


class _SwiGLU(torch.autograd.Function):
    """`swiglu` and its gradient. The backward pass computes silu(gate) again, because storing it
    would take a tenth of the memory of all activations. It writes both halves of the gradient into
    one tensor, which saves the copy that autograd would make. A GPU has one kernel for each pass.
    """

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        if fuses(gate_up):
            from burnish.model import elementwise_kernels

            return elementwise_kernels.swiglu_forward(gate_up.contiguous())
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        if fuses(gate_up):
            from burnish.model import elementwise_kernels

            given = upstream.contiguous(), gate_up.contiguous()
            return elementwise_kernels.swiglu_backward(*given)
        gate, up = gate_up.chunk(2, dim=-1)
        gradient = torch.empty_like(gate_up)
        to_gate, to_up = gradient.chunk(2, dim=-1)
        torch.mul(upstream, F.silu(gate), out=to_up)
        torch.ops.aten.silu_backward.grad_input(upstream * up, gate, grad_input=to_gate)
        return gradient
