"""The CPU backend: matrix products of packed weights, and numba's kernels between them.

It runs float32 and bfloat16. Legend: N tokens of a step, S decoding rows, Hq and Hkv heads, D head
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

from burnish.engine import fused, sampler
from burnish.engine.cache import Array, Cache, Run, padded_tables, slots_of
from burnish.engine.plain import Prompts, SampleAhead, Sampled, buckets, last_states, placed
from burnish.engine.sampler import BLOCK, Draw, search
from burnish.engine.sequence import Prefix
from burnish.model.products import linear, multiplies, widened
from burnish.model.rope import rotation
from burnish.model.transformer import Layer, Transformer

ROWS = 64
"""For so many rows the weights of a matrix product are arranged; other numbers work as well."""
SHORT = 32
"""Up to so many tokens of a prompt are attended to row by row."""
_PACKED_WELL: dict[torch.Size, bool] = {}
"""By a weight's shape, the answer of `mkl_packs`."""


class Cpu:
    sample_ahead: SampleAhead | None = None

    def __init__(self, model: Transformer, cache: Cache) -> None:
        self._model, self._cache = model, cache
        self._body = FusedTransformer(model)

    def hidden(self, runs: Sequence[Run]) -> Tensor:
        return last_states(self._body, CpuAttention, self._cache, runs)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._body.logits(hidden)

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> Sampled:
        return sample(logits, draws)

    def update(self) -> None:
        del self._body  # before the next one: its packed weights take as much memory as the model
        return_free_memory()
        self._body = FusedTransformer(self._model)


class FusedTransformer:
    """The model on a CPU: matrix products of packed weights, and `fused`'s kernels between them."""

    def __init__(self, model: Transformer) -> None:
        self._model = model
        self._layers = [_FusedLayer(layer) for layer in model.layers if isinstance(layer, Layer)]
        self._last_norm = _norm_weight(model.norm)
        head = model.embed if model.head is None else model.head
        self._head = None if model.config.fp32_head else packed_linear(head.weight, None)

    def __call__(self, tokens: Tensor, positions: Tensor, attend: CpuAttention) -> Tensor:
        config, norm, layers = self._model.config, fused.norm, self._layers
        fused.use_threads()
        x: Tensor = self._model.embed(tokens)
        h, eps = torch.empty_like(x), np.float32(config.norm_eps)
        cos, sin = (
            t.flatten(1) for t in rotation(config.rope, positions, config.head_width, x.dtype)
        )
        turn = numbers(cos), numbers(sin)
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
            fused.gate(numbers(layer.gate_up(h)), gated)
            norm(residual, numbers(layer.down(inner)), next_norm, eps, normed)
        return h

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden) if self._head is None else self._head(hidden)


class _FusedLayer:
    def __init__(self, layer: Layer) -> None:
        names = ("qkv", "out", "gate_up", "down")
        parts = (getattr(layer, name) for name in names)
        self.qkv, self.out, self.gate_up, self.down = (
            packed_linear(p.weight, p.bias) for p in parts
        )
        self.attention_norm, self.mlp_norm = map(
            _norm_weight, (layer.attention_norm, layer.mlp_norm)
        )
        self.head_norms = [
            (norm, slice(at, at + count))
            for norm, at, count in zip(
                (layer.q_norm, layer.k_norm), (0, layer.heads[0]), layer.heads, strict=False
            )
            if norm is not None
        ]


@dataclass(frozen=True)
class _Shared:
    """Groups whose samples read their prompt's pages once, as R rows of one query."""

    rows: Tensor
    """[groups, R]; a smaller group repeats its first row."""
    sizes: Array
    """[groups] the number of samples."""
    pages: Tensor
    mask: Tensor


