"""CPU kernels, compiled by numba on their first call and cached on disk.

Each replaces several PyTorch operations by one pass over the data, reads pages in place, and rounds
where the model does. Rows run on PyTorch's threads, because numba's OpenMP layer uses the library
that PyTorch has loaded. bfloat16 is passed as its bits, uint16, because numba does not support it;
arithmetic is in float32.

Legend: N tokens, S decoding rows, Hq and Hkv heads, D head width, d model width, f hidden width.
"""

from __future__ import annotations

import math
import os
import pickle
import sys
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import llvmlite.binding
import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange, types
from numba.extending import intrinsic, overload
from numba.np.arrayobj import make_array

from burnish.console.progress import tell
from burnish.errors import ChildError, EngineError
from burnish.machine.process import run_command

if numba.config.CPU_FEATURES is None:
    _features = llvmlite.binding.get_host_cpu_features()
    if _features.get("avx512f"):  # LLVM would use only half of the vector width
        numba.config.CPU_FEATURES = _features.flatten() + ",-prefer-256-bit"
EXACT = {"reassoc", "contract", "nsz"}
"""Fast-math options of the kernels. Sums may be reordered, which vectorisation needs; NaN and
infinity are preserved."""
F = np.float32
AHEAD = 16
"""Distance, in tokens, at which keys and values are prefetched."""
PATIENCE = 600
"""Timeout for compiling a kernel, in seconds; on a slow processor it takes ten."""
compiles_here = False
"""Whether this process is the child that compiles a kernel."""


def rows_kernel(name: str, *sizes: int) -> Callable[[Any], Any]:
    """Return a decorator that compiles a kernel over rows in a child process, once, and then runs
    the compiled copy on disk.

    ``name`` is the kernel's name in this module, by which the child process finds it. If ``sizes``
    are given, it is the name of a function that returns the kernel for these sizes. The copy that
    numba writes to disk is optimised once more than the one it runs after compiling, and on some
    processors their last bits differ, so that a second run would not reproduce the first.
    """

    def make(function: Any) -> Any:
        options = {"cache": True, "nogil": True, "parallel": True, "error_model": "numpy"}
        kernel = njit(fastmath=EXACT, **options)(function)
        load = kernel._cache.load_overload

        def load_or_compile(signature: Any, context: Any) -> Any:
            found = load(signature, context)
            if found is None and not compiles_here:
                doing = f"compiling the kernel {name} (once; later runs find it on the disk)"
                tell("compile", doing)
                _compile_aside(name, sizes, signature)
                found = load(signature, context)
            return found

        kernel._cache.load_overload = load_or_compile
        return kernel

    return make


def _compile_aside(name: str, sizes: tuple[int, ...], signature: Any) -> None:
    code = f"from {__name__} import compile_here; compile_here()"
    command = [sys.executable, "-P", "-c", code]
    env = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
    kernel = pickle.dumps((name, sizes, signature))
    try:
        run_command(command, name="the compiler", timeout=PATIENCE, env=env, stdin=kernel)
    except ChildError as error:
        raise EngineError(f"the kernel {name} can't be compiled: {error}") from None


def compile_here() -> None:
    """Main function of the child process: compile the kernel that standard input describes."""
    global compiles_here
    compiles_here = True
    name, sizes, signature = pickle.load(sys.stdin.buffer)
    kernel = globals()[name]
    (kernel(*sizes) if sizes else kernel).compile(signature)


@intrinsic
def _prefetch(context: Any, table: Any, row: Any, column: Any) -> Any:
    """Make numba emit an instruction that prefetches table[row, column] into the processor's
    cache."""

    def generate(target: Any, builder: Any, sig: Any, args: Any) -> Any:
        array = make_array(sig.args[0])(target, builder, args[0])
        width = builder.extract_value(array.shape, 1)
        at = builder.gep(array.data, [builder.add(builder.mul(args[1], width), args[2])])
        number, void = ir.IntType(32), ir.VoidType()
        kind = ir.FunctionType(void, [at.type, number, number, number])
        name = "llvm.prefetch.p0"
        call = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
        builder.call(call, [at, number(0), number(3), number(1)])
        return target.get_dummy_value()

    return types.void(table, types.intp, types.intp), generate


def _wide(x: Any) -> Any:
    """Convert a stored number, float32 or the bits of a bfloat16, to float32."""


def _stored(x: Any, like: Any) -> Any:
    """Round float32 to the stored type of the array `like`, to nearest even."""


@overload(_wide, inline="always")
def _(x):
    if isinstance(x, types.Float):
        return lambda x: x
    return lambda x: np.uint32(np.uint32(x) << np.uint32(16)).view(F)


@overload(_stored, inline="always")
def _(x, like):
    if isinstance(like.dtype, types.Float):
        return lambda x, like: x

    def bfloat16(x, like):
        bits = F(x).view(np.uint32)
        if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
            return np.uint16(0x7FC0)  # rounding could turn NaN into a number
        even = (bits >> np.uint32(16)) & np.uint32(1)
        return np.uint16((bits + np.uint32(0x7FFF) + even) >> np.uint32(16))

    return bfloat16


