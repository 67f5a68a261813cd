"""Products of matrices of 16-bit numbers, also on processors that have no instructions for them."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from burnish import machine

NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16"}


@cache
def multiplies(dtype: torch.dtype, device: str) -> bool:
    """Whether `dtype` has matrix products on that type of device that are worth calling.

    PyTorch's own way round them, on a CPU, takes hundreds of times as long as float32 does.
    """
    if device != "cpu" or dtype.itemsize > 2:
        return True
    # oneDNN itself says yes wherever it has a way round, which takes as long as these products.
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return available and machine.multiplies(NAMES[dtype], device)


def cost(dtype: torch.dtype) -> float:
    """How many times as long a product on this CPU takes as in float32, by a measurement."""

    def seconds(kind: torch.dtype) -> float:
        given = {"x": torch.ones(256, 576, dtype=kind), "weight": torch.ones(3072, 576, dtype=kind)}
        timer = Timer("linear(x, weight)", globals=given | {"linear": linear})
        return timer.blocked_autorange(min_run_time=0.1).median

    return seconds(dtype) / seconds(torch.float32)


def widened(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, in float32 if the processor does not multiply their type: that is as exact, and
    sums are float32 anyway."""
    if multiplies(tensors[0].dtype, tensors[0].device.type):
        return tensors
    return tuple(x.float() for x in tensors)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [N, d], weight [f, d], bias [f] -> [N, f]"""
    wide, *rest = widened(x, weight) if bias is None else widened(x, weight, bias)
    return F.linear(wide, *rest).to(x.dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a [m, k], b [k, n] -> [m, n]"""
    left, right = widened(a, b)
    return (left @ right).to(a.dtype)


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, is_causal: bool = False
) -> Tensor:
    """PyTorch's: q [B, Hq, L, D], k and v [B, Hkv, T, D], mask to add, or true where seen."""
    dtype, gqa = q.dtype, q.shape[1] != k.shape[1]
    q, k, v = widened(q, k, v)
    out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, enable_gqa=gqa)
    return out.to(dtype)
