"""Triton kernels that fuse the elementwise operations of a layer, forward and backward.

Each reads its inputs once and writes its outputs once, computes in float32, and rounds once. The
plain versions are `activations.swiglu`, `transformer.rotate` and ``index_add_``. Tensors are
contiguous and on one device.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Elements of a row that a program of SwiGLU handles."""


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """Compute silu(gate) · up: [N, 2 · f] -> [N, f]."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, width)
    if rows:
        _swiglu[rows, triton.cdiv(width, BLOCK)](gate_up, out, width, BLOCK=BLOCK)
    return out


def swiglu_backward(upstream: Tensor, gate_up: Tensor) -> Tensor:
    """Compute the gradient of `swiglu_forward`: [N, f] and [N, 2 · f] -> [N, 2 · f]."""
    (rows, width), gradient = upstream.shape, gate_up.new_empty(gate_up.shape)
    if rows:
        grid = rows, triton.cdiv(width, BLOCK)
        _swiglu_backward[grid](upstream, gate_up, gradient, width, BLOCK=BLOCK)
    return gradient


def rotate_heads(joined: Tensor, cos: Tensor, sin: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the rotated queries and keys and the unchanged values of ``joined`` [N, Hq + 2 Hkv, D]
    to the three ``parts`` [N, H, D]. ``cos`` and ``sin`` [N, 1, D]: see `transformer.rotation`."""
    _launch_rotation(joined, cos, sin, parts, is_backward=False)


def rotate_heads_back(joined: Tensor, cos: Tensor, sin: Tensor, parts: Sequence[Tensor]) -> None:
    """Write the gradient of ``joined`` in `rotate_heads`, given those of the three ``parts``."""
    _launch_rotation(joined, cos, sin, parts, is_backward=True)


def _launch_rotation(
    joined: Tensor, cos: Tensor, sin: Tensor, parts: Sequence[Tensor], *, is_backward: bool
) -> None:
    rows, heads, width = joined.shape
    if rows:
        sizes = {"QUERIES": parts[0].shape[1], "KEYS": parts[1].shape[1], "HALF": width // 2}
        padded = {"HEADS": triton.next_power_of_2(heads), "PADDED": _power(width // 2)}
        _rotate[rows,](joined, cos, sin, *parts, **sizes, **padded, BACK=is_backward)


def add_rows(x: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """Return rows [S, W] of which row s is the sum of the rows ``order[starts[s]:starts[s + 1]]``
    of ``x`` [M, W], added in this order in float32; 0 if there is none."""
    out = x.new_empty(len(starts) - 1, x.shape[1])
    if out.numel():
        block = min(2048, _power(x.shape[1]))
        grid = len(out), triton.cdiv(x.shape[1], block)
        _add_rows[grid](x, order, starts, out, x.shape[1], BLOCK=block)
    return out


def _power(size: int) -> int:
    return int(triton.next_power_of_2(size))


@triton.jit
def _swiglu(gate_up, out, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    gate = tl.load(gate_up + 2 * row * width + column, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, gate / (1 + tl.exp(-gate)) * up, mask=real)


@triton.jit
def _swiglu_backward(upstream, gate_up, gradient, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    high = tl.load(upstream + row * width + column, mask=real, other=0.0).to(tl.float32)
    gate = tl.load(gate_up + 2 * row * width + column, mask=real, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (2 * row + 1) * width + column, mask=real, other=0.0).to(tl.float32)
    share = 1 / (1 + tl.exp(-gate))
    to_gate = high * up * share * (1 + gate * (1 - share))
    tl.store(gradient + 2 * row * width + column, to_gate, mask=real)
    tl.store(gradient + (2 * row + 1) * width + column, high * gate * share, mask=real)


@triton.jit
def _rotate(
    joined,
    cos,
    sin,
    queries,
    keys,
    values,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    BACK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, PADDED)[None, :]
    half: tl.constexpr = HALF
    width: tl.constexpr = 2 * HALF
    within = column < half
    is_query = within & (head < QUERIES)
    is_key = within & (head >= QUERIES) & (head < QUERIES + KEYS)
    is_value = within & (head >= QUERIES + KEYS) & (head < QUERIES + 2 * KEYS)
    whole = joined + (row * (QUERIES + 2 * KEYS) + head) * width + column
    query = queries + (row * QUERIES + head) * width + column
    key = keys + (row * KEYS + head - QUERIES) * width + column
    value = values + (row * KEYS + head - QUERIES - KEYS) * width + column
    at = row * width + column
    # Values are turned by an angle of 0.
    turned = within & (head < QUERIES + KEYS)
    c = tl.load(cos + at, mask=within, other=1.0).to(tl.float32)
    s = tl.load(sin + at + half, mask=within, other=0.0).to(tl.float32)
    c, s = tl.where(turned, c, 1.0), tl.where(turned, s, 0.0)
    if BACK:
        left = tl.load(query, mask=is_query, other=0.0).to(tl.float32)
        left += tl.load(key, mask=is_key, other=0.0).to(tl.float32)
        left += tl.load(value, mask=is_value, other=0.0).to(tl.float32)
        right = tl.load(query + half, mask=is_query, other=0.0).to(tl.float32)
        right += tl.load(key + half, mask=is_key, other=0.0).to(tl.float32)
        right += tl.load(value + half, mask=is_value, other=0.0).to(tl.float32)
        real = within & (head < QUERIES + 2 * KEYS)
        tl.store(whole, left * c + right * s, mask=real)
        tl.store(whole + half, right * c - left * s, mask=real)
    else:
        real = within & (head < QUERIES + 2 * KEYS)
        left = tl.load(whole, mask=real, other=0.0).to(tl.float32)
        right = tl.load(whole + half, mask=real, other=0.0).to(tl.float32)
        low, high = left * c - right * s, right * c + left * s
        tl.store(query, low, mask=is_query)
        tl.store(key, low, mask=is_key)
        tl.store(value, low, mask=is_value)
        tl.store(query + half, high, mask=is_query)
        tl.store(key + half, high, mask=is_key)
        tl.store(value + half, high, mask=is_value)


@triton.jit
def _add_rows(x, order, starts, out, width, BLOCK: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for place in range(tl.load(starts + row), tl.load(starts + row + 1)):
        source = tl.load(order + place)
        total += tl.load(x + source * width + column, mask=real, other=0.0).to(tl.float32)
    tl.store(out + row * width + column, total, mask=real)
