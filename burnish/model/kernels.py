"""Causal attention of one block and its gradient, in memory that grows with the length, not with
its square. Forward gives the result and the logsumexp of each row; backward takes them.

Legend: B sequences of L queries each, after a prompt of P tokens, T = P + L; Hq and Hkv heads, D.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

MASKED = 512
"""Queries up to which a CPU sees prompt and own past at once, through a mask. For more of them two
calls without a mask are faster and need none of its memory."""
SCORES = 2**24
"""Scores that exist at a time where no kernel is used."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def mask(queries: int, before: int, like: Tensor) -> Tensor:
    """[L, P + L] to add to the scores of L queries after P tokens. A mask of fewer queries after
    fewer tokens is a part of it, see `part`."""
    seen = torch.ones(queries, before + queries, dtype=torch.bool, device=like.device).tril(before)
    return like.new_zeros(seen.shape).masked_fill_(~seen, -math.inf)


def part(whole: Tensor, queries: int, before: int) -> Tensor:
    """The mask of ``queries`` after ``before`` tokens, as a view of a larger mask."""
    first = whole.shape[1] - whole.shape[0] - before
    return whole[:queries, first : first + before + queries]


def forward(q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """q [B, Hq, L, D], k and v [B, Hkv, T, D], the mask [L, T] if a CPU needs one -> the result
    [B, Hq, L, D] and logsumexp [B, Hq, L]."""
    before = k.shape[2] - q.shape[2]
    if q.device.type != "cpu":
        return rowwise(q, k, v)
    if not before or seen is not None:
        out, lse = _flash(q, k, v, 0.0, not before, attn_mask=seen)
        return out, lse
    # Two softmaxes over disjoint keys are one softmax, each weighted by its share of the sum.
    own, own_lse = _flash(q, k[:, :, before:], v[:, :, before:], 0.0, True)
    prompt, prompt_lse = _flash(q, k[:, :, :before], v[:, :, :before], 0.0, False)
    lse = torch.logaddexp(own_lse, prompt_lse)
    own *= (own_lse - lse).exp_()[..., None]
    return own.addcmul_(prompt, (prompt_lse - lse).exp_()[..., None]), lse


def backward(
    up: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    seen: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, given that of the result; shapes as in `forward`."""
    before = k.shape[2] - q.shape[2]
    if q.device.type != "cpu":
        return rowwise_backward(up, q, k, v, out, lse)
    if not before or seen is not None:
        to_q, to_k, to_v = _flash_backward(up, q, k, v, out, lse, 0.0, not before, attn_mask=seen)
        return to_q, to_k, to_v
    # With the logsumexp of all keys, each part's scores become probabilities under all keys.
    rest = out, lse, 0.0
    own = _flash_backward(up, q, k[:, :, before:], v[:, :, before:], *rest, True)
    prompt = _flash_backward(up, q, k[:, :, :before], v[:, :, :before], *rest, False)
    to_k, to_v = (torch.cat((x, y), dim=2) for x, y in zip(prompt[1:], own[1:], strict=True))
    return own[0] + prompt[0], to_k, to_v


def rowwise(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """As `forward`, by matrix products of some queries at a time, on any device."""
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:3])
    for rows, scores in _scores(q, k):
        total = scores.logsumexp(-1)
        p = scores.sub_(total[..., None]).exp_()
        out[:, :, rows] = (p @ v[:, :, None, : p.shape[-1]]).flatten(1, 2)
        lse[:, :, rows] = total.flatten(1, 2)
    return out, lse


def rowwise_backward(
    up: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """As `backward`. With probabilities p, the gradient u of the result o and the scores s:

    ∂/∂v = pᵀ u        ∂/∂s = p · (u vᵀ − u · o)        ∂/∂q = ∂/∂s k / √D
    """
    scale = q.shape[-1] ** -0.5
    to_q, to_k, to_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows, scores in _scores(q, k):
        u, x = (_grouped(t[:, :, rows], k) for t in (up, q))
        p = scores.sub_(_grouped(lse[:, :, rows, None], k)).exp_()
        inner = _grouped((up[:, :, rows] * out[:, :, rows]).sum(-1, keepdim=True), k)
        seen = slice(p.shape[-1])
        to_v[:, :, seen] += (p.mT @ u).sum(2)
        to_scores = (u @ v[:, :, None, seen].mT).sub_(inner).mul_(p).mul_(scale)
        to_q[:, :, rows] = (to_scores @ k[:, :, None, seen]).flatten(1, 2)
        to_k[:, :, seen] += (to_scores.mT @ x).sum(2)
    return to_q, to_k, to_v


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[B, Hq, rows, …] -> [B, Hkv, Hq / Hkv, rows, …]"""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])


def _scores(q: Tensor, k: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of queries, and their scores [B, Hkv, Hq / Hkv, rows, keys up to the last query's]."""
    length, size = q.shape[2], k.shape[2]
    keys, count = torch.arange(size, device=q.device), q.shape[0] * q.shape[1] * size
    step = max(1, SCORES // count)
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        last, end = keys[size - length :][rows], size - length + rows.stop
        scores = _grouped(q[:, :, rows] * q.shape[-1] ** -0.5, k) @ k[:, :, None, :end].mT
        yield rows, scores.masked_fill_(keys[:end] > last[:, None], -math.inf)