class CpuAttention:
    """From qkv [N, (Hq + 2 Hkv) D] as the model projects it -> [N, Hq D], until the next call.

    Decoding rows come first. They and short prompts read their own pages row by row; the pages that
    a group shares are read once.
    """

    def __init__(self, cache: Cache, runs: Sequence[Run]) -> None:
        self._cache, self._slots = cache, slots_of(runs, cache.size)
        self._decoding = [run for run in runs if run.count == 1]
        self._shared = _prefixes(cache, self._decoding)
        prompts = placed(runs)[len(self._decoding) :]
        self._short = [(run, row) for run, row in prompts if run.count <= SHORT]
        self._long = [(run, row) for run, row in prompts if run.count > SHORT]
        self._prompts = Prompts(cache, self._long)
        self._buffers: tuple[Tensor, Array, list[Any]] | None = None

    def __call__(self, layer: int, qkv: Tensor, turn: tuple[Array, Array]) -> Tensor:
        """turn: cos and sin [N, D] by which q and k are rotated first, in place."""
        if self._buffers is None:
            self._buffers = self._prepare(qkv)
        cache, (out, totals, calls) = self._cache, self._buffers
        keys, values = (numbers(x.flatten(1)) for x in cache.slots(layer))
        array = numbers(qkv)
        fused.turn(array, *turn, self._slots, keys, values)
        for kernel, rows, *rest in calls:
            kernel(array[rows], keys, values, *rest)
        for shared in self._shared:
            self._join(layer, shared, qkv, out, totals)
        if self._long:
            headed = qkv.view(len(qkv), -1, cache.width)
            q, k, v = headed.tensor_split((headed.shape[1] - 2 * cache.heads, -cache.heads), 1)
            self._prompts(layer, q, k, v, out.view(q.shape))
        return out

    def _prepare(self, qkv: Tensor) -> tuple[Tensor, Array, list[Any]]:
        """For all layers: the output, the rows' log-sum-exp [N, Hq], and the kernel with its rows
        and arguments."""
        cache = self._cache
        out = qkv.new_empty(len(qkv), qkv.shape[1] - 2 * cache.heads * cache.width)
        heads, array = out.shape[1] // cache.width, numbers(out)
        rest = np.float32(cache.width**-0.5), torch.get_num_threads()
        totals = np.empty((len(qkv), heads), np.float32)
        decode = fused.decode_kernel(cache.width, heads // cache.heads, cache.size)
        calls: list[Any] = []
        short = [run for run, _ in self._short]
        for runs, first in ((self._decoding, 0), (short, self._short[0][1] if short else 0)):
            if runs:
                table = _flat_table(runs, cache.size)
                rows = slice(first, first + len(table[1]))
                calls.append((decode, rows, *table, array[rows], totals[rows], *rest))
        return out, totals, calls

    def _join(self, layer: int, shared: _Shared, qkv: Tensor, out: Tensor, totals: Array) -> None:
        """Add attention over the shared pages to out, whose log-sum-exp is totals."""
        cache, table = self._cache, shared.rows.numpy()
        queries = out.shape[1] // cache.width // cache.heads
        query = qkv.new_empty(len(table), cache.heads, table.shape[1], queries, cache.width)
        fused.fold(numbers(qkv), table, numbers(query))
        k, v = (x.transpose(1, 2) for x in cache.read(layer, shared.pages, len(table)))
        part, total = flash_attention(query.flatten(2, 3), k, v, shared.mask)
        found = numbers(part.reshape(query.shape)), total.reshape(query.shape[:4]).numpy()
        fused.join(numbers(out), totals, table, shared.sizes, *found)


def _flat_table(runs: Sequence[Run], size: int) -> tuple[Array, Array, Array]:
    """The runs' own pages, the first of each token's pages, and the number of tokens that it sees
    in them: itself and its past."""
    counts = [run.count for run in runs]
    first = np.cumsum([0, *(run.own for run in runs)])[:-1].repeat(counts)
    seen = [np.arange(run.start, run.end) + 1 - run.shared * size for run in runs]
    pages = np.concatenate([run.own_pages() for run in runs])
    return pages.astype(np.int64), first, np.concatenate(seen)


def _prefixes(cache: Cache, decoding: Sequence[Run]) -> list[_Shared]:
    rows_of: dict[Prefix, list[int]] = {}
    for row, run in enumerate(decoding):
        if run.sequence.prefix is not None and run.sequence.prefix.whole:
            rows_of.setdefault(run.sequence.prefix, []).append(row)
    ordered = sorted(rows_of, key=lambda prefix: -prefix.whole)
    found = []
    for bucket in buckets(ordered, lambda prefix: prefix.whole):
        rows = [rows_of[prefix] for prefix in bucket]
        most = max(map(len, rows))
        padded = cache.tensor([[*r, *r[:1] * (most - len(r))] for r in rows])
        tables = [prefix.pages[: prefix.whole] for prefix in bucket]
        lengths = np.array([len(table) * cache.size for table in tables])
        beyond = torch.from_numpy(np.arange(lengths.max()) >= lengths[:, None])
        mask = torch.zeros(beyond.shape, dtype=cache.dtype).masked_fill_(beyond, -torch.inf)
        pages = cache.tensor(padded_tables(tables))
        found.append(_Shared(padded, np.array(list(map(len, rows))), pages, mask[:, None, None]))
    return found


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """q [B, H, R, D], k, v [B, H, T, D], mask [B, 1, 1, T] to add -> like q, log-sum-exp [B, H, R].

    PyTorch's CPU kernel, called by its own name because only so it returns the log-sum-exp.
    """
    wide = widened(q, k, v)
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *wide, 0.0, False, attn_mask=None if mask is None else mask.to(wide[0].dtype)
    )
    return out.to(q.dtype), total


