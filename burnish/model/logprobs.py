"""Log-probabilities and values of chosen tokens: the one place that gathers by `predecessor`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from burnish.model.products import product
from burnish.types import Measured

if TYPE_CHECKING:
    from burnish.model.transformer import Transformer

CHUNK = 1024
"""Rows of logits that exist at a time: 1024 × 50k in bfloat16 are 100 MB."""
TILE = 2**18
"""Logits that a CPU takes through the softmax at a time, so that they stay in its cache."""


def token_logprobs(
    model: Transformer,
    hidden: Tensor,
    tokens: Tensor,
    predecessor: Tensor,
    slots: Tensor,
    temperature: Tensor,
) -> Measured:
    """log π(token | its context) for the tokens in `slots`, and the entropy of π(· | context).

    hidden [N, d], tokens [N], predecessor [N], slots [M] int64, temperature [N] -> [M] each, in
    float32 or better. At most `CHUNK` rows of logits exist at a time; the backward pass makes them
    again, but for the last, which are kept. Entropy that is detached costs it nothing.
    """
    rows, weight = model.head_inputs(hidden.index_select(0, predecessor[slots]))
    heat = temperature[slots].to(torch.promote_types(rows.dtype, torch.float32))
    found = _Head.apply(rows, weight, tokens[slots], heat)  # type: ignore[no-untyped-call]
    return Measured(*found)


def token_values(
    weight: Tensor, bias: Tensor, hidden: Tensor, predecessor: Tensor, slots: Tensor
) -> Tensor:
    """V(the context of a token) = w · h + b for the tokens in `slots`.

    weight [d], bias [1], hidden [N, d], predecessor [N], slots [M] int64 -> [M], in float32 or
    better.
    """
    rows = hidden.index_select(0, predecessor[slots])
    wide = torch.promote_types(rows.dtype, torch.float32)
    return rows.to(wide) @ weight.to(wide) + bias.to(wide)


class _Head(torch.autograd.Function):
    """With x = logits / τ, p = softmax(x), H its entropy and y the token:

        log p_y = x_y − log Σ exp x         ∂/∂x_j = [j = y] − p_j
        H = −Σ p_j log p_j                  ∂/∂x_j = −p_j (log p_j + H)

    By hand rather than by autograd: a row passes through memory a few times, not twenty, and the
    weight's gradient adds up over chunks in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, tokens: Tensor, heat: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropy, total = heat.new_empty(3, len(tokens))
        logits: Tensor | None = None
        for rows in _pieces(len(tokens), CHUNK):
            logits = None  # so that these are gone before the next are made
            logits = product(hidden[rows], weight.T)
            for part, tile in _tiles(logits, rows):
                x = _scaled(part, heat[tile])
                highest = x.amax(1)
                x.sub_(highest[:, None])
                p = x.exp()
                mass = p.sum(1)
                at = torch.arange(len(x), device=x.device), tokens[tile]
                logprobs[tile] = x[at] - mass.log()
                entropy[tile] = mass.log() - p.mul_(x).sum(1) / mass
                total[tile] = highest + mass.log()
        ctx.save_for_backward(hidden, weight, tokens, heat, total, entropy)
        ctx.last_logits = logits
        ctx.set_materialize_grads(False)
        return logprobs, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, up: Tensor | None, up_entropy: Tensor | None) -> tuple[Any, ...]:
        hidden, weight, tokens, heat, total, entropy = ctx.saved_tensors
        logits, ctx.last_logits = ctx.last_logits, None  # written over below, so for one pass alone
        up = (torch.zeros_like(total) if up is None else up) / heat
        up_entropy = None if up_entropy is None else up_entropy / heat
        to_hidden = torch.empty_like(hidden)
        to_weight: Tensor | None = None
        for rows in reversed(list(_pieces(len(tokens), CHUNK))):
            logits = product(hidden[rows], weight.T) if logits is None else logits
            for part, tile in _tiles(logits, rows):
                x = _scaled(part, heat[tile]).sub_(total[tile, None])  # log p
                at = torch.arange(len(x), device=x.device), tokens[tile]
                scale = -up[tile, None]
                if up_entropy is not None:
                    scale = scale - (x + entropy[tile, None]).mul_(up_entropy[tile, None])
                gradient = x.exp_().mul_(scale)
                gradient[at] += up[tile]
                part.copy_(gradient)
            to_hidden[rows] = product(logits, weight)
            if ctx.needs_input_grad[1]:
                more = product(logits.T, hidden[rows])
                to_weight = more.to(heat.dtype) if to_weight is None else to_weight.add_(more)
            logits = None
        given = None if to_weight is None else to_weight.to(weight.dtype)
        return to_hidden, given, None, None


def _pieces(count: int, size: int) -> Iterator[slice]:
    return (slice(i, min(i + size, count)) for i in range(0, count, size))


def _tiles(logits: Tensor, rows: slice) -> Iterator[tuple[Tensor, slice]]:
    """Parts of a chunk's logits, as views, and their rows among all logits."""
    size = max(1, TILE // logits.shape[1]) if logits.device.type == "cpu" else len(logits)
    for piece in _pieces(len(logits), size):
        yield logits[piece], slice(rows.start + piece.start, rows.start + piece.stop)


def _scaled(logits: Tensor, heat: Tensor) -> Tensor:
    """A copy in the precision of the temperatures, which is float32 or better."""
    wide = logits.to(heat.dtype, copy=True)
    return wide if bool((heat == 1).all()) else wide.div_(heat[:, None])
