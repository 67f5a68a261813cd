"""Triton kernels for the layers of a sampler. They fuse the elementwise operations around attention
and matrix products, and multiply a single row.

They compute in float32 and round where the model rounds: the plain versions are the operations of
`transformer.Layer`. Tensors are contiguous and on one device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SINGLE = {1024: (2, 4), 1 << 62: (2, 8)}
"""Rows of the weight that a program multiplies by a single row, and its warps, by the largest
number of columns at a time."""
DEEPEST = 2048
"""Maximum number of columns of the weight that a program multiplies at a time."""


def early(rows: int, x: Tensor) -> dict[str, bool]:
    """Return the options with which the kernels of a decoding step are launched.

    The kernels of a single row are so short that an eighth of the time passes between them. They
    start while the kernel before them ends, and wait for its results inside (programmatic dependent
    launch). With more rows this gains nothing.
    """
    starts = rows == 1 and x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if starts else {"EARLY": False}


def add_norm(x: Tensor, change: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add ``change`` [N, d] to the hidden states x [N, d] in place, unless it is None, and return
    their RMSNorm [N, d] with ``weight`` [d]."""
    rows, width = x.shape
    out = x.new_empty(x.shape)
    padded = triton.next_power_of_2(width)
    given = x, x if change is None else change, weight, out, eps
    sizes = {"WIDTH": width, "PADDED": padded, "ADDS": change is not None}
    _add_norm[rows,](*given, **sizes, **early(rows, x), num_warps=4 if padded <= 2048 else 8)
    return out


