"""From logits to tokens: one uniform number per token inverts the cumulative distribution.

The number comes from `draws.py` and does not depend on the batch. Log-probabilities are the model's
at the sampling temperature, before any mask or truncation. Legend: M rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from burnish.draws import uniforms
from burnish.engine.sequence import ANY, GREEDY, Limits
from burnish.engine.sequence import Sequence as Sample

BLOCK = 256
"""Tokens whose weights are summed up together."""
ROWS = 1024
"""Rows that are weighed at a time, so that a large batch on a GPU takes little memory."""

Weigh = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Logits [M, V], temperature [M] -> the largest of logits / temperature [M], and the sums of
exp(logits / temperature − largest) over each block [M, blocks]."""


def plain_weigh(logits: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    """As `Weigh`, by PyTorch's own operations."""
    vocab, found = logits.shape[1], []
    for some, hot in zip(torch.split(logits, ROWS), torch.split(heat, ROWS), strict=True):
        weights = some.new_zeros(len(some), -(-vocab // BLOCK) * BLOCK, dtype=heat.dtype)
        inside = weights[:, :vocab].copy_(some).div_(hot[:, None])
        peak = inside.amax(1, keepdim=True)
        inside.sub_(peak).exp_()
        found.append((peak[:, 0], weights.view(len(some), -1, BLOCK).sum(2)))
    peaks, sums = zip(*found, strict=True)
    return torch.cat(peaks), torch.cat(sums)


Limited = Mapping[Limits, Sequence[int]]
"""The rows whose tokens are drawn within limits; any other row may draw any token, by chance."""


def draws(
    samples: Sequence[Sample], steps: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Limited]:
    """How samples draw their next tokens: points [samples, steps], temperatures [samples], and the
    rows of limited samples."""
    places, heat, limited = [], [], dict[Limits, list[int]]()
    for row, sequence in enumerate(samples):
        request, limits = sequence.group.request, sequence.limits
        sample = request.first + sequence.index
        place = request.params.seed, request.stream, request.group, sample
        places.append((*place, len(sequence.logprobs)))
        heat.append(request.params.temperature or 1.0)
        if limits != ANY:
            limited.setdefault(limits, []).append(row)
    seed, stream, group, sample, position = np.array(places).T[..., None]
    points = uniforms(seed, stream, group, sample, position + np.arange(steps))
    return (
        torch.from_numpy(points).to(device),
        torch.tensor(heat, device=device, dtype=torch.float64),
        limited,
    )


@torch.no_grad()
def sample(
    logits: Tensor, points: Tensor, heat: Tensor, limited: Limited, weigh: Weigh = plain_weigh
) -> tuple[Tensor, Tensor]:
    """logits [M, V] -> tokens and log-probabilities [M], NaN where logits are not finite.

    points [M] in [0, 1) choose the tokens; heat [M]: temperatures, 1 where a row is greedy. The
    host does not wait for the device if no row is limited or if all are greedy.
    """
    heat = heat.to(torch.promote_types(logits.dtype, torch.float32))
    tokens, totals = _draw_any(logits, points, heat, weigh)
    if len(limited.get(GREEDY, ())) == len(logits):
        tokens, limited = logits.argmax(1), {}
    for limits, rows in limited.items():
        some = torch.tensor(rows, device=logits.device)
        if limits.forced is not None:
            tokens[some] = limits.forced
            continue
        left = _limit(logits[some], heat[some], limits)
        # Blocks that are left out as a whole must have sums of exactly 0.
        how = weigh if limits.top_p == 1 and limits.top_k is None else plain_weigh
        own = left, points[some], heat[some], how
        tokens[some] = left.argmax(1) if limits.greedy else _draw_any(*own)[0]
    chosen = logits.gather(1, tokens[:, None])[:, 0].to(heat.dtype) / heat
    return tokens, (chosen.double() - totals).masked_fill(~totals.isfinite(), torch.nan)


def _limit(logits: Tensor, heat: Tensor, limits: Limits) -> Tensor:
    """logits [M, V], which it changes -> the same with −∞ for tokens that may not be drawn.

    Of the likeliest top_k tokens, the smallest set of likeliest ones whose share reaches top_p is
    left.
    """
    logits[:, list(limits.banned)] = -torch.inf
    if limits.top_p == 1 and limits.top_k is None:
        return logits
    weights = torch.softmax(logits.to(heat.dtype) / heat[:, None], 1)
    likeliest, ids = weights.topk(min(limits.top_k or weights.shape[1], weights.shape[1]), 1)
    before = likeliest.double().cumsum(1) - likeliest
    out = before >= limits.top_p * likeliest.double().sum(1, keepdim=True)
    out[:, 0] = False
    kept = logits.gather(1, ids).masked_fill(out, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, ids, kept)


def _draw_any(logits: Tensor, points: Tensor, heat: Tensor, weigh: Weigh) -> tuple[Tensor, Tensor]:
    """-> tokens [M] that the points [M] hit, and the logarithm of each row's weights' sum [M].

    The cumulative distribution is only summed up, in float64, over blocks and inside the block that
    is hit: summing 64 × 50k numbers one after another would cost more than the model's head. A
    token is hit when the sum up to it is the first above the point, so never at probability 0.
    """
    vocab = logits.shape[1]
    peaks, sums = weigh(logits, heat)
    totals = peaks.double() + sums.sum(1, dtype=torch.float64).log()
    lost = ~totals.isfinite()[:, None]  # the model overflowed: any token will do
    block, inside = search(sums.masked_fill(lost, 1), points[:, None])
    at = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    scaled = logits.gather(1, at.clamp(max=vocab - 1)).to(heat.dtype) / heat[:, None]
    weights = (scaled - peaks[:, None]).exp().masked_fill(lost, 1) * (at < vocab)
    token, _ = search(weights, inside)
    return (block * BLOCK + token)[:, 0].clamp_(max=vocab - 1), totals


def search(weights: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """-> the index that `at` [..., 1], a share of the weights [..., n], falls into, and where in
    it."""
    upto = weights.double().cumsum(-1)
    end = upto[..., -1:]
    target = torch.minimum(at * end, torch.nextafter(end, torch.zeros_like(end)))
    index = torch.searchsorted(upto, target, right=True)
    width = weights.gather(-1, index).double()
    inside = 1 - (upto.gather(-1, index) - target) / width
    return index, inside.clamp(0, 1)
