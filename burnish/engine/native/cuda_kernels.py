"""Triton kernels for decoding, which attend to pages in place.

One program per row, key head and part of the row's tokens iterates over pages with a running
maximum and sum. Another kernel attends to the pages that several rows share, once for all of them.
A third one merges the parts.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from burnish.engine.native.decoding import GROUP
from burnish.engine.native.layer_kernels import early

TILE = 32
"""Number of keys that a program reads at a time."""
MANY = 1024
"""Number of programs with wide heads from which on two stages of loads are faster than three. More
stages keep more loads in flight, but fewer programs fit on a multiprocessor."""
LEAST = 16
"""Minimum number of rows and columns of a Triton matrix product."""
PROGRAMS = 264
"""Number of programs that a launch should have: two for each multiprocessor of a large GPU."""
PARTS = 16
"""Maximum number of parts of a row's tokens."""


class PageTable(NamedTuple):
    """The pages of decoding rows; S rows."""

    pages: Tensor
    """The concatenated pages of all rows."""
    firsts: Tensor
    """[S] index of each row's first page in ``pages``."""
    counts: Tensor
    """[S] number of tokens that the row attends to; with 0, the result is not used."""
    owns: Tensor
    """[S] number of its first tokens that the row shares with the rows of an item."""
    items: Tensor | None = None
    """[items, 2 + GROUP] index in ``pages`` of the first shared page, number of shared tokens, and
    the rows that share them, or −1. None if no rows share pages; then ``owns`` is 0."""


