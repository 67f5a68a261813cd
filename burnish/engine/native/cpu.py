"""The CPU backend: matrix products with packed weights, and numba kernels between them.

It supports float32 and bfloat16.

Legend: N tokens of a step, S decoding rows, Hq and Hkv heads, D head
width, R rows that share a prompt.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from burnish.engine.native import cpu_kernels
from burnish.engine.native.cache import Array, Cache, TokenRun, slots_of
from burnish.engine.native.plain import RunAttention, SampleAhead, last_states
from burnish.engine.native.sampler import BLOCK
from burnish.engine.native.sequence import Prefix
from burnish.model.attention import alike
from burnish.model.matmul import linear, multiplies, widened
from burnish.model.transformer import Layer, Transformer, rotation

ROWS = 64
"""Number of rows for which the weights of a product are packed; other numbers work as well."""
SHORT = 32
"""Longest chunk of a prompt, in tokens, that the decoding kernel computes row by row."""
SHARED_NUMBERS = 6_000_000
"""Minimum saving at which a step reads the prompts of groups once, in products of one number of a
query and one of a key, per layer. Below it, the additional call per layer costs more than it saves
(SmolLM2-135M in fp32 on AVX-512; not measured in bf16)."""
_PACKED_WELL: dict[torch.Size, bool] = {}
"""Results of `mkl_packs` by the weight's shape."""


class Cpu:
    """Runs the model on a CPU: matrix products with packed copies of its weights, and the kernels
    of `cpu_kernels`."""

    sample_ahead: SampleAhead | None = None

    def __init__(self, model: Transformer, cache: Cache) -> None:
        self._model, self._cache, self.weigh = model, cache, weigh
        self._pack()

    def hidden(self, runs: Sequence[TokenRun]) -> Tensor:
        share_prompts(runs, self._cache)
        return last_states(self._body, CpuAttention, self._cache, runs)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden) if self._head is None else self._head(hidden)

    def update(self) -> None:
        """Pack the model's new weights, after releasing the packed copies of the old ones."""
        # Free the old packed weights first: they take as much memory as the model.
        del self._layers, self._head
        return_free_memory()
        self._pack()

    def _pack(self) -> None:
        model = self._model
        self._layers = [_FusedLayer(layer) for layer in model.layers if isinstance(layer, Layer)]
        self._last_norm = _norm_weight(model.norm)
        head = model.embed if model.head is None else model.head
        self._head = None if model.config.fp32_head else packed_linear(head.weight, None)

    def _body(self, tokens: Tensor, positions: Tensor, attend: CpuAttention) -> Tensor:
        config, norm, layers = self._model.config, cpu_kernels.norm, self._layers
        cpu_kernels.use_threads()
        x: Tensor = self._model.embed(tokens)
        h, eps = torch.empty_like(x), np.float32(config.norm_eps)
        cos, sin = rotation(config.rope, positions, config.head_width, x.dtype)
        turn = numbers(cos.flatten(1)), numbers(sin.flatten(1))
        inner = x.new_empty(len(x), config.d_ff)
        residual, normed, gated = numbers(x), numbers(h), numbers(inner)
        norms = [layer.attention_norm for layer in layers[1:]] + [self._last_norm]
        norm(residual, residual[:0], layers[0].attention_norm, eps, normed)
        for index, (layer, next_norm) in enumerate(zip(layers, norms, strict=True)):
            qkv = layer.qkv(h)
            for head_norm, heads in layer.head_norms:
                some = qkv.view(len(x), -1, config.head_width)[:, heads]
                some.copy_(head_norm(some))
            change = layer.out(attend(index, qkv, turn))
            norm(residual, numbers(change), layer.mlp_norm, eps, normed)
            cpu_kernels.gate(numbers(layer.gate_up(h)), gated)
            norm(residual, numbers(layer.down(inner)), next_norm, eps, normed)
        return h


class _FusedLayer:
    def __init__(self, layer: Layer) -> None:
        products = (layer.qkv, layer.out, layer.gate_up, layer.down)
        self.qkv, self.out, self.gate_up, self.down = (
            packed_linear(product.weight, product.bias) for product in products
        )
        self.attention_norm = _norm_weight(layer.attention_norm)
        self.mlp_norm = _norm_weight(layer.mlp_norm)
        q, k, _ = layer.heads
        both = ((layer.q_norm, slice(q)), (layer.k_norm, slice(q, q + k)))
        self.head_norms = [(norm, heads) for norm, heads in both if norm is not None]


@dataclass(frozen=True)
class _Shared:
    """Groups of decoding samples that share the pages of a prompt. A group's pages are read once,
    for R rows together."""

    rows: Tensor
    """Rows of the samples in the step [groups, R]; a smaller group repeats its first row."""
    sizes: Array
    """Number of samples of each group [groups]."""
    pages: Tensor
    mask: Tensor


