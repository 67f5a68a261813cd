"""Log-probabilities of chosen tokens: the one place that gathers by `predecessor`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from burnish.model.transformer import Transformer

CHUNK = 512
"""Rows of logits that exist at a time: 512 × 50k in float32 are 100 MB."""


def logprobs_of(logits: Tensor, tokens: Tensor, temperature: Tensor | float) -> Tensor:
    """log softmax(logits / temperature) at the tokens, in float32 or better.

    logits [M, V], tokens [M], temperature [M] or a number -> [M]
    """
    scaled = _scaled(logits, temperature)
    return scaled.gather(1, tokens[:, None])[:, 0] - scaled.logsumexp(1)


def _logprobs_and_entropy(logits: Tensor, tokens: Tensor, temperature: Tensor | float) -> Tensor:
    """-> [M, 2]"""
    scaled = _scaled(logits, temperature)
    total = scaled.logsumexp(1)
    chosen = scaled.gather(1, tokens[:, None])[:, 0]
    mean = ((scaled - total[:, None]).exp() * scaled).sum(1)
    return torch.stack((chosen - total, total - mean), dim=1)


def _scaled(logits: Tensor, temperature: Tensor | float) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if isinstance(temperature, Tensor):
        temperature = temperature.to(logits.dtype)[:, None]
    return logits / temperature


def token_logprobs(
    model: Transformer,
    hidden: Tensor,
    tokens: Tensor,
    predecessor: Tensor,
    slots: Tensor,
    temperature: Tensor | float,
    *,
    chunk: int = CHUNK,
) -> Tensor:
    """log π(token | what came before it) for the tokens in `slots`.

    hidden [N, d], tokens [N], predecessor [N], slots [M] int64, temperature [N] or a number
    -> [M]. At most `chunk` rows of logits exist at a time; the backward pass makes them again.
    """
    return _sweep(logprobs_of, model, hidden, tokens, predecessor, slots, temperature, chunk)


def token_logprobs_and_entropy(
    model: Transformer,
    hidden: Tensor,
    tokens: Tensor,
    predecessor: Tensor,
    slots: Tensor,
    temperature: Tensor | float,
    *,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """As `token_logprobs`, with the entropy [M] of the distributions the tokens came from."""
    measure = _logprobs_and_entropy
    both = _sweep(measure, model, hidden, tokens, predecessor, slots, temperature, chunk)
    return both[:, 0], both[:, 1]


def _sweep(
    measure: Callable[[Tensor, Tensor, Tensor | float], Tensor],
    model: Transformer,
    hidden: Tensor,
    tokens: Tensor,
    predecessor: Tensor,
    slots: Tensor,
    temperature: Tensor | float,
    chunk: int,
) -> Tensor:
    def one(rows: Tensor) -> Tensor:
        heat = temperature[rows] if isinstance(temperature, Tensor) else temperature
        return measure(model.logits(hidden[predecessor[rows]]), tokens[rows], heat)

    starts = range(0, max(len(slots), 1), chunk)
    if not torch.is_grad_enabled():
        return torch.cat([one(slots[i : i + chunk]) for i in starts])
    again = partial(checkpoint, one, use_reentrant=False, preserve_rng_state=False)
    return torch.cat([again(slots[i : i + chunk]) for i in starts])
