"""Log-probabilities and values of given tokens, from the model's hidden states.

A token's `predecessor` is the slot whose hidden state predicts it. It is the slot before the
token's own, except for the first token of a response, which the prompt's last slot predicts, and
the first token of a prompt, which has its own slot as predecessor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from burnish.model.gather import gather_rows
from burnish.model.matmul import fuses, product
from burnish.types import Measured

CHUNK = 1024
"""Rows of logits that a CPU holds at a time: 1024 × 50k in bfloat16 are 100 MB."""
GPU_CHUNK = 4096
"""Rows of logits that other devices hold at a time. Each chunk adds once to the weight's gradient,
which moves ten bytes per weight."""
TILE = 2**18
"""Logits that a CPU processes at a time in the softmax, few enough for its cache."""


class Vocabulary(Protocol):
    """This process's shard of the vocabulary. It has the shard's rows of the head and exchanges
    numbers with the processes of the other shards."""

    start: int
    """Id of the first token of the shard."""

    def largest(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum of the tensors x of all shards."""

    def add(self, x: Tensor) -> Tensor:
        """Return the elementwise sum of the tensors x of all shards."""


class TokenHead(Protocol):
    """A model that turns hidden states into logits."""

    vocabulary: Vocabulary | None
    """This process's shard of the vocabulary; None if the process has the whole vocabulary."""

    def head_inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden [M, d] and the head's weight [V, d], converted to the precision of the
        logits."""


def token_logprobs(
    model: TokenHead,
    hidden: Tensor,
    tokens: Tensor,
    predecessor: Tensor,
    slots: Tensor,
    temperature: Tensor,
) -> Measured:
    """Compute log π(token | its context) for the tokens in ``slots``, and the entropy of π(· |
    context), at the temperatures of these tokens.

    hidden [N, d], tokens [N], predecessor [N], slots [M] int64, temperature [N] -> [M] each, in at
    least float32. Only `CHUNK` or `GPU_CHUNK` rows of logits are held at a time. The backward pass
    computes them again, except for the last chunk, which is kept. If the entropy is detached, it
    adds nothing to the cost of the backward pass.
    """
    rows, weight = model.head_inputs(gather_rows(hidden, predecessor[slots]))
    heat = temperature[slots].to(torch.promote_types(rows.dtype, torch.float32))
    streams = rows, weight, tokens[slots], heat
    found = _Head.apply(*streams, model.vocabulary)  # type: ignore[no-untyped-call]
    return Measured(*found)


def token_values(
    weight: Tensor, bias: Tensor, hidden: Tensor, predecessor: Tensor, slots: Tensor
) -> Tensor:
    """Compute the value V(context of the token) = w · h + b for the tokens in ``slots``, where h is
    the hidden state of the token's predecessor.

    weight [d], bias [1], hidden [N, d], predecessor [N], slots [M] int64 -> [M], in at least
    float32.
    """
    rows = hidden.index_select(0, predecessor[slots])
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.to(wide) @ weight.to(wide) + bias.to(wide)


class _Head(torch.autograd.Function):
    """Log-probability and entropy from hidden states and the head's weight, and their gradient.

    With x = logits / τ, p = softmax(x), H its entropy and y the token:

        log p_y = x_y − log Σ exp x         ∂/∂x_j = [j = y] − p_j
        H = −Σ p_j log p_j                  ∂/∂x_j = −p_j (log p_j + H)

    The gradient is hand-written: a row passes through memory a few times instead of twenty, and the
    weight's gradient is accumulated over chunks in float32. If the vocabulary is sharded, x holds
    the logits of this shard, and the processes exchange a few numbers per row: largest logits and
    sums.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        tokens: Tensor,
        heat: Tensor,
        vocabulary: Vocabulary | None,
    ) -> tuple[Tensor, Tensor]:
        tokens, is_here = _here(tokens, len(weight), vocabulary)
        highest, mass, weighted, chosen = heat.new_empty(4, len(tokens))
        ctx.is_scaled = bool((heat != 1).any())  # computed once, because it synchronises a GPU
        logits: Tensor | None = None
        for rows in _pieces(len(tokens), _chunk(hidden)):
            logits = None  # frees the memory before the next chunk is computed
            logits = product(hidden[rows], weight.T)
            found = highest[rows], mass[rows], weighted[rows], chosen[rows]
            _moments(logits, heat[rows], tokens[rows], found, is_scaled=ctx.is_scaled)
        if vocabulary is not None:
            below = highest - (highest := vocabulary.largest(highest))
            share = below.exp()
            chosen = (chosen + below) * is_here
            parts = share * mass, share * (weighted + below * mass), chosen
            mass, weighted, chosen = vocabulary.add(torch.stack(parts)).unbind()
        logprobs, total = chosen - mass.log(), highest + mass.log()
        entropy = mass.log() - weighted / mass
        ctx.save_for_backward(hidden, weight, tokens, is_here, heat, total, entropy)
        ctx.last_logits, ctx.vocabulary = logits, vocabulary
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor | None, up_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, tokens, is_here, heat, total, entropy = ctx.saved_tensors
        logits, ctx.last_logits = ctx.last_logits, None  # overwritten below, so usable only once
        up = (torch.zeros_like(total) if up is None else up) / heat
        up_entropy = None if up_entropy is None else up_entropy / heat
        to_hidden = torch.empty_like(hidden)
        # Without rows the gradient is 0 instead of None, because every rank needs a gradient.
        to_weight = None if len(tokens) else torch.zeros_like(weight, dtype=heat.dtype)
        own = up * is_here
        for rows in reversed(list(_pieces(len(tokens), _chunk(hidden)))):
            logits = product(hidden[rows], weight.T) if logits is None else logits
            _to_logits(
                logits,
                heat[rows],
                tokens[rows],
                total[rows],
                up[rows],
                own[rows],
                entropy[rows],
                None if up_entropy is None else up_entropy[rows],
                is_scaled=ctx.is_scaled,
            )
            to_hidden[rows] = product(logits, weight)
            if ctx.needs_input_grad[1]:
                more = product(logits.T, hidden[rows])
                to_weight = more.to(heat.dtype) if to_weight is None else to_weight.add_(more)
                del more  # frees the memory before the next chunk is computed
            logits = None
        given = None if to_weight is None else to_weight.to(weight.dtype)
        if ctx.vocabulary is not None:
            to_hidden = ctx.vocabulary.add(to_hidden)
        return to_hidden, given, None, None, None


