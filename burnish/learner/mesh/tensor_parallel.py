"""Tensor parallel: each rank has some heads, some columns of the MLP, and a part of the vocabulary.

q, k, v and gate, up are cut by rows of their weights (heads, columns of the MLP), out and down by
columns. So a layer adds its ranks' results up twice: after out and after down. Its gradient is
added up twice, too: before qkv and before gate_up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from burnish.model.transformer import Layer, ModelConfig, Transformer

PARTIAL = ("q_norm", "k_norm")
"""Modules that every rank has, and that see the rank's own heads alone: their gradients add up."""


class Piece(NamedTuple):
    """A box of a tensor."""

    shape: list[int]
    """Of the whole tensor."""
    at: list[int]
    """Where the box begins in the whole tensor."""
    box: Tensor


class Slice(NamedTuple):
    """A rank's part of a weight."""

    dim: int
    size: int
    """Of the whole weight along ``dim``."""
    ranges: list[tuple[int, int]]
    """Starts and ends along ``dim`` of the whole weight; the parts lie one after another."""

    def of(self, whole: Tensor) -> Tensor:
        return torch.cat([whole.narrow(self.dim, a, b - a) for a, b in self.ranges], self.dim)

    def whole(self, part: Tensor, group: Any) -> Tensor:
        """The whole weight of the parts of a group's ranks, which may differ in size."""
        shape = [*part.shape]
        shape[self.dim] = self.size
        zeros, sizes = part.new_zeros(shape), [b - a for a, b in self.ranges]
        for (a, b), rows in zip(self.ranges, torch.split(part, sizes, self.dim), strict=True):
            zeros.narrow(self.dim, a, b - a).copy_(rows)
        dist.all_reduce(zeros, group=group)
        return zeros

    def boxes(self, local: Tensor, start: int, shape: list[int]) -> list[Piece]:
        """Rows from ``start`` on of a rank's part, which has this shape, as boxes of the whole."""
        whole, rest = [*shape], [0] * (len(shape) - 1)
        whole[self.dim] = self.size
        if self.dim:
            return [Piece(whole, [start, self.ranges[0][0]], local)]
        found, before = list[Piece](), 0
        for a, b in self.ranges:
            low, high = max(start, before), min(start + len(local), before + b - a)
            if low < high:
                found.append(
                    Piece(whole, [a + low - before, *rest], local[low - start : high - start])
                )
            before += b - a
        return found


def module_of(name: str) -> str:
    """The module of the parameter ``name``; empty for a critic's own parameters."""
    return name.rpartition(".")[0].rpartition(".")[2]


def slice_of(config: ModelConfig, name: str, ranks: int, rank: int) -> Slice | None:
    """The part of the parameter ``name``, of a transformer or a critic, that a rank has; None if
    every rank has all of it."""
    dim, sizes = {
        "embed": (0, [config.vocab_size]),
        "head": (0, [config.vocab_size]),
        "qkv": (0, [heads * config.head_width for heads in config.heads]),
        "gate_up": (0, [config.d_ff, config.d_ff]),
        "out": (1, [config.n_heads * config.head_width]),
        "down": (1, [config.d_ff]),
    }.get(module_of(name), (0, []))
    ranges, start = [], 0
    for size in sizes:
        ranges.append((start + size * rank // ranks, start + size * (rank + 1) // ranks))
        start += size
    return Slice(dim, start, ranges) if sizes else None


class _Sum(torch.autograd.Function):
    """Σ over the ranks forward, written over x; the gradient as it is backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, None]:
        return up, None


class _Fan(torch.autograd.Function):
    """x as it is forward, Σ of the ranks' gradients backward, written over the gradient: nobody
    else has it, because one product alone reads x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(up, group=ctx.group)
        return up, None


def summed(x: Tensor, group: Any, how: Any = dist.ReduceOp.SUM) -> Tensor:
    """The sum, or another reduction, of a tensor over a group of ranks."""
    out = x.contiguous().clone()
    dist.all_reduce(out, how, group)
    return out


class Part:
    """A part of the vocabulary, whose parts have a rank each."""

    def __init__(self, start: int, group: Any) -> None:
        self.start, self._group = start, group

    def largest(self, x: Tensor) -> Tensor:
        return summed(x, self._group, dist.ReduceOp.MAX)

    def add(self, x: Tensor) -> Tensor:
        return summed(x, self._group)


class Embedding(nn.Module):
    """The rows of a part of the vocabulary; other parts' tokens are 0 before the sum."""

    def __init__(self, weight: nn.Parameter, start: int, group: Any) -> None:
        super().__init__()
        self.weight, self._start, self._group = weight, start, group

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self._start
        is_here = (own >= 0) & (own < len(self.weight))
        rows = F.embedding(own.where(is_here, torch.zeros_like(own)), self.weight)
        out: Tensor = _Sum.apply(rows * is_here[:, None], self._group)  # type: ignore[no-untyped-call]
        return out


def cut(model: Transformer, ranks: int, rank: int, group: Any) -> None:
    """Leaves a rank's part of the weights in a whole model, and makes the ranks add up."""
    config = model.config
    for name, parameter in list(model.named_parameters()):
        part, (module, _, kind) = slice_of(config, name, ranks, rank), name.rpartition(".")
        if part is not None:
            own = nn.Parameter(part.of(parameter.detach()), parameter.requires_grad)
            setattr(model.get_submodule(module), kind, own)
    start = config.vocab_size * rank // ranks
    embedding = Embedding(model.get_parameter("embed.weight"), start, group)
    model.embed = embedding  # type: ignore[assignment]
    model.vocabulary = Part(start, group)

    def fan(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (_Fan.apply(*args, group),)  # type: ignore[no-untyped-call]

    def add(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return _Sum.apply(out, group)  # type: ignore[no-untyped-call,no-any-return]

    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.heads = [heads // ranks for heads in layer.heads]
        for wide in (layer.qkv, layer.gate_up):
            wide.register_forward_pre_hook(fan)
        for narrow in (layer.out, layer.down):
            narrow.register_forward_hook(add)
