"""From logits to tokens: one uniform number per token inverts the cumulative distribution.

The number comes from `draws.py` and does not depend on the batch. Log-probabilities are the model's
at the sampling temperature, before any mask or truncation. Legend: M rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from burnish.types import truncates

BLOCK = 256
"""Tokens whose weights are summed up together."""
ROWS = 1024
"""Rows that are weighed at a time, so that a large batch on a GPU takes little memory."""
FEW_ROWS = 64
"""Rows at a time whose whole vocabulary is looked at."""
CANDIDATES = 1024
"""Tokens that top-p looks at before it sorts the whole vocabulary."""

Weigh = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Logits [M, V], temperature [M] -> the largest of logits / temperature [M], and the sums of
exp(logits / temperature − largest) over each block [M, blocks]."""


class Draw(NamedTuple):
    """How one row's token is drawn."""

    uniform: float
    """In [0, 1)."""
    temperature: float = 1.0
    """0 takes the likeliest token, with its log-probability at temperature 1."""
    top_k: int | None = None
    top_p: float = 1.0
    banned: frozenset[int] = frozenset()
    """Not to be drawn here: end ids before min_tokens."""

    @property
    def truncates(self) -> bool:
        return truncates(self.temperature, self.top_p, self.top_k)

    @property
    def is_plain(self) -> bool:
        """Whether any token may be drawn, by chance."""
        return bool(self.temperature) and not self.banned and not self.truncates


def weigh(logits: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
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


@torch.no_grad()
def sample(logits: Tensor, draws: Sequence[Draw], weigh: Weigh = weigh) -> tuple[Tensor, Tensor]:
    """logits [M, V] -> tokens and log-probabilities [M], NaN where logits are not finite."""
    wide, device = torch.promote_types(logits.dtype, torch.float32), logits.device
    points = torch.tensor([draw.uniform for draw in draws], dtype=torch.float64, device=device)
    heat = torch.tensor([draw.temperature or 1.0 for draw in draws], dtype=wide, device=device)
    tokens, totals = _draw_any(logits, points, heat, weigh)
    limited: dict[Draw, list[int]] = {}
    for row, draw in enumerate(draws):
        if not draw.is_plain:
            limited.setdefault(draw._replace(uniform=0.0), []).append(row)
    for kind, rows in limited.items():
        for some in torch.split(torch.tensor(rows, device=device), FEW_ROWS):
            scaled = logits[some].to(wide) / heat[some, None]
            tokens[some] = _draw_limited(scaled, points[some], kind)
    return tokens, _logprobs(logits, tokens, heat, totals)


@torch.no_grad()
def sample_whole(
    logits: Tensor, points: Tensor, temperature: Tensor | None
) -> tuple[Tensor, Tensor]:
    """logits [M, V], points [M] in [0, 1) -> tokens and log-probabilities [M], nothing left out.

    temperature [M], above 0; None if the likeliest tokens are taken, with log-probabilities at 1.
    As ``sample``, but it never waits for the device.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    heat = torch.ones_like(points, dtype=wide) if temperature is None else temperature.to(wide)
    tokens, totals = _draw_any(logits, points, heat, weigh)
    if temperature is None:
        tokens = logits.argmax(1)
    return tokens, _logprobs(logits, tokens, heat, totals)


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


def _draw_limited(scaled: Tensor, points: Tensor, kind: Draw) -> Tensor:
    """Logits [M, V] divided by the temperature, points [M] -> tokens [M]; some are left out."""
    scaled[:, list(kind.banned)] = -torch.inf
    if not kind.temperature:
        return scaled.argmax(1)
    weights = torch.softmax(scaled, 1).nan_to_num_(nan=1.0)
    if kind.truncates:
        weights = _truncate(weights, kind)
    return search(weights, points[:, None])[0][:, 0]


def _truncate(weights: Tensor, kind: Draw) -> Tensor:
    """[M, V] -> the same with 0 outside the smallest set of likeliest tokens whose share of the
    top_k reaches top_p."""
    count = min(kind.top_k or CANDIDATES, weights.shape[1])
    likeliest, ids = weights.topk(count, 1)
    whole = (likeliest if kind.top_k else weights).sum(1, keepdim=True)
    if bool((likeliest.sum(1, keepdim=True) < kind.top_p * whole).any()):
        likeliest, ids = weights.sort(1, descending=True)
    before = likeliest.double().cumsum(1) - likeliest
    keep = before < kind.top_p * whole.double()
    keep[:, 0] = True
    return torch.zeros_like(weights).scatter_(1, ids, likeliest * keep)


def _logprobs(logits: Tensor, tokens: Tensor, heat: Tensor, totals: Tensor) -> Tensor:
    chosen = logits.gather(1, tokens[:, None])[:, 0].to(heat.dtype) / heat
    return (chosen.double() - totals).masked_fill(~totals.isfinite(), torch.nan)


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
