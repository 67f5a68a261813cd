"""Sample tokens from logits: a uniform number per token inverts the cumulative distribution.

`burnish/randomness.py` provides the number, which does not depend on the batch. A token's weight is
its probability up to a factor, exp(logit / temperature − the row's largest logit / temperature).
Log-probabilities are the model's at the sampling temperature, before any penalty, mask or
truncation. A repetition penalty changes the logits first; then tokens are banned; then the
temperature applies; then top-k, top-p and min-p truncate, as in transformers.
Legend: M rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from burnish.engine.native.cache import upload
from burnish.engine.native.sequence import ANY, GREEDY, DrawLimits
from burnish.engine.native.sequence import Sequence as Sample
from burnish.randomness import uniforms

BLOCK = 256
"""Number of tokens of the vocabulary in a block, whose weights are summed together."""
ROWS = 1024
"""Number of rows processed at a time, which limits the memory of a large batch on a GPU."""

Weigh = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function that sums the tokens' weights by block: logits [M, V], temperature [M] -> the largest of
logits / temperature [M], and the sums of exp(logits / temperature − largest) over each block of
`BLOCK` tokens [M, blocks]."""


def plain_weigh(logits: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    """Implement `Weigh` with PyTorch's operations: logits [M, V] and temperatures ``heat`` [M] ->
    the largest of each row's logits / heat [M], and the sums of exp(logits / heat − largest) over
    each block of `BLOCK` tokens [M, blocks]."""
    vocab, found = logits.shape[1], []
    for some, hot in zip(torch.split(logits, ROWS), torch.split(heat, ROWS), strict=True):
        weights = some.new_zeros(len(some), -(-vocab // BLOCK) * BLOCK, dtype=heat.dtype)
        inside = weights[:, :vocab].copy_(some).div_(hot[:, None])
        peak = inside.amax(1, keepdim=True)
        inside.sub_(peak).exp_()
        found.append((peak[:, 0], weights.view(len(some), -1, BLOCK).sum(2)))
    peaks, sums = zip(*found, strict=True)
    return torch.cat(peaks), torch.cat(sums)


class Limited(NamedTuple):
    """The rows of a batch that have limits. Rows that are not listed may draw any token."""

    rows: Mapping[DrawLimits, Sequence[int]]
    """Indices of the rows with equal limits, by these limits."""
    seen: Mapping[int, npt.NDArray[np.int64]]
    """For each row with a repetition penalty: ids of the tokens to which the penalty applies."""


def draws(
    samples: Sequence[Sample], steps: int, device: torch.device | str
) -> tuple[Tensor, Tensor, Limited]:
    """Return the arguments with which `sample_tokens` draws the next ``steps`` tokens of samples:
    points, uniform in [0, 1), [samples, steps]; temperatures [samples], 1 for greedy samples; and
    the rows with limits. The limits hold for the first of the tokens only."""
    places, heat, limited = [], [], dict[DrawLimits, list[int]]()
    seen = dict[int, npt.NDArray[np.int64]]()
    for row, sequence in enumerate(samples):
        request, limits = sequence.group.request, sequence.limits
        sample = request.first + sequence.index
        place = request.params.seed, request.stream, request.group, sample
        places.append((*place, request.position + len(sequence.logprobs)))
        heat.append(request.params.temperature or 1.0)
        if limits != ANY:
            limited.setdefault(limits, []).append(row)
            if limits.penalty != 1:
                seen[row] = np.fromiter(set(sequence.tokens), np.int64)
    seed, stream, group, sample, position = np.array(places).T[..., None]
    points = uniforms(seed, stream, group, sample, position + np.arange(steps))
    return (
        upload(points, device),
        upload(np.array(heat, np.float64), device),
        Limited(limited, seen),
    )


@torch.no_grad()
def sample_tokens(
    logits: Tensor, points: Tensor, heat: Tensor, limited: Limited, weigh: Weigh = plain_weigh
) -> tuple[Tensor, Tensor]:
    """Draw a token from each row of logits [M, V], within the row's limits. Return the tokens [M]
    and their log-probabilities [M] at the temperature, before any limit; NaN where the model
    overflowed.

    ``points`` [M] in [0, 1) select the tokens; ``heat`` [M]: temperatures, 1 in greedy rows;
    ``weigh``: the device's implementation. A forced token is returned without drawing. The host
    does not wait for the device if no row has limits or if all rows are greedy without other
    limits.
    """
    heat = heat.to(torch.promote_types(logits.dtype, torch.float32))
    tokens, totals = _draw_any(logits, points, heat, weigh)
    if len(limited.rows.get(GREEDY, ())) == len(logits):
        tokens, limited = logits.argmax(1), Limited({}, {})
    for limits, rows in limited.rows.items():
        some = upload(np.array(rows), logits.device)
        if limits.forced is not None:
            tokens[some] = limits.forced
            continue
        left = logits[some]
        if limits.penalty != 1:
            found = [limited.seen[row] for row in rows]
            left = _penalize(left.to(heat.dtype), found, limits.penalty)
        left = _limit(left, heat[some], limits)
        # The sums of blocks without allowed tokens must be exactly 0.
        how = plain_weigh if limits.truncates else weigh
        own = left, points[some], heat[some], how
        tokens[some] = left.argmax(1) if limits.greedy else _draw_any(*own)[0]
    chosen = logits.gather(1, tokens[:, None])[:, 0].to(heat.dtype) / heat
    return tokens, (chosen.double() - totals).masked_fill(~totals.isfinite(), torch.nan)


def _penalize(logits: Tensor, seen: Sequence[npt.NDArray[np.int64]], penalty: float) -> Tensor:
    """Apply a repetition penalty to logits [M, V] and return the result: each row's logits of its
    ``seen`` tokens are divided by the penalty if they are positive, and multiplied by it if they
    are negative (CTRL, 1909.05858, as in transformers and vLLM)."""
    width = max(map(len, seen))
    # Repeated ids only fill up the rows: each of them gets the same value.
    ids = upload(np.stack([np.resize(own, width) for own in seen]), logits.device)
    found = logits.gather(1, ids)
    return logits.scatter(1, ids, torch.where(found < 0, found * penalty, found / penalty))


def _limit(logits: Tensor, heat: Tensor, limits: DrawLimits) -> Tensor:
    """Return the logits [M, V] with those of excluded tokens set to −∞; the argument may be
    overwritten.

    Four rules exclude tokens. Banned tokens are excluded. Top-k keeps the top_k most likely tokens.
    Of these, top-p keeps the smallest set of most likely tokens that has a share of top_p of their
    probability. Min-p excludes tokens whose probability is below min_p times the largest one.
    """
    logits[:, upload(np.array(sorted(limits.banned), np.int64), logits.device)] = -torch.inf
    if not limits.truncates:
        return logits
    left = logits
    if limits.min_p:
        least = logits.amax(1, keepdim=True) + heat[:, None] * math.log(limits.min_p)
        left = logits.masked_fill(logits < least, -torch.inf)
    if limits.top_p == 1 and limits.top_k is None:
        return left
    weights = torch.softmax(logits.to(heat.dtype) / heat[:, None], 1)
    likeliest, ids = weights.topk(min(limits.top_k or weights.shape[1], weights.shape[1]), 1)
    before = likeliest.double().cumsum(1) - likeliest
    out = before >= limits.top_p * likeliest.double().sum(1, keepdim=True)
    out[:, 0] = False
    kept = left.gather(1, ids).masked_fill(out, -torch.inf)
    return torch.full_like(logits, -torch.inf).scatter_(1, ids, kept)


def _draw_any(logits: Tensor, points: Tensor, heat: Tensor, weigh: Weigh) -> tuple[Tensor, Tensor]:
    """Draw tokens without limits. Return the tokens [M] that the points [M] select, and the
    log-sum-exp of each row's logits / heat [M].

    The cumulative distribution is computed in float64, first over blocks and then inside the
    selected block: a cumulative sum over 64 × 50k numbers would cost more than the model's head.
    The selected token is the first whose cumulative sum exceeds the point, so its probability is
    never 0.
    """
    vocab = logits.shape[1]
    peaks, sums = weigh(logits, heat)
    totals = peaks.double() + sums.sum(1, dtype=torch.float64).log()
    lost = ~totals.isfinite()[:, None]  # the model overflowed: select any token
    block, inside = search(sums.masked_fill(lost, 1), points[:, None])
    at = block * BLOCK + torch.arange(BLOCK, device=logits.device)
    scaled = logits.gather(1, at.clamp(max=vocab - 1)).to(heat.dtype) / heat[:, None]
    weights = (scaled - peaks[:, None]).exp().masked_fill(lost, 1) * (at < vocab)
    token, _ = search(weights, inside)
    return (block * BLOCK + token)[:, 0].clamp_(max=vocab - 1), totals


def search(weights: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Divide [0, 1) into intervals with lengths proportional to the non-negative weights [..., n],
    whose sum may be any positive number. Return the index of the interval that contains ``at``
    [..., 1], and the relative position of ``at`` inside it, in [0, 1]."""
    upto = weights.double().cumsum(-1)
    end = upto[..., -1:]
    target = torch.minimum(at * end, torch.nextafter(end, torch.zeros_like(end)))
    index = torch.searchsorted(upto, target, right=True)
    width = weights.gather(-1, index).double()
    inside = 1 - (upto.gather(-1, index) - target) / width
    return index, inside.clamp(0, 1)
