"""The model as the engine runs it: PyTorch's own operations anywhere, kernels where there are some.

The plain versions run everywhere and are what tests trust. Nothing else here knows the device.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from burnish.model.products import attention, linear, multiplies, widened
from burnish.model.rope import rotation
from burnish.model.transformer import Layer, Transformer

if TYPE_CHECKING:
    from burnish.engine.cache import CachedAttention

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""q [B, H, R, D], k, v [B, H, T, D], mask [B, 1, 1, T] to add -> like q, log-sum-exp [B, H, R]."""

ROWS = 64
"""For so many rows the weights of a matrix product are arranged; other numbers work as well."""
_PACKED_WELL: dict[torch.Size, bool] = {}
"""By a weight's shape, what `mkl_packs` found."""


class Body(Protocol):
    """What the engine needs of a model."""

    def __call__(self, tokens: Tensor, positions: Tensor, attend: CachedAttention) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(2, 3) / math.sqrt(q.shape[3])
    if mask is not None:
        scores = scores + mask
    return (torch.softmax(scores, 3) @ v.to(wide)).to(q.dtype), scores.logsumexp(3)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """PyTorch's CPU kernel, called by its own name because only so it returns the log-sum-exp."""
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


def return_free_memory() -> None:
    """Gives the system back what was freed, where the C library can.

    MKL reserves several times what a packed weight fills. In new memory the rest costs nothing; in
    memory that had been used before it would stay taken: up to 1.4 GB with 135M weights.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


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


class FusedTransformer:
    """The model on a CPU: matrix products of packed weights, and `fused`'s kernels between them."""

    def __init__(self, model: Transformer) -> None:
        from burnish.engine import fused

        self._fused, self._model = fused, model
        self._layers = [_FusedLayer(layer) for layer in model.layers if isinstance(layer, Layer)]
        self._last_norm = _norm_weight(model.norm)
        head = model.embed if model.head is None else model.head
        self._head = None if model.config.fp32_head else packed_linear(head.weight, None)

    def __call__(self, tokens: Tensor, positions: Tensor, attend: CachedAttention) -> Tensor:
        config, norm, layers = self._model.config, self._fused.norm, self._layers
        self._fused.use_threads()
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
            change = layer.out(attend.fused(index, qkv, turn))
            norm(residual, numbers(change), layer.mlp_norm, eps, normed)
            self._fused.gate(numbers(layer.gate_up(h)), gated)
            norm(residual, numbers(layer.down(inner)), next_norm, eps, normed)
        return h

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden) if self._head is None else self._head(hidden)


def _norm_weight(norm: nn.RMSNorm) -> Any:
    return norm.weight.detach().float().numpy()


def numbers(x: Tensor) -> Any:
    """A CPU tensor's own memory as an array; bfloat16, which numpy does not know, as its bits."""
    return (x.view(torch.uint16) if x.dtype == torch.bfloat16 else x).numpy()


def fuses(device: torch.device, dtype: torch.dtype) -> bool:
    return device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)


def has_tiles(device: torch.device, width: int, size: int) -> bool:
    """Whether `tiles` can run."""
    if device.type != "cpu":
        return False
    from burnish.engine import tiles

    return tiles.usable(width, size)


def has_paged(device: torch.device, width: int) -> bool:
    """Whether `paged` can run."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    from burnish.engine import paged

    return paged.usable(width)


def attention_for(device: torch.device, dtype: torch.dtype) -> Attention:
    return flash_attention if fuses(device, dtype) else plain_attention


def body_for(model: Transformer) -> Body:
    weight = model.embed.weight
    return FusedTransformer(model) if fuses(weight.device, weight.dtype) else model


def causal_attention(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """q [L, Hq, D] at positions start …, k and v [T, Hkv, D] from position 0 on -> [L, Hq, D]."""
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(start)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attention(q, k, v, mask=seen)[0].transpose(0, 1)