@njit(fastmath=EXACT, inline="always", cache=True)
def _exp(x):
    """Return e^x, accurate to float32's last bits, by operations that vectorise. x is clamped to
    −87.5 … 88."""
    x = min(max(x, F(-87.5)), F(88.0))
    n = np.floor(x * F(math.log2(math.e)) + F(0.5))
    r = x - n * F(0.693359375) - n * F(-2.12194440e-4)
    p = F(1.9875691500e-4) * r + F(1.3981999507e-3)
    p = (p * r + F(8.3334519073e-3)) * r + F(4.1665795894e-2)
    p = (p * r + F(1.6666665459e-1)) * r + F(5.0000001201e-1)
    power = np.uint32(np.uint32(np.int32(n) + 127) << np.uint32(23)).view(F)  # 2^n
    return (p * r * r + r + F(1)) * power


@njit(inline="always", cache=True)
def _fetch(pool, table, size, token):
    """Prefetch a token's keys or values from a pool. ``table``: the pages of the token's row;
    ``size``: tokens per page; ``token``: the token's index in the row."""
    slot = table[token // size] * size + token % size
    for column in range(0, pool.shape[1], 32):
        _prefetch(pool, slot, column)


@njit(inline="always", cache=True)
def _largest(row, tops):
    """Return the largest number of a row, ignoring NaN. ``tops``: buffer for parallel maxima, to
    vectorise; its content is overwritten."""
    width, end = tops.shape[0], row.shape[0]
    tops[:] = F(-np.inf)
    for start in range(0, end, width):
        part = row[start : min(start + width, end)]
        for i in range(part.shape[0]):
            x = _wide(part[i])
            tops[i] = x if x > tops[i] else tops[i]
    top = tops[0]
    for i in range(width):
        top = tops[i] if tops[i] > top else top
    return top


@rows_kernel("norm")
def norm(x, delta, weight, eps, out):
    """Add delta [N, d] to x [N, d] in place, unless delta has no rows. Then write RMSNorm(x) to out
    [N, d], with weight [d] and the constant eps."""
    width = x.shape[1]
    for r in prange(x.shape[0]):
        row, target = x[r], out[r]
        if delta.shape[0]:
            more = delta[r]
            for i in range(width):
                row[i] = _stored(_wide(row[i]) + _wide(more[i]), row)
        total = F(0)
        for i in range(width):
            total += _wide(row[i]) * _wide(row[i])
        scale = F(1) / np.sqrt(total / F(width) + eps)
        for i in range(width):
            target[i] = _stored(_wide(row[i]) * scale * weight[i], target)


@rows_kernel("gate")
def gate(both, out):
    """Write silu(first half of both [N, 2f]) · second half to out [N, f]."""
    width = out.shape[1]
    for r in prange(out.shape[0]):
        gate, up, target = both[r, :width], both[r, width:], out[r]
        for i in range(width):
            x = _wide(gate[i])
            silu = _wide(_stored(x / (F(1) + _exp(-x)), target))
            target[i] = _stored(silu * _wide(up[i]), target)


@rows_kernel("turn")
def turn(qkv, cos, sin, slots, keys, values):
    """Apply the rotary position embedding, cos and sin [N, D], to q and k in qkv [N, (Hq + 2 Hkv)
    D] in place; write k and v to their slots in keys and values [slots, Hkv D]."""
    width, held = cos.shape[1], keys.shape[1]
    half, turned = width // 2, qkv.shape[1] - held
    for r in prange(qkv.shape[0]):
        c, s = cos[r], sin[r]
        for h in range(turned // width):
            left = qkv[r, h * width : h * width + half]
            right = qkv[r, h * width + half : (h + 1) * width]
            for i in range(half):
                a, b = _wide(left[i]), _wide(right[i])
                x = _wide(_stored(a * _wide(c[i]), left)) + b * _wide(s[i])
                y = _wide(_stored(b * _wide(c[half + i]), left)) + a * _wide(s[half + i])
                left[i], right[i] = _stored(x, left), _stored(y, left)
        key, value = keys[slots[r]], values[slots[r]]
        for i in range(held):  # numba takes long to compile slice copies
            key[i], value[i] = qkv[r, turned - held + i], qkv[r, turned + i]


@rows_kernel("join_attention")
def join_attention(out, totals, rows, real, part, part_totals):
    """Merge attention to a group's shared keys into the attention to each row's own keys, as if one
    softmax had covered all keys. Only out is modified.

    out [S, Hq D] holds the attention to own keys, and totals [S, Hq] the log-sum-exp of its scores;
    part [groups, Hkv, R, Hq / Hkv, D] and part_totals hold the same for the shared keys. rows
    [groups, R] are the rows of out that belong to part; only the first `real` [groups] of each
    group count.
    """
    heads, queries, width = part.shape[1], part.shape[3], part.shape[4]
    for group in prange(rows.shape[0]):
        for i in range(real[group]):
            row = rows[group, i]
            for h in range(heads):
                for g in range(queries):
                    at = h * queries + g
                    ours, theirs = totals[row, at], part_totals[group, h, i, g]
                    share = F(1) / (F(1) + _exp(ours - theirs))
                    target, more = out[row, at * width : (at + 1) * width], part[group, h, i, g]
                    for d in range(width):
                        old = _wide(target[d])
                        target[d] = _stored(old + share * (_wide(more[d]) - old), target)


@rows_kernel("weigh_rows")
def weigh_rows(logits, heat, peaks, sums, size):
    """Write to peaks [M] the largest of logits [M, V] / heat [M], with temperatures heat, and to
    sums [M, blocks] the sum of exp(logits / heat − peak) over each block of ``size`` tokens."""
    for r in prange(logits.shape[0]):
        row, per = logits[r], F(1) / heat[r]
        peak = _largest(row, np.empty(64, F)) * per
        peaks[r] = peak
        for block in range(sums.shape[1]):
            part, total = row[block * size : (block + 1) * size], F(0)
            for i in range(part.shape[0]):
                total += _exp(_wide(part[i]) * per - peak)
            sums[r, block] = total


def use_threads() -> None:
    """Make numba use as many threads as PyTorch; by default it uses every core.

    This does not happen on import, because a process that has started threads can't be forked.
    """
    import torch

    threads = torch.get_num_threads()
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    if torch.get_num_threads() != threads:  # numba's first call also changes PyTorch's number
        torch.set_num_threads(threads)


@lru_cache
def decode_kernel(width: int, queries: int, size: int) -> Any:
    """Return the kernel with which single rows attend to their pages, for these sizes.

    ``width``: size of a head; ``queries``: number of query heads that share a key head; ``size``:
    tokens per page, a multiple of 4.
    """

    @rows_kernel("decode_kernel", width, queries, size)
    def decode(qkv, keys, values, pages, first, length, out, totals, scale, threads):
        """For each of the S rows of qkv, compute attention to the first `length` [S] tokens in
        pages[first :], first [S]; write the result to out [S, Hq D] and the log-sum-exp of the
        scores to totals [S, Hq]."""
        rows, kv_heads = out.shape[0], keys.shape[1] // width
        heads = kv_heads * queries
        for thread in prange(threads):
            q, o = np.empty((heads, width), F), np.empty((heads, width), F)
            tops = np.empty(16, F)
            scores = np.empty((heads, length.max() + size + 4), F)
            for r in range(thread, rows, threads):
                n, table = length[r], pages[first[r] :]
                for i in range(heads):
                    source, wide = qkv[r, i * width : (i + 1) * width], q[i]
                    for d in range(width):
                        wide[d] = _wide(source[d]) * scale
                for t in range(n):
                    key = keys[table[t // size] * size + t % size]
                    if t + AHEAD < n:
                        _fetch(keys, table, size, t + AHEAD)
                    else:
                        _fetch(values, table, size, n - 1 - t)
                    for h in range(kv_heads):
                        mine = key[h * width : (h + 1) * width]
                        for i in range(h * queries, (h + 1) * queries):
                            wide, score = q[i], F(0)
                            for d in range(width):
                                score += wide[d] * _wide(mine[d])
                            scores[i, t] = score
                for i in range(heads):
                    row, total = scores[i], F(0)
                    top = _largest(row[:n], tops)
                    for t in range(n):
                        row[t] = _exp(row[t] - top)
                        total += row[t]
                    totals[r, i] = top + np.log(total)
                    row[n : n + 4] = F(0)
                    scale_back, sums = F(1) / total, o[i]
                    for t in range(n):
                        row[t] *= scale_back
                    for d in range(width):
                        sums[d] = F(0)
                for t in range(0, n, 4):  # four at a time, for fewer passes over the sums
                    last = n - t - 1
                    for ahead in range(t + AHEAD, min(t + AHEAD + 4, n)):
                        _fetch(values, table, size, ahead)
                    at = table[t // size] * size + t % size
                    for h in range(kv_heads):
                        cut = slice(h * width, (h + 1) * width)
                        v0, v1 = values[at, cut], values[at + min(1, last), cut]
                        v2, v3 = values[at + min(2, last), cut], values[at + min(3, last), cut]
                        for i in range(h * queries, (h + 1) * queries):
                            sums, row = o[i], scores[i, t : t + 4]
                            for d in range(width):
                                sums[d] += (
                                    row[0] * _wide(v0[d])
                                    + row[1] * _wide(v1[d])
                                    + row[2] * _wide(v2[d])
                                    + row[3] * _wide(v3[d])
                                )
                for i in range(heads):
                    target, sums = out[r, i * width : (i + 1) * width], o[i]
                    for d in range(width):
                        target[d] = _stored(sums[d], target)

    return decode
