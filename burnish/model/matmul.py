"""Matrix products in 16 bits, also on processors without instructions for them."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from burnish.machine import hardware

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@cache
def multiplies(dtype: torch.dtype, device: str) -> bool:
    """Return whether a type of device, such as "cpu", has fast matrix products in ``dtype``.

    On a CPU without them, PyTorch's fallback takes hundreds of times as long as float32.
    """
    if device != "cpu" or dtype.itemsize > 2:
        return True
    # oneDNN also reports support if it only has a fallback, which is as slow as PyTorch's.
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and hardware.supports_precision(NAMES[dtype], device)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def fuses(x: Tensor) -> bool:
    """Return whether fused kernels compute with x: on a GPU in at most 32 bits, if Triton is
    installed."""
    return x.is_cuda and x.dtype.itemsize <= 4 and _has_triton()


def cost(dtype: torch.dtype) -> float:
    """Measure how much longer a matrix product in ``dtype`` takes than in float32 on this CPU;
    return the quotient of the times."""

    def seconds(kind: torch.dtype) -> float:
        given = {"x": torch.ones(256, 576, dtype=kind), "weight": torch.ones(3072, 576, dtype=kind)}
        timer = Timer("linear(x, weight)", globals=given | {"linear": linear})
        return timer.blocked_autorange(min_run_time=0.1).median

    return seconds(dtype) / seconds(torch.float32)


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Convert tensors of one dtype to float32 if their device has no fast matrix products in that
    dtype; otherwise return them unchanged. Converting loses no accuracy, because matrix products
    are summed in float32 in any case."""
    if multiplies(tensors[0].dtype, tensors[0].device.type):
        return tensors
    return tuple(x.float() for x in tensors)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x weightᵀ + bias: x [N, d], weight [f, d], bias [f] -> [N, f] in x's dtype. The
    product is in float32 if the processor has no fast products in that dtype."""
    wide, *rest = widened(x, weight) if bias is None else widened(x, weight, bias)
    return F.linear(wide, *rest).to(x.dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Compute the matrix product a b: a [m, k], b [k, n] -> [m, n] in a's dtype. The product is in
    float32 if the processor has no fast products in that dtype."""
    left, right = widened(a, b)
    return (left @ right).to(a.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """Compute PyTorch's attention: q [B, Hq, L, D], k and v [B, Hkv, T, D] -> [B, Hq, L, D] in q's
    dtype. A float ``mask`` is added to the scores; a bool ``mask`` is true where a key is visible.
    ``is_causal`` masks later keys; give at most one of the two."""
    dtype, gqa = q.dtype, q.shape[1] != k.shape[1]
    q, k, v = widened(q, k, v)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=gqa)
    return out.to(dtype)