def packed_linear(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """A linear layer whose weight lies the way the matrix product reads it.

    Rearranging it in every call costs a third of a decoding step: 64 rows are too few to hide it.
    With AVX-512, MKL multiplies float32 a fifth faster than oneDNN does. Where bfloat16 is not
    multiplied, the weight is kept in float32.
    """
    weight, bias = weight.detach(), None if bias is None else bias.detach()
    wide = not multiplies(weight.dtype, weight.device.type)
    if wide:
        weight, bias = weight.float(), None if bias is None else bias.float()
    if weight.dtype == torch.float32 and mkl_packs(weight):
        arranged = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), ROWS)
        multiply = torch.ops.mkl._mkl_linear
        return lambda x: multiply(x.float(), arranged, weight, bias, len(x)).to(x.dtype)
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return lambda x: linear(x.to(weight.dtype), weight, bias).to(x.dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), ROWS)
    product = torch.ops.mkldnn._linear_pointwise
    if wide:
        return lambda x: product(x.float(), packed, bias, "none", [], "").to(x.dtype)
    return lambda x: product(x, packed, bias, "none", [], "")


def mkl_packs(weight: Tensor) -> bool:
    """Whether MKL multiplies any number of rows with a packed weight of this shape.

    Its manual promises a right product only for as many rows as it was packed for. Other numbers
    work as well; so that nobody depends on luck, each shape is tried once.
    """
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return False
    if weight.shape not in _PACKED_WELL:
        x = weight[: 4 * ROWS]
        packed = torch.ops.mkl._mkl_reorder_linear_weight(weight.contiguous(), ROWS)
        _PACKED_WELL[weight.shape] = all(
            torch.allclose(
                torch.ops.mkl._mkl_linear(x[:rows], packed, weight, None, len(x[:rows])),
                torch.nn.functional.linear(x[:rows], weight),
                rtol=1e-4,
                atol=1e-5 * float(x.norm(dim=1).max()) ** 2,
            )
            for rows in (1, 3, ROWS, ROWS + 1, len(x))
        )
    return _PACKED_WELL[weight.shape]


def return_free_memory() -> None:
    """Gives the system back what was freed, where the C library can.

    MKL reserves several times what a packed weight fills. In new memory the rest costs nothing; in
    memory that had been used before it would stay taken: up to 1.4 GB with 135M weights.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


@torch.no_grad()
def sample(logits: Tensor, draws: Sequence[Draw]) -> Sampled:
    """As `sampler.sample`."""
    found = _sample_whole(logits, draws)
    return sampler.sample(logits, draws) if found is None else found


def _sample_whole(logits: Tensor, draws: Sequence[Draw]) -> Sampled | None:
    """Draws that leave nothing out, without writing down any weight; None for others."""
    if any(draw.banned or not draw.temperature or sampler.truncating(draw) for draw in draws):
        return None
    rows, vocab = logits.shape
    heat = torch.tensor([draw.temperature for draw in draws], dtype=torch.float32)
    peaks, sums = torch.empty(rows), torch.empty(rows, -(-vocab // BLOCK))
    fused.use_threads()
    fused.weigh(numbers(logits), heat.numpy(), peaks.numpy(), sums.numpy(), BLOCK)
    totals = peaks.double() + sums.sum(1, dtype=torch.float64).log()
    if not bool(totals.isfinite().all()):
        return None
    block, inside = search(
        sums, torch.tensor([[draw.uniform] for draw in draws], dtype=torch.float64)
    )
    at = block * BLOCK + torch.arange(BLOCK)
    scaled = logits.gather(1, at.clamp(max=vocab - 1)).float() / heat[:, None]
    hit, _ = search((scaled - peaks[:, None]).exp() * (at < vocab), inside)
    chosen = scaled.gather(1, hit)[:, 0].double()
    return (block * BLOCK + hit)[:, 0].tolist(), (chosen - totals).tolist()


def _norm_weight(norm: nn.RMSNorm) -> Any:
    return norm.weight.detach().float().numpy()


def numbers(x: Tensor) -> Any:
    """A CPU tensor's own memory as an array; bfloat16, which numpy does not know, as its bits."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()
