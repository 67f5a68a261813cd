"""Tensor parallelism: each rank has some heads, some hidden units of the MLP, and a part of the
vocabulary.

The weights of q, k, v and gate, up are split by rows (heads, hidden units of the MLP), the weights
of out and down by columns. In the forward pass a layer needs two all-reduces: after out and after
down. The backward pass needs two as well: before qkv and before gate_up.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from burnish.model.transformer import Layer, ModelConfig, Transformer

PARTIAL = ("q_norm", "k_norm")
"""Modules whose weights every rank has, but applies only to its own heads, so that its gradient is
partial: their gradients are summed over the tensor-parallel ranks."""


class TensorShard(NamedTuple):
    """A rectangular part of a tensor: its values and its place in the complete tensor."""

    shape: list[int]
    """Shape of the complete tensor."""
    offset: list[int]
    """Index of the shard's first element in the complete tensor."""
    values: Tensor


class Slice(NamedTuple):
    """Describes which rows or columns of a weight a rank holds."""

    dim: int
    """Dimension that is split: 0 for rows, 1 for columns."""
    size: int
    """Size of the complete weight along ``dim``."""
    ranges: list[tuple[int, int]]
    """Starts and ends along ``dim`` of the complete weight. The rank's part is the concatenation of
    these ranges."""

    def of(self, whole: Tensor) -> Tensor:
        """Return the rank's part of the complete weight, as a copy."""
        return torch.cat([whole.narrow(self.dim, a, b - a) for a, b in self.ranges], self.dim)

    def whole(self, part: Tensor, group: Any) -> Tensor:
        """Gather the parts of all ranks of a group, which may differ in size; return the complete
        weight. ``part`` is this rank's part."""
        shape = [*part.shape]
        shape[self.dim] = self.size
        zeros, sizes = part.new_zeros(shape), [b - a for a, b in self.ranges]
        for (a, b), rows in zip(self.ranges, torch.split(part, sizes, self.dim), strict=True):
            zeros.narrow(self.dim, a, b - a).copy_(rows)
        dist.all_reduce(zeros, group=group)
        return zeros

    def shards(self, local: Tensor, start: int, shape: list[int]) -> list[TensorShard]:
        """Return ``local`` as shards with their offsets in the complete weight. ``local`` holds
        consecutive rows of the rank's part, from row ``start`` on; ``shape`` is the shape of the
        rank's part."""
        whole, rest = [*shape], [0] * (len(shape) - 1)
        whole[self.dim] = self.size
        if self.dim:
            return [TensorShard(whole, [start, self.ranges[0][0]], local)]
        found, before = list[TensorShard](), 0
        for a, b in self.ranges:
            low, high = max(start, before), min(start + len(local), before + b - a)
            if low < high:
                rows = local[low - start : high - start]
                found.append(TensorShard(whole, [a + low - before, *rest], rows))
            before += b - a
        return found


def module_of(name: str) -> str:
    """Return the last component of the name of a parameter's module: "qkv" for
    "layers.0.qkv.weight". Empty for the parameters of a critic's head."""
    return name.rpartition(".")[0].rpartition(".")[2]


def slice_of(config: ModelConfig, name: str, ranks: int, rank: int) -> Slice | None:
    """Return the part of a transformer's or critic's parameter ``name`` that rank ``rank`` of
    ``ranks`` tensor-parallel ranks holds; None if every rank holds the complete parameter."""
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
    """Forward: all-reduce of x, in place. Backward: identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        dist.all_reduce(x, group=group)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, None]:
        return up, None


class _Copy(torch.autograd.Function):
    """Forward: identity. Backward: all-reduce of the gradient, in place. Only one matrix product
    reads x, so no other code holds this gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, up: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(up, group=ctx.group)
        return up, None


def summed(x: Tensor, group: Any, how: Any = dist.ReduceOp.SUM) -> Tensor:
    """Return the elementwise sum of the tensors x of a group of ranks, as a new tensor. ``how`` is
    another reduction of torch.distributed, such as MAX."""
    out = x.contiguous().clone()
    dist.all_reduce(out, how, group)
    return out


class VocabularyShard:
    """Implements `burnish.model.logprobs.Vocabulary` for this rank's part of the vocabulary: the
    first token of the part, and maximum and sum over the ranks."""

    def __init__(self, start: int, group: Any) -> None:
        self.start, self._group = start, group

    def largest(self, x: Tensor) -> Tensor:
        return summed(x, self._group, dist.ReduceOp.MAX)

    def add(self, x: Tensor) -> Tensor:
        return summed(x, self._group)


class EmbeddingShard(nn.Module):
    """Embeds tokens although this rank has the embeddings of only a part of the vocabulary: tokens
    of other parts are embedded as 0, and an all-reduce over the ranks adds their embeddings."""

    def __init__(self, weight: nn.Parameter, start: int, group: Any) -> None:
        super().__init__()
        self.weight, self._start, self._group = weight, start, group

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self._start
        is_here = (own >= 0) & (own < len(self.weight))
        rows = F.embedding(own.where(is_here, torch.zeros_like(own)), self.weight)
        out: Tensor = _Sum.apply(rows * is_here[:, None], self._group)  # type: ignore[no-untyped-call]
        return out


def parallelize(model: Transformer, ranks: int, rank: int, group: Any) -> None:
    """Make a complete model tensor parallel in place: replace its weights by this rank's parts, and
    add the all-reduces of the forward and backward pass."""
    config = model.config
    for name, parameter in list(model.named_parameters()):
        part, (module, _, kind) = slice_of(config, name, ranks, rank), name.rpartition(".")
        if part is not None:
            own = nn.Parameter(part.of(parameter.detach()), parameter.requires_grad)
            setattr(model.get_submodule(module), kind, own)
    start = config.vocab_size * rank // ranks
    embedding = EmbeddingShard(model.get_parameter("embed.weight"), start, group)
    model.embed = embedding  # type: ignore[assignment]
    model.vocabulary = VocabularyShard(start, group)

    def copy(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (_Copy.apply(*args, group),)  # type: ignore[no-untyped-call]

    def reduce(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        return _Sum.apply(out, group)  # type: ignore[no-untyped-call,no-any-return]

    for layer in model.layers:
        assert isinstance(layer, Layer)
        layer.heads = [heads // ranks for heads in layer.heads]
        for wide in (layer.qkv, layer.gate_up):
            wide.register_forward_pre_hook(copy)
        for narrow in (layer.out, layer.down):
            narrow.register_forward_hook(reduce)
