"""Triton kernels that draw the next token of each row and advance the row, inside a CUDA graph.

Each logit is read once. The first kernel sums the weights of each block of the vocabulary; the
second selects a block and a token in it by inverting the cumulative distribution in float64, as
`sampler` does. The plain version is `decoding.draw_plainly`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from burnish.engine.native.decoding import AHEAD, ENDS, Rows
from burnish.engine.native.sampler import BLOCK

BLOCKS = 16
"""Blocks of the vocabulary whose weights a program sums."""


def draw(logits: Tensor, rows: Rows, size: int) -> None:
    """Draw and advance as `decoding.draw_plainly`: logits [S, V]; ``size``: tokens per page."""
    count, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    # Of each block: largest logit and sum of weights of all tokens, then of the allowed ones.
    sums = logits.new_empty(4, count, blocks, dtype=rows.heat.dtype)
    sizes = {"ENDS": ENDS, "BLOCK": BLOCK}
    limits = rows.heat, rows.held, rows.counts, rows.ends
    grid = count, triton.cdiv(blocks, BLOCKS)
    _weigh[grid](logits, *limits, sums, vocab, blocks, **sizes, BLOCKS=BLOCKS)
    _draw[count,](
        logits,
        sums,
        *rows,
        vocab,
        blocks,
        **sizes,
        ALL=triton.next_power_of_2(blocks),
        AHEAD=AHEAD,
        SIZE=size,
    )


@triton.jit
def _weigh(
    logits,
    heat,
    held,
    counts,
    ends,
    sums,
    vocab,
    blocks,
    ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    if tl.load(counts + row) > 0:
        block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
        at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        x = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        hot = tl.load(heat + row).to(tl.float32)
        if hot != 1:  # an exact division takes longer than reading the logit
            x = tl.div_rn(x, hot + tl.zeros_like(x))
        peak = tl.max(x, 1)
        real = block < blocks
        # Infinite logits, but not −∞, and NaN give NaN.
        total = tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - peak[:, None])), 1)
        where = sums + row * blocks + block
        stride = rows.to(tl.int64) * blocks
        tl.store(where, peak, mask=real)
        tl.store(where + stride, total, mask=real)
        if tl.load(held + row) > 0:
            for place in tl.static_range(ENDS):
                x = tl.where(at == tl.load(ends + row * ENDS + place), float("-inf"), x)
            peak = tl.max(x, 1)
            total = tl.sum(tl.where(x == float("-inf"), 0.0, tl.exp(x - peak[:, None])), 1)
        tl.store(where + 2 * stride, peak, mask=real)
        tl.store(where + 3 * stride, total, mask=real)


@triton.jit
def _search(weights, index, point, size):
    """Return the index of the interval that contains the point, and the point's relative position
    in it: see `sampler.search`."""
    upto = tl.cumsum(weights, 0)
    end = tl.sum(tl.where(index == size - 1, upto, 0.0), 0)
    # As near to the end as float64 resolves, so that an interval contains it.
    target = tl.minimum(point * end, end * (1 - 1.1102230246251565e-16))
    found = tl.sum((upto <= target).to(tl.int32), 0)
    mine = index == found
    width, after = tl.sum(tl.where(mine, weights, 0.0), 0), tl.sum(tl.where(mine, upto, 0.0), 0)
    inside = 1 - (after - target) / tl.where(width > 0, width, 1.0)
    return found, tl.minimum(tl.maximum(inside, 0.0), 1.0)


@triton.jit
def _draw(
    logits,
    sums,
    tokens,
    positions,
    slots,
    firsts,
    counts,
    owns,
    held,
    room,
    greedy,
    drawn,
    ends,
    items,
    pages,
    heat,
    points,
    found,
    logprobs,
    vocab,
    blocks,
    ENDS: tl.constexpr,
    BLOCK: tl.constexpr,
    ALL: tl.constexpr,
    AHEAD: tl.constexpr,
    SIZE: tl.constexpr,
):
    row, rows = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    count = tl.load(counts + row)
    if count > 0:
        index, lane = tl.arange(0, ALL), tl.arange(0, BLOCK)
        step, hot = tl.load(drawn + row), tl.load(heat + row).to(tl.float32)
        limit = tl.load(held + row)
        where, stride = sums + row * blocks + index, rows.to(tl.int64) * blocks
        real = index < blocks
        peaks = tl.load(where, mask=real, other=float("-inf"))
        masses = tl.load(where + stride, mask=real, other=0.0)
        peak = tl.max(peaks, 0)
        mass = tl.where(masses > 0, masses * tl.exp(peaks - peak), masses)
        total = peak + tl.log(tl.sum(mass, 0))
        is_lost = total - total != 0.0  # infinite or NaN
        peaks = tl.load(where + 2 * stride, mask=real, other=float("-inf"))
        masses = tl.load(where + 3 * stride, mask=real, other=0.0)
        peak = tl.max(peaks, 0)
        mass = tl.where(masses > 0, masses * tl.exp(peaks - peak), 0.0)
        mass = tl.where(real, tl.where(is_lost, 1.0, mass), 0.0)
        block, inside = _search(mass, index, tl.load(points + row * AHEAD + step), blocks)
        best = tl.min(tl.where(peaks == peak, index, ALL), 0)
        is_greedy = tl.load(greedy + row) > 0
        block = tl.minimum(tl.where(is_greedy, best, block), blocks - 1)
        at = block * BLOCK + lane
        x = tl.load(logits + row * vocab + at, mask=at < vocab, other=float("-inf")).to(tl.float32)
        x = tl.div_rn(x, hot + tl.zeros_like(x))
        if limit > 0:
            for place in tl.static_range(ENDS):
                x = tl.where(at == tl.load(ends + row * ENDS + place), float("-inf"), x)
        shifted = x.to(tl.float64) - peak
        weights = tl.where(x == float("-inf"), 0.0, tl.exp(shifted))
        weights = tl.where(at < vocab, tl.where(is_lost, 1.0, weights), 0.0)
        some, _ = _search(weights, lane, inside, BLOCK)
        first = tl.min(tl.where(x == tl.max(x, 0), lane, BLOCK), 0)
        some = tl.where(is_greedy, first, some)
        token = tl.minimum(block * BLOCK + some, vocab - 1).to(tl.int64)
        own = tl.div_rn(tl.load(logits + row * vocab + token).to(tl.float32), hot)
        logprob = tl.where(is_lost, float("nan"), own.to(tl.float64) - total)
        tl.store(found + row * AHEAD + step, token)
        tl.store(logprobs + row * AHEAD + step, logprob)
        left = tl.load(room + row)
        goes_on = (left > 1) & (is_lost == 0)
        for place in tl.static_range(ENDS):
            is_end = (token == tl.load(ends + row * ENDS + place)) & (limit <= 0)
            goes_on = goes_on & (is_end == 0)
        after = tl.load(positions + row) + 1
        page = tl.load(pages + tl.load(firsts + row) + after // SIZE, mask=goes_on, other=0)
        tl.store(slots + row, tl.where(goes_on, page * SIZE + after % SIZE, -1))
        tl.store(counts + row, tl.where(goes_on, count + 1, 0))
        tl.store(tokens + row, token, mask=goes_on)
        tl.store(positions + row, after, mask=goes_on)
        tl.store(drawn + row, step + 1)
        tl.store(held + row, limit - 1)
        tl.store(room + row, left - 1)
