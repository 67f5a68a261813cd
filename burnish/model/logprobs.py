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

Measure = Callable[[Tensor, Tensor, Tensor | float], Tensor]


def logprobs_of(logits: Tensor, tokens: Tensor, temperature: Tensor | float) -> Tensor:
    """log softmax(logits / temperature) at the tokens, in float32 or better.

    logits [M, V], tokens [M], temperature [M] or a number -> [M]
    """
    scaled = _scaled(logits, temperature)
    return _chosen(scaled, tokens) - scaled.logsumexp(1)


def logprobs_and_entropy_of(logits: Tensor, tokens: Tensor, temperature: Tensor | float) -> Tensor:
    """As `logprobs_of`, beside the entropy of the distribution: -> [M, 2]"""
    scaled = _scaled(logits, temperature)
    total = scaled.logsumexp(1)
    mean = ((scaled - total[:, None]).exp() * scaled).sum(1)
    return torch.stack((_chosen(scaled, tokens) - total, total - mean), dim=1)


def _scaled(logits: Tensor, temperature: Tensor | float) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if isinstance(temperature, Tensor):
        temperature = temperature.to(logits.dtype)[:, None]
    return logits / temperature


def _chosen(scaled: Tensor, tokens: Tensor) -> Tensor:
    # By index, not by gather, whose backward has no deterministic form on a GPU.
    return scaled[torch.arange(len(tokens), device=tokens.device), tokens]


def token_logprobs(
    model: Transformer,
    hidden: Tensor,
    tokens: Tensor,
    predecessor: Tensor,
    slots: Tensor,
    temperature: Tensor | float,
    *,
    measure: Measure = logprobs_of,
    chunk: int = CHUNK,
) -> Tensor:
    """log π(token | what came before it) for the tokens in `slots`.

    hidden [N, d], tokens [N], predecessor [N], slots [M] int64, temperature [N] or a number
    -> [M], or [M, 2] with `measure=logprobs_and_entropy_of`. At most `chunk` rows of logits exist
    at a time; the backward pass makes them again.
    """

    def one(rows: Tensor) -> Tensor:
        heat = temperature[rows] if isinstance(temperature, Tensor) else temperature
        return measure(model.logits(hidden[predecessor[rows]]), tokens[rows], heat)

    run: Callable[[Tensor], Tensor] = one
    if torch.is_grad_enabled():
        run = partial(checkpoint, one, use_reentrant=False, preserve_rng_state=False)
    starts = range(0, max(len(slots), 1), chunk)
    return torch.cat([run(slots[i : i + chunk]) for i in starts])