def _moments(
    logits: Tensor,
    heat: Tensor,
    tokens: Tensor,
    found: tuple[Tensor, ...],
    *,
    is_scaled: bool,
) -> None:
    """Write four numbers of each row x = logits / heat to ``found``: its maximum, Σ exp(x − max),
    Σ (x − max) exp(x − max), and x − max of the row's token."""
    if fuses(logits):
        from burnish.model import softmax_kernels

        softmax_kernels.moments(logits, heat, tokens, found)
        return
    highest, mass, weighted, chosen = found
    for tile in _tiles(logits):
        x = _wide(logits[tile], heat[tile], is_scaled)
        highest[tile] = x.amax(1)
        x.sub_(highest[tile, None])
        p = x.exp()
        mass[tile] = p.sum(1)
        at = torch.arange(len(x), device=x.device), tokens[tile]
        chosen[tile] = x[at]
        weighted[tile] = p.mul_(x).sum(1)


def _to_logits(
    logits: Tensor,
    heat: Tensor,
    tokens: Tensor,
    total: Tensor,
    up: Tensor,
    own: Tensor,
    entropy: Tensor,
    up_entropy: Tensor | None,
    *,
    is_scaled: bool,
) -> None:
    """Overwrite logits [M, V] by their gradient. All other tensors are [M]; ``total`` is the
    logsumexp of logits / heat."""
    if fuses(logits):
        from burnish.model import softmax_kernels

        softmax_kernels.gradient(logits, heat, tokens, total, up, own, entropy, up_entropy)
        return
    for tile in _tiles(logits):
        x = _wide(logits[tile], heat[tile], is_scaled).sub_(total[tile, None])  # log p
        at = torch.arange(len(x), device=x.device), tokens[tile]
        scale = -up[tile, None]
        if up_entropy is not None:
            scale = scale - (x + entropy[tile, None]).mul_(up_entropy[tile, None])
        to_x = x.exp_().mul_(scale)
        to_x[at] += own[tile]
        logits[tile] = to_x


def _chunk(hidden: Tensor) -> int:
    return CHUNK if hidden.device.type == "cpu" else GPU_CHUNK


def _here(tokens: Tensor, size: int, vocabulary: Vocabulary | None) -> tuple[Tensor, Tensor]:
    """Return each token's row in this shard of the head (0 if another shard has the token), and
    whether this shard has the token; both [M]."""
    own = tokens if vocabulary is None else tokens - vocabulary.start
    is_here = (own >= 0) & (own < size)
    return own.where(is_here, torch.zeros_like(own)), is_here


def _pieces(count: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, count)) for i in range(0, count, size))


def _tiles(logits: Tensor) -> Iterator[slice]:
    """Yield the rows of logits in parts that are processed at a time."""
    size = max(1, TILE // logits.shape[1]) if logits.device.type == "cpu" else CHUNK
    return _pieces(len(logits), size)


def _wide(logits: Tensor, heat: Tensor, is_scaled: bool) -> Tensor:
    """Return a copy of the logits in the precision of the temperatures (at least float32), divided
    by the temperatures."""
    wide = logits.to(heat.dtype, copy=True)
    return wide.div_(heat[:, None]) if is_scaled else wide
