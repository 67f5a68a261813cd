"""The fast path on a CPU, beside the plain versions that run everywhere and that tests trust.

Nothing else in the engine knows the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from burnish.model.attention import Attend
from burnish.model.transformer import Layer, Transformer

Attention = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""q [B, H, R, D], k, v [B, H, T, D], mask [B, 1, 1, T] to add -> like q, log-sum-exp [B, H, R]."""


class Body(Protocol):
    """What the engine needs of a model."""

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


def plain_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(2, 3) / math.sqrt(q.shape[3])
    if mask is not None:
        scores = scores + mask
    return (torch.softmax(scores, 3) @ v.to(wide)).to(q.dtype), scores.logsumexp(3)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """PyTorch's CPU kernel, called by its own name because only so it returns the log-sum-exp."""
    out, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, False, attn_mask=mask
    )
    return out, total


class PackedLinear(nn.Module):
    """A linear layer whose weight lies the way oneDNN's matrix product reads it.

    Rearranging it in every call costs a third of a decoding step: 64 rows are too few to hide it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), 64)
        self._bias = None if bias is None else bias.detach()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self._bias, "none", [], ""
        )
        return out


class PackedNorm(nn.Module):
    """RMSNorm in a third fewer passes over the data, all but the last in float32."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        super().__init__()
        self._weight, self._eps = norm.weight.detach().float(), norm.eps or 0.0

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scale = torch.linalg.vector_norm(wide, 2, -1, keepdim=True).square_()
        scale = scale.mul_(1 / x.shape[-1]).add_(self._eps).rsqrt_()
        return wide.mul_(scale).mul_(self._weight).to(x.dtype)


class PackedTransformer:
    """The model with packed weights; the embedding is the model's own."""

    def __init__(self, model: Transformer) -> None:
        with torch.device("meta"):
            self._body = Transformer(model.config)
        self._body.embed = model.embed
        setattr(self._body, "norm", PackedNorm(model.norm))  # noqa: B010
        for mine, layer in zip(self._body.layers, model.layers, strict=True):
            assert isinstance(layer, Layer)
            for name, part in layer.named_children():
                if isinstance(part, nn.Linear):
                    part = PackedLinear(part.weight, part.bias)
                elif isinstance(part, nn.RMSNorm):
                    part = PackedNorm(part)
                setattr(mine, name, part)
        self._model = model
        head = model.embed if model.head is None else model.head
        self._head = None if model.config.fp32_head else PackedLinear(head.weight, None)

    def __call__(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        hidden: Tensor = self._body(tokens, positions, attend)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden) if self._head is None else self._head(hidden)


def attention_for(device: torch.device, dtype: torch.dtype) -> Attention:
    fast = device.type == "cpu" and dtype in (torch.float32, torch.bfloat16)
    return flash_attention if fast else plain_attention


def body_for(model: Transformer) -> Body:
    weight = model.embed.weight
    packs = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    if packs and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PackedTransformer(model)
    return model


def causal_attention(q: Tensor, k: Tensor, v: Tensor, start: int) -> Tensor:
    """q [L, Hq, D] at positions start …, k and v [T, Hkv, D] from position 0 on -> [L, Hq, D]."""
    seen = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(start)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=gqa)
    return out[0].transpose(0, 1)
