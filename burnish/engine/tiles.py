"""Attention of rows that see the same pages, in the processor's matrix tiles (AMX, bfloat16).

A tile is 16 rows of 64 bytes; the processor multiplies one of 16 × 32 by one of 32 × 16 that holds
pairs of rows side by side. Keys are such a first factor where they lie in their pages. It rounds
where PyTorch's flash attention does: scores are float32, weights bfloat16.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from burnish import machine
from burnish.engine.fused import F, _as_bits, _exp, _prefetch, _stored, _wide, rows_kernel

U = np.uint32
ROWS = 16
"""Rows of a tile, and tokens of a prompt that are attended to together."""
SHAPES = np.zeros(64, np.uint8)
"""What configures all eight tiles to their full size: 64 bytes a row, 16 rows."""
SHAPES[0], SHAPES[16:32:2], SHAPES[48:56] = 1, 64, ROWS


def usable(width: int, size: int) -> bool:
    import torch

    return (
        width % 32 == size % ROWS == 0
        and "AMX" in machine.instructions()
        and "+amx-bf16" in (numba.config.CPU_FEATURES or "")
        and torch.cpu._init_amx()
    )


def table(parts: Any, most: int) -> Any:
    """parts: rows, their pages and how many tokens each of them sees, cut into blocks of at most
    `most` rows -> the pages, and by block where they begin, rows, `seen`, and how many are real."""
    starts = np.cumsum([0, *(len(pages) for _, pages, _ in parts)])
    blocks = [
        (start, rows[at : at + most], seen[at : at + most])
        for (rows, _, seen), start in zip(parts, starts, strict=False)
        for at in range(0, len(rows), most)
    ]
    real = np.array([len(rows) for _, rows, _ in blocks])
    rows, seen = np.zeros((2, len(blocks), real.max()), np.int64)
    for i, (_, some, limits) in enumerate(blocks):
        rows[i, : len(some)], seen[i, : len(some)] = some, limits
    pages = np.concatenate([pages for _, pages, _ in parts]).astype(np.int64)
    return pages, np.array([start for start, _, _ in blocks]), rows, seen, real


def _call(builder: Any, name: str, *args: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [arg.type for arg in args])
    known = builder.module.globals.get(name)
    builder.call(known or ir.Function(builder.module, kind, name), args)


@intrinsic
def _configure(context: Any, shapes: Any) -> Any:
    def generate(target: Any, builder: Any, sig: Any, args: Any) -> Any:
        array = make_array(sig.args[0])(target, builder, args[0])
        _call(builder, "llvm.x86.ldtilecfg", builder.bitcast(array.data, cgutils.voidptr_t))
        return target.get_dummy_value()

    return types.void(shapes), generate


@intrinsic
def _release(context: Any) -> Any:
    def generate(target: Any, builder: Any, sig: Any, args: Any) -> Any:
        _call(builder, "llvm.x86.tilerelease")
        return target.get_dummy_value()

    return types.void(), generate


@intrinsic
def _product(context: Any, c: Any, at_c: Any, a: Any, at_a: Any, b: Any, at_b: Any, n: Any) -> Any:
    """Two tiles of c, side by side = the sum over n tiles of a, side by side, times n pairs of
    tiles of b, one below another. at: the first element of each."""

    def generate(target: Any, builder: Any, sig: Any, args: Any) -> Any:
        def call(name: str, tile: int, *rest: Any) -> None:
            _call(builder, f"llvm.x86.{name}", ir.IntType(8)(tile), *rest)

        def begin(which: int) -> tuple[Any, Any]:
            array = make_array(sig.args[which])(target, builder, args[which])
            at = builder.gep(array.data, [args[which + 1]])
            return builder.bitcast(at, cgutils.voidptr_t), builder.extract_value(array.strides, 0)

        def move(at: Any, by: Any) -> Any:
            return builder.gep(at, [by])

        (to, to_row), (left, left_row), (right, right_row) = begin(0), begin(2), begin(4)
        word, byte = ir.IntType(64), ir.IntType(8)
        call("tilezero", 0)
        call("tilezero", 1)
        with cgutils.for_range(builder, args[6]) as loop:
            at = move(left, builder.mul(loop.index, word(64)))
            call("tileloadd64", 2, at, left_row)
            at = move(right, builder.mul(builder.mul(loop.index, word(ROWS)), right_row))
            call("tileloadd64", 3, at, right_row)
            call("tileloadd64", 4, move(at, word(64)), right_row)
            call("tdpbf16ps", 0, byte(2), byte(3))
            call("tdpbf16ps", 1, byte(2), byte(4))
        call("tilestored64", 0, to, to_row)
        call("tilestored64", 1, move(to, word(64)), to_row)
        return target.get_dummy_value()

    return types.void(c, types.intp, a, types.intp, b, types.intp, types.intp), generate


@lru_cache
def kernel(width: int, queries: int, size: int) -> Any:
    """Pages of `size` tokens; `queries` heads share a key."""

    @rows_kernel(__name__, "kernel", width, queries, size)
    def attend(
        qkv, keys, values, out, totals, pages, first, rows, seen, real, scale, shapes, threads
    ):
        """Blocks [B] of rows [B, R], of which the first `real` [B] count, over pages[first[b] :],
        where each row sees the first `seen` [B, R] tokens -> out [., Hq D].

        totals [., Hq]: log-sum-exp of the scores over other keys, which out holds; or empty.
        """
        heads = keys.shape[1] // width
        tasks, lot = len(rows) * heads, -(-rows.shape[1] * queries // 32) * 32
        longest = -(-seen.max() // 32) * 32
        for thread in prange(threads):
            q, s = np.empty((width // 2, lot), U), np.empty((longest, lot), F)
            pairs, p = np.empty((longest // 2, lot), U), np.empty((lot, longest // 2), U)
            v, o = np.empty((longest // 2, width), U), np.empty((lot, width), F)
            limit, top, total = np.empty(lot, np.int32), np.empty(lot, F), np.empty(lot, F)
            _configure(shapes)
            for task in range(thread, tasks, threads):
                block, left = task // heads, task % heads * width
                table, used = pages[first[block] :], real[block] * queries
                soon, more_left = (
                    min(task + threads, tasks - 1) // heads,
                    (task + threads) % heads * width,
                )
                limit[:] = 0
                q[:] = U(0)
                for j in range(used):
                    limit[j] = seen[block, j // queries]
                    at = left * queries + j % queries * width
                    source = qkv[rows[block, j // queries], at : at + width]
                    for d in range(width // 2):
                        q[d, j] = U(source[2 * d]) | (U(source[2 * d + 1]) << U(16))
                length = limit.max()
                end = -(-length // 32) * 32
                for t in range(0, length, 16):
                    at = (table[t // size] * size + t % size) * keys.shape[1] + left
                    for j in range(0, used, 32):
                        _product(s, t * lot + j, keys, at, q, j, width // 32)
                top[:] = F(-np.inf)
                for t in range(length):
                    row = s[t]
                    for j in range(lot):
                        x = row[j] if t < limit[j] else F(-np.inf)
                        top[j] = x if x > top[j] else top[j]
                total[:] = F(0)
                for t in range(0, end, 2):
                    row, more, pair = s[t], s[t + 1], pairs[t // 2]
                    now, then = np.int32(t), np.int32(t + 1)
                    if t < length:
                        at = table[t // size] * size + t % size
                        for d in range(left, left + width, 32):
                            _prefetch(values, at, d)
                            _prefetch(values, at + 1, d)
                    for j in range(lot):
                        x, y = _exp((row[j] - top[j]) * scale), _exp((more[j] - top[j]) * scale)
                        x, y = x if now < limit[j] else F(0), y if then < limit[j] else F(0)
                        total[j] += x + y
                        upper = U(_as_bits(y) + U(0x8000)) & U(0xFFFF0000)
                        pair[j] = U(U(_as_bits(x) + U(0x8000)) >> U(16)) | upper
                for j in range(used):
                    for t in range(end // 2):
                        p[j, t] = pairs[t, j]
                for t in range(0, end, 2):
                    pair = v[t // 2]
                    if t < seen[soon, 0]:  # the next task's keys
                        at = pages[first[soon] + t // size] * size + t % size
                        for d in range(more_left, more_left + width, 32):
                            _prefetch(keys, at, d)
                            _prefetch(keys, at + 1, d)
                    if t < length:
                        at = table[t // size] * size + t % size
                        x, y = values[at, left : left + width], values[at + 1, left : left + width]
                        for d in range(width):
                            pair[d] = U(x[d]) | (U(y[d]) << U(16))
                    else:
                        pair[:] = U(0)
                for j in range(0, used, 16):
                    for d in range(0, width, 32):
                        _product(o, j * width + d, p, j * (longest // 2), v, d, end // 32)
                for j in range(used):
                    row, at = rows[block, j // queries], left // width * queries + j % queries
                    sums, target = o[j], out[row, at * width : (at + 1) * width]
                    share, keep = F(1), F(0)
                    if len(totals):
                        share = F(1) / (
                            F(1) + _exp(totals[row, at] - top[j] * scale - np.log(total[j]))
                        )
                        keep = F(1) - share
                    share /= total[j]
                    for d in range(width):
                        old = _wide(target[d]) * keep if keep else F(0)
                        target[d] = _stored(old + sums[d] * share, target)
            _release()

    return attend
