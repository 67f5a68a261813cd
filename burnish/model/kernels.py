"""Causal attention of one block of sequences, and its gradient, in memory linear in the length.

The forward pass returns the result and the logsumexp of each row, which the backward pass needs.

Legend: B sequences of L queries each, after a prompt of P tokens; T = P + L; Hq query heads and Hkv
key and value heads of width D.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

MASKED = 512
"""Largest number of queries for which a CPU computes attention to prompt and response in one call
with a mask. For more queries, two calls without a mask are faster and need less memory."""
SCORES = 2**24
"""Number of attention scores that are held at a time by plain matrix products."""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def mask(queries: int, before: int, like: Tensor) -> Tensor:
    """Build the causal mask [L, P + L] of L = ``queries`` queries after P = ``before`` tokens.

    It consists of 0 and −∞ and is added to the scores. It contains the masks of fewer queries after
    fewer tokens (see `part`). ``like`` is a tensor with the mask's dtype and device.
    """
    seen = torch.ones(queries, before + queries, dtype=torch.bool, device=like.device).tril(before)
    return like.new_zeros(seen.shape).masked_fill_(~seen, -math.inf)


def part(whole: Tensor, queries: int, before: int) -> Tensor:
    """Return the causal mask of ``queries`` queries after ``before`` tokens, as a view of
    ``whole``, a mask (see `mask`) for at least as many queries after at least as many tokens."""
    first = whole.shape[1] - whole.shape[0] - before
    return whole[:queries, first : first + before + queries]


def forward(q: Tensor, k: Tensor, v: Tensor, *, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute causal attention of q [B, Hq, L, D] to k and v [B, Hkv, T, D]; return the result [B,
    Hq, L, D] and the logsumexp of the scores [B, Hq, L].

    ``seen`` is the mask [L, T] (see `mask`), which only a CPU uses. It is None if there is no
    prompt, or if the block is long: a CPU then makes two calls without a mask.
    """
    before = k.shape[2] - q.shape[2]
    if q.device.type != "cpu":
        return rowwise(q, k, v)
    if not before or seen is not None:
        out, lse = _flash(q, k, v, 0.0, not before, attn_mask=seen)
        return out, lse
    # A softmax over all keys is the sum of two softmaxes over disjoint keys, each weighted by its
    # share of the total.
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
    """Return the gradients of q, k and v. ``up`` is the gradient of the result; all other arguments
    are those of `forward` and its outputs."""
    before = k.shape[2] - q.shape[2]
    if q.device.type != "cpu":
        return rowwise_backward(up, q, k, v, out, lse)
    if not before or seen is not None:
        to_q, to_k, to_v = _flash_backward(up, q, k, v, out, lse, 0.0, not before, attn_mask=seen)
        return to_q, to_k, to_v
    # Given the logsumexp over all keys, each call computes probabilities over all keys.
    rest = out, lse, 0.0
    own = _flash_backward(up, q, k[:, :, before:], v[:, :, before:], *rest, True)
    prompt = _flash_backward(up, q, k[:, :, :before], v[:, :, :before], *rest, False)
    to_k, to_v = (torch.cat((x, y), dim=2) for x, y in zip(prompt[1:], own[1:], strict=True))
    return own[0] + prompt[0], to_k, to_v


def rowwise(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the outputs of `forward` by plain matrix products, some queries at a time, on any
    device. Only `SCORES` scores (at least those of one query) are held at a time."""
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
    """Compute the gradients of `backward` by plain matrix products, some queries at a time.

    With probabilities p, result o and its gradient u, and scores s:

    ∂/∂v = pᵀ u        ∂/∂s = p · (u vᵀ − u · o)        ∂/∂q = ∂/∂s k / √D
    ∂/∂k = (∂/∂s)ᵀ q / √D
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
    """Group the query heads by the key head that they share: [B, Hq, rows, …] -> [B, Hkv, Hq / Hkv,
    rows, …]."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:])


def _scores(q: Tensor, k: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield slices of queries and their scaled, causally masked scores [B, Hkv, Hq / Hkv, rows,
    keys up to the last query]."""
    length, size = q.shape[2], k.shape[2]
    keys, count = torch.arange(size, device=q.device), q.shape[0] * q.shape[1] * size
    step = max(1, SCORES // count)
    for start in range(0, length, step):
        rows = slice(start, min(start + step, length))
        last, end = keys[size - length :][rows], size - length + rows.stop
        scores = _grouped(q[:, :, rows] * q.shape[-1] ** -0.5, k) @ k[:, :, None, :end].mT
        yield rows, scores.masked_fill_(keys[:end] > last[:, None], -math.inf)