class CpuAttention:
    """The attention function of a step: qkv [N, (Hq + 2 Hkv) D] -> [N, Hq D].

    Decoding rows come first. For them and for short prompts, the decoding kernel reads each row's
    own pages; the pages that a group shares are read once for the group. Long prompts use
    `RunAttention`.
    """

    def __init__(self, cache: Cache, runs: Sequence[TokenRun]) -> None:
        self._cache, self._slots = cache, slots_of(runs, cache.size)
        decoding = [run for run in runs if run.count == 1]
        short = [run for run in runs if 1 < run.count <= SHORT]
        self._long = [run for run in runs if run.count > SHORT]
        self._shared = _prefixes(cache, decoding)
        self._prompts = RunAttention(cache, self._long)
        heads = cache.heads * cache.queries
        self._out = torch.empty(len(self._slots), heads * cache.width, dtype=cache.dtype)
        self._totals = np.empty((len(self._slots), heads), np.float32)
        """The log-sum-exp of each row's scores."""
        self._calls = [self._call(some) for some in (decoding, short) if some]

    def __call__(self, layer: int, qkv: Tensor, turn: tuple[Array, Array]) -> Tensor:
        """Rotate q and k in place by ``turn``, cos and sin [N, D]; write k and v to their pages;
        return the attention, which is valid until the next call."""
        cache, out, array = self._cache, self._out, numbers(qkv)
        keys, values = (numbers(x.flatten(1)) for x in cache.slots(layer))
        cpu_kernels.turn(array, *turn, self._slots, keys, values)
        decode = cpu_kernels.decode_kernel(cache.width, cache.queries, cache.size)
        for rows, *rest in self._calls:
            decode(array[rows], keys, values, *rest)
        headed = qkv.view(len(qkv), -1, cache.width)
        q, k, v = headed.tensor_split((headed.shape[1] - 2 * cache.heads, -cache.heads), 1)
        for shared in self._shared:
            self._join(layer, shared, q)
        if self._long:
            self._prompts(layer, q, k, v, out.view(q.shape))
        return out

    def _call(self, runs: Sequence[TokenRun]) -> tuple[Any, ...]:
        """Return the slice of rows of adjacent runs, and the arguments of the decoding kernel for
        them that are the same in all layers."""
        rows, table = slice(runs[0].first, runs[-1].rows.stop), _flat_table(runs, self._cache.size)
        rest = np.float32(self._cache.width**-0.5), torch.get_num_threads()
        return rows, *table, numbers(self._out)[rows], self._totals[rows], *rest

    def _join(self, layer: int, shared: _Shared, q: Tensor) -> None:
        """Compute attention over the prompt pages that a group's samples share, and merge it into
        ``out``, which holds attention over each sample's own pages. The two are weighted by the
        sums of their exponentiated scores."""
        cache, rows = self._cache, shared.rows
        query = q[rows].view(*rows.shape, cache.heads, cache.queries, cache.width)
        query = query.transpose(1, 2).contiguous()
        k, v = (x.transpose(1, 2) for x in cache.read(layer, shared.pages, len(rows)))
        part, total = flash_attention(query.flatten(2, 3), k, v, shared.mask)
        # Always contiguous: numba would compile the kernel again for another layout.
        part = numbers(part.reshape(query.shape).contiguous())
        found = part, total.reshape(query.shape[:4]).contiguous().numpy()
        cpu_kernels.join_attention(
            numbers(self._out), self._totals, rows.numpy(), shared.sizes, *found
        )


def _flat_table(runs: Sequence[TokenRun], size: int) -> tuple[Array, Array, Array]:
    """Return the concatenated own pages of all runs and, for each token, the index of its run's
    first page among them and the number of tokens in its run's own pages that it attends to: itself
    and the preceding ones."""
    counts = [run.count for run in runs]
    first = np.cumsum([0, *(len(run.own) for run in runs)])[:-1].repeat(counts)
    seen = [np.arange(run.start, run.end) + 1 - run.shared * size for run in runs]
    pages = np.concatenate([run.own for run in runs])
    return pages.astype(np.int64), first, np.concatenate(seen)


def share_prompts(runs: Sequence[TokenRun], cache: Cache) -> None:
    """Set `shared` of the decoding runs whose prompts are read once for all samples of a group,
    because these prompts are long enough or have enough samples."""
    runs_of: dict[Prefix, list[TokenRun]] = {}
    for run in runs:
        if run.count == 1 and run.sequence.prefix:
            runs_of.setdefault(run.sequence.prefix, []).append(run)
    numbers_of_token = cache.heads * cache.queries * cache.width
    for prefixes in alike(runs_of, lambda prefix: len(prefix.pages)):
        spared = sum((len(runs_of[prefix]) - 1) * len(prefix.pages) for prefix in prefixes)
        if spared * cache.size * numbers_of_token >= SHARED_NUMBERS:
            for prefix in prefixes:
                for run in runs_of[prefix]:
                    run.shared = len(prefix.pages)