def place_heads(
    qkv: Tensor,
    turn: tuple[Tensor, Tensor],
    norms: tuple[Tensor, Tensor, float] | None,
    keys: Tensor,
    values: Tensor,
    positions: Tensor,
    slots: Tensor,
) -> Tensor:
    """Rotate queries and keys of ``qkv`` [N, Hq + 2 Hkv, D] by their positions [N], write keys and
    values to the cache, and return the queries [N, Hq, D]. Keys are rotated in place as well.

    ``turn``: cos and sin of all positions, each [positions, D] (see `transformer.rotation`).
    ``norms``: weights [D] of the RMSNorm of queries and of keys, which comes before the rotation,
    and its epsilon; None if the model has none. ``keys`` and ``values`` [slots, Hkv, D]: the cache;
    ``slots`` [N]: places in it, of which −1 is not written.
    """
    (rows, heads, width), own = qkv.shape, keys.shape[1]
    queries = qkv.new_empty(rows, heads - 2 * own, width)
    first, second, eps = (qkv, qkv, 0.0) if norms is None else norms
    sizes = {"QUERIES": heads - 2 * own, "KEYS": own, "HALF": width // 2}
    padded = {
        "HEADS": triton.next_power_of_2(heads),
        "PADDED": triton.next_power_of_2(width // 2),
    }
    given = qkv, *turn, first, second, eps, queries, keys, values, positions, slots
    _place_heads[rows,](*given, **sizes, **padded, **early(rows, qkv), NORMS=norms is not None)
    return queries


def multiply_single(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute x weightᵀ + bias for a single row: x [1, k], weight [n, k], bias [n] -> [1, n]."""
    out = x.new_empty(1, len(weight))
    _launch_single(x, weight, bias, out, is_gated=False)
    return out


def gate_single(x: Tensor, weight: Tensor) -> Tensor:
    """Compute `activations.swiglu` of x weightᵀ for a single row: x [1, k], weight [2 f, k] -> [1,
    f]."""
    out = x.new_empty(1, len(weight) // 2)
    _launch_single(x, weight, None, out, is_gated=True)
    return out


def _launch_single(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, is_gated: bool
) -> None:
    depth = min(DEEPEST, triton.next_power_of_2(x.shape[1]))
    if depth == DEEPEST and x.shape[1] <= DEEPEST:
        depth //= 2  # less padding
    columns, warps = next(sizes for most, sizes in SINGLE.items() if depth <= most)
    given = x, weight, x if bias is None else bias, out, out.shape[1], x.shape[1]
    sizes = {"COLUMNS": columns, "DEPTH": depth, "BIAS": bias is not None, "GATED": is_gated}
    options = {"num_warps": warps, "num_stages": 2} | early(1, x)
    _single[triton.cdiv(out.shape[1], columns),](*given, **sizes, **options)


@triton.jit
def _add_norm(
    x,
    change,
    weight,
    out,
    eps,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    ADDS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    real, where = column < WIDTH, row * WIDTH + column
    scale = tl.load(weight + column, mask=real, other=0.0).to(tl.float32)
    own = tl.load(x + where, mask=real, other=0.0)
    if ADDS:
        more = tl.load(change + where, mask=real, other=0.0).to(tl.float32)
        own = (own.to(tl.float32) + more).to(x.dtype.element_ty)
        tl.store(x + where, own, mask=real)
    wide = own.to(tl.float32)
    size = tl.rsqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    tl.store(out + where, wide * size * scale, mask=real)


@triton.jit
def _place_heads(
    qkv,
    cos,
    sin,
    query_norm,
    key_norm,
    eps,
    queries,
    keys,
    values,
    positions,
    slots,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
    PADDED: tl.constexpr,
    NORMS: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    at, slot = tl.load(positions + row), tl.load(slots + row)
    head, column = tl.arange(0, HEADS)[:, None], tl.arange(0, PADDED)[None, :]
    half: tl.constexpr = HALF
    width: tl.constexpr = 2 * HALF
    within = column < half
    is_query = within & (head < QUERIES)
    is_key = within & (head >= QUERIES) & (head < QUERIES + KEYS)
    is_value = within & (head >= QUERIES + KEYS) & (head < QUERIES + 2 * KEYS)
    real = is_query | is_key | is_value
    turned = is_query | is_key
    where = qkv + (row * (QUERIES + 2 * KEYS) + head) * width + column
    left = tl.load(where, mask=real, other=0.0).to(tl.float32)
    right = tl.load(where + half, mask=real, other=0.0).to(tl.float32)
    if NORMS:
        own = tl.sum(left * left + right * right, 1)[:, None]
        size = tl.where(turned, tl.rsqrt(own / width + eps), 1.0)
        low = tl.load(query_norm + column + 0 * head, mask=is_query, other=0.0)
        low += tl.load(key_norm + column + 0 * head, mask=is_key, other=0.0)
        high = tl.load(query_norm + half + column + 0 * head, mask=is_query, other=0.0)
        high += tl.load(key_norm + half + column + 0 * head, mask=is_key, other=0.0)
        kind = qkv.dtype.element_ty
        left *= size * tl.where(turned, low.to(tl.float32), 1.0)
        right *= size * tl.where(turned, high.to(tl.float32), 1.0)
        left, right = left.to(kind).to(tl.float32), right.to(kind).to(tl.float32)
    # Values are turned by an angle of 0.
    c = tl.load(cos + at * width + column, mask=within, other=1.0).to(tl.float32)
    s = tl.load(sin + at * width + half + column, mask=within, other=0.0).to(tl.float32)
    c, s = tl.where(turned, c, 1.0), tl.where(turned, s, 0.0)
    low, high = left * c - right * s, right * c + left * s
    query = queries + (row * QUERIES + head) * width + column
    tl.store(query, low, mask=is_query)
    tl.store(query + half, high, mask=is_query)
    tl.store(where, low, mask=is_key)
    tl.store(where + half, high, mask=is_key)
    key = keys + (slot * KEYS + head - QUERIES) * width + column
    tl.store(key, low, mask=is_key & (slot >= 0))
    tl.store(key + half, high, mask=is_key & (slot >= 0))
    value = values + (slot * KEYS + head - QUERIES - KEYS) * width + column
    tl.store(value, low, mask=is_value & (slot >= 0))
    tl.store(value + half, high, mask=is_value & (slot >= 0))


@triton.jit
def _single(
    x,
    weight,
    bias,
    out,
    count,
    size,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    column = (tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    real, place = column < count, tl.arange(0, DEPTH)
    total = tl.zeros((COLUMNS, DEPTH), tl.float32)
    other = tl.zeros((COLUMNS, DEPTH), tl.float32)
    for start in range(0, size, DEPTH):
        at = start + place
        given = tl.load(x + at, mask=at < size, other=0.0).to(tl.float32)[None, :]
        where, mask = weight + column[:, None] * size + at[None, :], real[:, None] & (at < size)
        total += tl.load(where, mask=mask, other=0.0).to(tl.float32) * given
        if GATED:
            other += tl.load(where + count * size, mask=mask, other=0.0).to(tl.float32) * given
    found = tl.sum(total, 1)
    if BIAS:
        found += tl.load(bias + column, mask=real, other=0.0).to(tl.float32)
    if GATED:
        kind = out.dtype.element_ty
        gate, up = found.to(kind).to(tl.float32), tl.sum(other, 1).to(kind).to(tl.float32)
        found = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + column, found, mask=real)
