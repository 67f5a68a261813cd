"""Triton kernels for log-probabilities and entropies of rows of logits, and for their gradient.

The forward pass reads each logit once; the backward pass reads it once and overwrites it by its
gradient. The plain version is in `logprobs`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

READ = 4096
"""Logits of a row that a program reads at a time."""
WRITE = 2048
"""Logits of a row whose gradient a program writes."""


def moments(logits: Tensor, heat: Tensor, tokens: Tensor, out: tuple[Tensor, ...]) -> None:
    """Compute, for each row x of ``logits`` [M, V] / ``heat`` [M]: its maximum, Σ exp(x − max),
    Σ (x − max) exp(x − max), and x − max of the row's token in ``tokens`` [M]. ``out``: four
    tensors [M] in float32, which are overwritten."""
    rows, size = logits.shape
    if rows:
        _moments[rows,](logits, heat, tokens, *out, size, BLOCK=READ, num_warps=8)


def gradient(
    logits: Tensor,
    heat: Tensor,
    tokens: Tensor,
    total: Tensor,
    up: Tensor,
    own: Tensor,
    entropy: Tensor,
    up_entropy: Tensor | None,
) -> None:
    """Overwrite ``logits`` [M, V] by the gradient of the log-probabilities and entropies.

    With p = exp(logits / heat − total), element j of a row becomes −p · (up + (log p + entropy) ·
    up_entropy), plus ``own`` if j is the row's token. All other arguments are [M].
    """
    rows, size = logits.shape
    if rows:
        given = total, up, own, entropy, entropy if up_entropy is None else up_entropy
        sizes = {"ENTROPY": up_entropy is not None, "BLOCK": WRITE}
        _gradient[rows, triton.cdiv(size, WRITE)](logits, heat, tokens, *given, size, **sizes)


@triton.jit
def _moments(logits, heat, tokens, highest, mass, weighted, chosen, size, BLOCK: tl.constexpr):
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    hot, first = tl.load(heat + row), row * size
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    moment = tl.zeros((), tl.float32)
    for start in range(0, size, BLOCK):
        at = start + lane
        x = tl.load(logits + first + at, mask=at < size, other=float("-inf")).to(tl.float32) / hot
        higher = tl.maximum(peak, tl.max(x, 0))
        seen = x != float("-inf")  # true for NaN, which must not be lost
        below = tl.where(seen, x - higher, 0.0)
        p = tl.where(seen, tl.exp(below), 0.0)
        # Before the first block, total and moment are 0.
        fall = tl.where(total > 0, peak - higher, 0.0)
        shrink = tl.exp(fall)
        moment = shrink * (moment + fall * total) + tl.sum(p * below, 0)
        total = shrink * total + tl.sum(p, 0)
        peak = higher
    token = tl.load(tokens + row)
    own = tl.load(logits + first + token).to(tl.float32) / hot
    tl.store(highest + row, peak)
    tl.store(mass + row, total)
    tl.store(weighted + row, moment)
    tl.store(chosen + row, own - peak)


@triton.jit
def _gradient(
    logits,
    heat,
    tokens,
    totals,
    ups,
    owns,
    entropies,
    entropy_ups,
    size,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    where, real = logits + row * size + at, at < size
    x = tl.load(where, mask=real, other=0.0).to(tl.float32) / tl.load(heat + row)
    x -= tl.load(totals + row)
    scale = tl.load(ups + row)
    if ENTROPY:
        scale += (x + tl.load(entropies + row)) * tl.load(entropy_ups + row)
    mine = tl.where(at == tl.load(tokens + row), tl.load(owns + row), 0.0)
    tl.store(where, mine - tl.exp(x) * scale, mask=real)
