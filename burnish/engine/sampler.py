"""From logits to tokens: one uniform number per token inverts the cumulative distribution.

The number comes from `draws.py` and does not depend on the batch. Log-probabilities are the model's
at the sampling temperature, before any mask or truncation. Legend: M rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from burnish.types import truncates

BLOCK = 256
ROWS = {"cpu": 16, "cuda": 1024}
"""Rows at a time: on a CPU, more fit neither its cache nor memory that is mapped in already."""
CANDIDATES = 1024
"""Tokens that top-p looks at before it sorts the whole vocabulary."""


class Draw(NamedTuple):
    """How one row's token is drawn."""

    uniform: float
    """In [0, 1)."""
    temperature: float = 1.0
    """0 takes the likeliest token, with its log-probability at temperature 1."""
    top_k: int | None = None
    top_p: float = 1.0
    banned: tuple[int, ...] = ()
    """Not to be drawn here: end ids before min_tokens."""


@torch.no_grad()
def sample_whole(
    logits: Tensor, points: Tensor, temperature: Tensor | None
) -> tuple[Tensor, Tensor]:
    """logits [M, V], points [M] in [0, 1) -> tokens and log-probabilities [M], nothing left out.

    temperature [M], above 0; None: the likeliest tokens, with their log-probabilities at 1. As in
    ``sample``, but it never waits for the device.
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    most, vocab = ROWS[logits.device.type], logits.shape[1]
    weights = logits.new_empty(min(most, len(logits)), -(-vocab // BLOCK) * BLOCK, dtype=wide)
    found = []
    for first in range(0, len(logits), most):
        some, at = logits[first : first + most], points[first : first + most]
        heat = None if temperature is None else temperature[first : first + most, None].to(wide)
        mass = weights[: len(some)]
        sums, total = _weigh(some, heat, mass)
        lost = ~total.isfinite()[:, None]
        if temperature is None:
            tokens = some.argmax(1, keepdim=True)
        else:
            block, inside = search(sums.masked_fill(lost, 1), at[:, None])
            tokens, _ = search(_block(mass, sums, block).masked_fill(lost, 1), inside)
            tokens = (block * BLOCK + tokens).clamp_(max=vocab - 1)
        chosen = some.gather(1, tokens).to(wide)
        chosen = chosen if heat is None else chosen / heat
        logprobs = chosen.double() - total[:, None]
        found.append(torch.cat((tokens.double(), logprobs.masked_fill(lost, torch.nan)), 1))
    tokens, logprobs = torch.cat(found).unbind(1)
    return tokens.long(), logprobs


@torch.no_grad()
def sample(logits: Tensor, draws: Sequence[Draw]) -> tuple[list[int], list[float]]:
    """logits [M, V] -> M tokens and their log-probabilities, NaN where logits are not finite."""
    tokens: list[int] = []
    logprobs: list[float] = []
    # One buffer for all rows: memory that is mapped in afresh costs more than the arithmetic.
    wide = torch.promote_types(logits.dtype, torch.float32)
    blocks = -(-logits.shape[1] // BLOCK)
    most = ROWS[logits.device.type]
    weights = logits.new_empty(min(most, len(draws)), blocks * BLOCK, dtype=wide)
    for first in range(0, len(draws), most):
        some = draws[first : first + most]
        more = _sample(logits[first : first + most], some, weights[: len(some)])
        tokens += more[0]
        logprobs += more[1]
    return tokens, logprobs


def _sample(
    logits: Tensor, draws: Sequence[Draw], weights: Tensor
) -> tuple[list[int], list[float]]:
    rows, vocab = logits.shape
    heat = torch.tensor([draw.temperature or 1.0 for draw in draws], dtype=weights.dtype)
    heat = heat.to(logits.device)[:, None]

    def scaled(which: Sequence[int]) -> Tensor:
        at = torch.tensor(which, device=logits.device)
        return logits[at].to(heat.dtype) / heat[at]

    heated = any(draw.temperature not in (0, 1) for draw in draws)
    sums, total = _weigh(logits, heat if heated else None, weights)
    lost = ~total.isfinite()
    if bool(lost.any()):  # the model overflowed: some token, and NaN to tell
        weights[lost], total[lost] = 1, torch.nan
        sums = weights.view(rows, -1, BLOCK).sum(2)
    if any(draw.banned for draw in draws):
        pairs = [(row, token) for row, draw in enumerate(draws) for token in draw.banned]
        weights[tuple(torch.tensor(pairs, device=logits.device).T)] = 0
        sums = weights.view(rows, -1, BLOCK).sum(2)
    # Also where a ban left nothing: next to a banned token, the rest may vanish in float32.
    gone = set((sums.sum(1) == 0).nonzero()[:, 0].tolist())
    for row, draw in enumerate(draws):
        if row in gone or truncating(draw):
            weights[row, :vocab] = _kept(scaled([row])[0], draw)
            sums[row] = weights[row].view(-1, BLOCK).sum(1)
    tokens = _invert(weights, sums, np.array([draw.uniform for draw in draws]))
    greedy = [row for row, draw in enumerate(draws) if draw.temperature == 0]
    if greedy:
        likely = scaled(greedy)
        for row, which in enumerate(greedy):
            _ban(likely[row], draws[which])
        tokens[greedy] = likely.argmax(1)
    tokens.clamp_(max=vocab - 1)
    chosen = logits.gather(1, tokens[:, None]).to(heat.dtype) / heat
    return tokens.tolist(), (chosen[:, 0].double() - total).tolist()


def _weigh(logits: Tensor, heat: Tensor | None, weights: Tensor) -> tuple[Tensor, Tensor]:
    """logits [M, V], heat [M, 1] -> weights [M, blocks · BLOCK] not normalised; their sums by block
    [M, blocks], and the logarithm of their sum [M]."""
    rows, vocab = logits.shape
    weights[:, vocab:] = 0
    inside = weights[:, :vocab].copy_(logits)
    if heat is not None:
        inside /= heat
    peak = inside.amax(1, keepdim=True)
    inside.sub_(peak).exp_()
    sums = weights.view(rows, -1, BLOCK).sum(2)
    return sums, peak[:, 0].double() + sums.sum(1, dtype=torch.float64).log()


def truncating(draw: Draw) -> bool:
    return truncates(draw.temperature, draw.top_p, draw.top_k)


def _invert(weights: Tensor, sums: Tensor, points: npt.NDArray[np.float64]) -> Tensor:
    """weights [M, blocks · BLOCK] not normalised, sums [M, blocks], points [M] in [0, 1) -> [M].

    The cumulative distribution is only summed up, in float64, over blocks and inside the block that
    is hit: summing 64 × 50k numbers one after another would cost more than the model's head. A
    token is hit when the sum up to it is the first above the point, so never at probability 0.
    """
    at = torch.from_numpy(points).to(weights.device)[:, None]
    block, inside = search(sums, at)
    token, _ = search(_block(weights, sums, block), inside)
    return (block * BLOCK + token)[:, 0]


def _block(weights: Tensor, sums: Tensor, block: Tensor) -> Tensor:
    """The weights [M, BLOCK] of one block [M, 1] of each row."""
    blocks = weights.view(*sums.shape, BLOCK)
    return blocks.gather(1, block[..., None].expand(-1, -1, BLOCK))[:, 0]


def search(weights: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """-> the index that `at` [M, 1], a share of the weights [M, n], falls into, and where in it."""
    upto = weights.double().cumsum(1)
    end = upto[:, -1:]
    target = torch.minimum(at * end, torch.nextafter(end, torch.zeros_like(end)))
    index = torch.searchsorted(upto, target, right=True)
    width = weights.gather(1, index).double()
    inside = 1 - (upto.gather(1, index) - target) / width
    return index, inside.clamp(0, 1)


def _ban(scaled: Tensor, draw: Draw) -> Tensor:
    """[V] -> the same with banned tokens at −∞."""
    if draw.banned:
        scaled[list(draw.banned)] = -torch.inf
    return scaled


def _kept(scaled: Tensor, draw: Draw) -> Tensor:
    """Weights [V] of what may be drawn: first top-k, then top-p of what top-k left."""
    weights = torch.softmax(_ban(scaled, draw), 0)
    return _truncate(weights, draw) if truncating(draw) else weights


def _truncate(weights: Tensor, draw: Draw) -> Tensor:
    """[V] -> [V]: the smallest set of likeliest tokens whose share reaches top_p, 0 elsewhere."""
    vocab = weights.numel()
    count = min(draw.top_k or CANDIDATES, vocab)
    likeliest, ids = weights.topk(count)
    if draw.top_k is None and likeliest.sum() < draw.top_p * weights.sum() and count < vocab:
        likeliest, ids = weights.sort(descending=True)
    whole = likeliest.sum() if draw.top_k is not None else weights.sum()
    before = likeliest.double().cumsum(0) - likeliest
    keep = before < draw.top_p * whole.double()
    keep[0] = True
    return torch.zeros_like(weights).scatter_(0, ids[keep], likeliest[keep])