def attend(q: Tensor, keys: Tensor, values: Tensor, table: PageTable, size: int) -> Tensor:
    """Compute the attention of decoding rows to their pages: q [S, Hq, D], keys and values [slots,
    Hkv, D] -> [S, Hq, D]. ``size``: tokens per page."""
    q = q.contiguous()
    out = q.new_empty(q.shape)
    (rows, queries, width), heads = q.shape, keys.shape[1]
    repeat = queries // heads
    mates = triton.next_power_of_2(repeat)
    shape = {"HEADS": heads, "REPEAT": repeat, "WIDTH": width, "SIZE": size, "TOKENS": TILE}
    parts, shared, items = divided(rows * heads), 0, table.items
    if items is not None:
        shared = divided(rows // GROUP * heads)
    scale, padded = width**-0.5, max(LEAST, mates)
    # Of each part: the weighted sum of the values, the largest score and the sum of the weights. A
    # single part begins with the result for the shared tokens, and needs no memory of its own.
    is_whole = parts == 1 and shared <= 1
    mixes = q.new_empty(shared + (0 if is_whole else parts), *q.shape, dtype=torch.float32)
    sums = mixes.new_empty(*mixes.shape[:3], 2)
    if items is not None:
        given = q, keys, values, mixes, sums, table.pages, items, scale, rows
        sizes = {"MATES": mates, "GROUP": GROUP, "PADDED": max(LEAST, mates * GROUP)}
        grid = heads, len(items), shared
        _attend_shared[grid](*given, **shape, **sizes, PARTS=shared)
    own = {"PADDED": padded, "PARTS": parts, "WHOLE": is_whole, "BEGUN": is_whole and shared == 1}
    target = (out, mixes, sums) if is_whole else (out, mixes[shared:], sums[shared:])
    grid = heads, rows, parts  # the heads of a token are neighbours in memory
    stages = 3 if width <= 64 or rows * heads < MANY else 2
    given, start = (q, keys, values, *target, *table[:4], scale), early(rows, q)
    _attend[grid](*given, **shape, **own, **start, num_warps=1, num_stages=stages)
    if not is_whole:
        sizes = {"SHARED": shared, "ALL": parts + shared, "WIDTH": width}
        sizes["PADDED"] = triton.next_power_of_2(parts + shared)
        _merge[rows, queries](mixes, sums, table.owns, out, rows, **sizes, **start, num_warps=1)
    return out


def divided(programs: int) -> int:
    """Return into how many parts tokens are divided so that there are about `PROGRAMS` programs."""
    wanted = max(1, PROGRAMS // max(1, programs))
    return min(PARTS, 1 << (wanted.bit_length() - 1))


@triton.jit
def _scan(
    query,
    keys,
    values,
    pages,
    low,
    high,
    head,
    scale,
    peak,
    total,
    mix,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Attend from query [PADDED, WIDTH] to the tokens low … high − 1 of ``pages``; return the
    largest score, the sum of the weights, and the weighted sum of the values, of these tokens and
    of those before, for which ``peak``, ``total`` and ``mix`` are the same."""
    column, token = tl.arange(0, WIDTH), tl.arange(0, TOKENS)
    # Pages are loaded one tile ahead, because the loads of keys and values wait for them.
    page = tl.load(pages + (low + token) // SIZE, mask=low + token < high, other=0)
    for start in range(low, high, TOKENS):
        at = start + token
        seen = at < high
        slot = (page * SIZE + at % SIZE) * HEADS + head
        page = tl.load(pages + (at + TOKENS) // SIZE, mask=at + TOKENS < high, other=0)
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
    return peak, total, mix


@triton.jit
def _attend(
    q,
    keys,
    values,
    out,
    mixes,
    sums,
    pages,
    firsts,
    counts,
    owns,
    scale,
    HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    WHOLE: tl.constexpr,
    BEGUN: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head, row, part = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, count, own = tl.load(firsts + row), tl.load(counts + row), tl.load(owns + row)
    mates, column = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    mine = (row * HEADS + head) * REPEAT + mates
    real = mates < REPEAT
    place, wide = mine[:, None] * WIDTH + column[None, :], real[:, None]
    query = tl.load(q + place, mask=wide, other=0.0)
    each = tl.cdiv(tl.cdiv(count - own, PARTS), TOKENS) * TOKENS
    low = own + part * each
    high = tl.minimum(low + each, count)
    peak = tl.full((PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    mix = tl.zeros((PADDED, WIDTH), tl.float32)
    if BEGUN:
        has = real & (own > 0)
        peak = tl.load(sums + 2 * mine, mask=has, other=float("-inf"))
        total = tl.load(sums + 2 * mine + 1, mask=has, other=0.0)
        mix = tl.load(mixes + place, mask=has[:, None], other=0.0)
    peak, total, mix = _scan(
        query, keys, values, pages + first, low, high, head, scale, peak, total, mix,
        HEADS, WIDTH, SIZE, TOKENS,
    )  # fmt: skip
    if WHOLE:
        share = tl.where(total != 0, 1 / tl.where(total != 0, total, 1.0), 0.0)
        tl.store(out + place, mix * share[:, None], mask=wide)
    else:
        mine += part * tl.num_programs(1).to(tl.int64) * HEADS * REPEAT
        tl.store(mixes + mine[:, None] * WIDTH + column[None, :], mix, mask=wide)
        tl.store(sums + 2 * mine, peak, mask=real)
        tl.store(sums + 2 * mine + 1, total, mask=real)


@triton.jit
def _attend_shared(
    q,
    keys,
    values,
    out,
    sums,
    pages,
    items,
    scale,
    rows,
    HEADS: tl.constexpr,
    REPEAT: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
    TOKENS: tl.constexpr,
    MATES: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    PARTS: tl.constexpr,
):
    head, part = tl.program_id(0), tl.program_id(2)
    item = items + tl.program_id(1) * (2 + GROUP)
    first, count = tl.load(item), tl.load(item + 1)
    if count > 0:
        lane, column = tl.arange(0, PADDED), tl.arange(0, WIDTH)
        member, mate = lane // MATES, lane % MATES
        row = tl.load(item + 2 + member, mask=member < GROUP, other=-1)
        real = (row >= 0) & (mate < REPEAT)
        mine = (row * HEADS + head) * REPEAT + mate
        place = mine[:, None] * WIDTH + column[None, :]
        query = tl.load(q + place, mask=real[:, None], other=0.0)
        each = tl.cdiv(tl.cdiv(count, PARTS), TOKENS) * TOKENS
        low = part * each
        high = tl.minimum(low + each, count)
        peak = tl.full((PADDED,), float("-inf"), tl.float32)
        total = tl.zeros((PADDED,), tl.float32)
        mix = tl.zeros((PADDED, WIDTH), tl.float32)
        peak, total, mix = _scan(
            query, keys, values, pages + first, low, high, head, scale, peak, total, mix,
            HEADS, WIDTH, SIZE, TOKENS,
        )  # fmt: skip
        mine += part.to(tl.int64) * rows * HEADS * REPEAT
        tl.store(out + mine[:, None] * WIDTH + column[None, :], mix, mask=real[:, None])
        tl.store(sums + 2 * mine, peak, mask=real)
        tl.store(sums + 2 * mine + 1, total, mask=real)


@triton.jit
def _merge(
    mixes,
    sums,
    owns,
    out,
    rows,
    SHARED: tl.constexpr,
    ALL: tl.constexpr,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row, queries = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    part, column = tl.arange(0, PADDED), tl.arange(0, WIDTH)
    mine = row * queries + tl.program_id(1)
    # Only rows that share pages have parts of shared tokens, which come first.
    real = (part < ALL) & (part >= tl.where(tl.load(owns + row) > 0, 0, SHARED))
    place = part.to(tl.int64) * rows * queries + mine
    peak = tl.load(sums + 2 * place, mask=real, other=float("-inf"))
    total = tl.load(sums + 2 * place + 1, mask=real, other=0.0)
    real = real & (total != 0)  # a part without tokens has 0; NaN must reach the result
    share = tl.where(real, tl.exp(peak - tl.max(tl.where(real, peak, float("-inf")), 0)), 0.0)
    where = place[:, None] * WIDTH + column[None, :]
    mix = tl.load(mixes + where, mask=real[:, None], other=0.0)
    whole = tl.sum(share * total, 0)
    found = tl.sum(share[:, None] * mix, 0) / tl.where(whole != 0, whole, 1.0)
    tl.store(out + mine * WIDTH + column, found)
