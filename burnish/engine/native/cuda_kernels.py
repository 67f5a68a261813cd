"""Triton kernels for decoding, which write to pages and attend to them in place.

One program per row and key head iterates over the row's pages with a running maximum and sum, so
that a layer needs one launch for rows of any lengths.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

TOKENS = 64
"""Number of keys that a program reads at a time."""
LEAST = 16
"""Minimum number of rows and columns of a Triton matrix product."""


def attend(q: Tensor, keys: Tensor, values: Tensor, table: Sequence[Tensor], size: int) -> Tensor:
    """Compute the attention of decoding rows to their pages: q [S, Hq, D], keys and values [slots,
    Hkv, D] -> [S, Hq, D].

    ``table``: the concatenated pages of all rows, the index of each row's first page in them [S],
    and the number of tokens that the row attends to [S]; 0 gives a result of zeros. ``size``:
    tokens per page.
    """
    q = q.contiguous()
    out = q.new_empty(q.shape)
    (rows, _, width), heads = q.shape, keys.shape[1]
    repeat = q.shape[1] // heads
    padded = max(LEAST, triton.next_power_of_2(repeat))
    sizes = {"HEADS": heads, "REPEAT": repeat, "PADDED": padded, "WIDTH": width, "SIZE": size}
    _decode[rows, heads](q, keys, values, *table, out, width**-0.5, **sizes, TOKENS=TOKENS)
    return out


def write_pages(
    keys: Tensor, values: Tensor, slots: Tensor, new_keys: Tensor, new_values: Tensor
) -> None:
    """Write new keys and values [N, Hkv, D] into keys and values [slots, Hkv, D] at these slots
    [N], which must all be different. A row with slot −1 is skipped.

    PyTorch's own index_copy_ would sort the slots first in deterministic mode.
    """
    width = keys.shape[1] * keys.shape[2]
    fresh = new_keys.contiguous(), new_values.contiguous()
    padded = triton.next_power_of_2(width)
    _write[(len(slots),)](keys, values, slots, *fresh, WIDTH=width, PADDED=padded)


@triton.jit
def _write(keys, values, slots, new_keys, new_values, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED)
    slot = tl.load(slots + row)
    real, target = column < tl.where(slot < 0, 0, WIDTH), slot * WIDTH + column
    source = row * WIDTH + column
    tl.store(keys + target, tl.load(new_keys + source, mask=real), mask=real)
    tl.store(values + target, tl.load(new_values + source, mask=real), mask=real)


@triton.jit
def _decode(
    q,
    keys,
    values,
    pages,
    firsts,
    counts,
    out,
    scale,
    HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first, count = tl.load(firsts + row), tl.load(counts + row)
    mates, column, token = tl.arange(0, PADDED), tl.arange(0, WIDTH), tl.arange(0, TOKENS)
    mine = (row * HEADS + head) * REPEAT * WIDTH + mates[:, None] * WIDTH + column[None, :]
    real = (mates < REPEAT)[:, None]
    query = tl.load(q + mine, mask=real, other=0.0)
    peak = tl.full((PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    mix = tl.zeros((PADDED, WIDTH), tl.float32)
    for start in range(0, count, TOKENS):
        at = start + token
        seen = at < count
        page = tl.load(pages + first + at // SIZE, mask=seen, other=0)
        slot = (page * SIZE + at % SIZE) * HEADS + head
        where = slot[:, None] * WIDTH + column[None, :]
        k = tl.load(keys + where, mask=seen[:, None], other=0.0)
        v = tl.load(values + where, mask=seen[:, None], other=0.0)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        weights = tl.exp(scores - higher[:, None])
        shrink = tl.exp(peak - higher)
        total = total * shrink + tl.sum(weights, 1)
        mix = tl.dot(weights.to(v.dtype), v, mix * shrink[:, None], input_precision="ieee")
        peak = higher
    share = tl.where(total > 0, 1 / total, 0.0)
    tl.store(out + mine, mix * share[:, None], mask=real)