def _prefixes(cache: Cache, decoding: Sequence[TokenRun]) -> list[_Shared]:
    rows_of: dict[Prefix, list[int]] = {}
    for row, run in enumerate(decoding):
        if run.shared and run.sequence.prefix:
            rows_of.setdefault(run.sequence.prefix, []).append(row)
    buckets = alike(rows_of, lambda prefix: len(prefix.pages))
    return [_shared(cache, {prefix: rows_of[prefix] for prefix in some}) for some in buckets]


def _shared(cache: Cache, rows_of: dict[Prefix, list[int]]) -> _Shared:
    tables = [prefix.pages for prefix in rows_of]
    lengths = np.array([len(table) * cache.size for table in tables])
    beyond = torch.from_numpy(np.arange(lengths.max()) >= lengths[:, None])
    mask = torch.zeros(beyond.shape, dtype=cache.dtype).masked_fill_(beyond, -torch.inf)
    rows, pages = (cache.tensor(_padded(some)) for some in (list(rows_of.values()), tables))
    sizes = np.array([len(some) for some in rows_of.values()])
    return _Shared(rows, sizes, pages.flatten(), mask[:, None, None])


def _padded(lists: Sequence[Sequence[int]]) -> list[list[int]]:
    """Pad lists to the longest one by repeating their first number."""
    most = max(map(len, lists))
    return [[*some, *[some[0]] * (most - len(some))] for some in lists]


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute attention without a causal mask; return the result and the log-sum-exp of the scores.

    q [B, H, R, D], k and v [B, H, T, D], mask [B, 1, 1, T], which is added to the scores -> [B, H,
    R, D] and [B, H, R]. PyTorch's CPU kernel is called directly, because only then does it return
    the log-sum-exp.
    """
    wide = widened(q, k, v)
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *wide, 0.0, False, attn_mask=None if mask is None else mask.to(wide[0].dtype)
    )
    return out.to(q.dtype), total


def packed_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return a function x [N, d] -> x weightᵀ + bias, whose weight is packed in the layout that the
    library's matrix product needs. The result has the type of x. After a change of the weight, a
    new function must be made.

    Packing it in every call would take a third of a decoding step of 64 rows. With AVX-512, MKL
    multiplies float32 a fifth faster than oneDNN. If the processor has no bfloat16 products, the
    weight is kept in float32.
    """
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    if not multiplies(weight.dtype, weight.device.type):
        weight, bias = weight.float(), None if bias is None else bias.float()
    if weight.dtype == torch.float32 and mkl_packs(weight):
        arranged = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), ROWS)
        multiply = torch.ops.mkl._mkl_linear
        return lambda x: multiply(x.float(), arranged, weight, bias, len(x)).to(x.dtype)
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return lambda x: linear(x.to(weight.dtype), weight, bias).to(x.dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
    product = torch.ops.mkldnn._linear_pointwise
    return lambda x: product(x.to(weight.dtype), packed, bias, "none", [], "").to(x.dtype)


def mkl_packs(weight: Tensor) -> bool:
    """Return whether MKL multiplies any number of rows correctly with a packed weight of this
    shape.

    Its manual guarantees this only for the number of rows that the weight was packed for. Other
    numbers work in practice, so each shape is tested once, and the result is cached.
    """
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.shape not in _PACKED_WELL:
        x = weight[: 4 * ROWS]
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), ROWS)
        _PACKED_WELL[weight.shape] = all(
            torch.allclose(
                torch.ops.mkl._mkl_linear(some, packed, weight, None, len(some)),
                torch.nn.functional.linear(some, weight),
                rtol=1e-4,
                atol=1e-5 * float(x.norm(dim=1).max()) ** 2,
            )
            for some in (x[:1], x[:3], x[:ROWS], x[: ROWS + 1], x)
        )
    return _PACKED_WELL[weight.shape]


def return_free_memory() -> None:
    """Return freed memory to the system, if the C library supports it.

    MKL allocates several times the size of a packed weight. The unused part costs nothing in newly
    mapped memory, but in reused memory it would stay resident: up to 1.4 GB for 135M weights.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def weigh(logits: Tensor, heat: Tensor) -> tuple[Tensor, Tensor]:
    """Implement `sampler.Weigh` without storing each weight: logits [M, V] and temperatures
    ``heat`` [M] -> the largest of each row's logits / heat [M], and the sums of exp(logits / heat −
    largest) over each block of tokens [M, blocks]."""
    rows, vocab = logits.shape
    peaks, sums = torch.empty(rows), torch.empty(rows, -(-vocab // BLOCK))
    cpu_kernels.use_threads()
    cpu_kernels.weigh_rows(numbers(logits), heat.numpy(), peaks.numpy(), sums.numpy(), BLOCK)
    return peaks, sums


def _norm_weight(norm: nn.RMSNorm) -> Any:
    return norm.weight.detach().float().numpy()


def numbers(x: Tensor) -> Any:
    """Return a numpy view of a CPU tensor, which shares its memory. bfloat16, which numpy lacks, is
    viewed as its bits, in uint16."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
