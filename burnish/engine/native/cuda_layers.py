"""A sampler's layers on a GPU: the operations of `transformer.Layer` in fewer kernels.

With few rows, most kernels of a layer take a few microseconds whatever they compute, so their
number determines the time. The residual connection and the norm after it are one kernel, and so are
rotating queries and keys and writing keys and values to the cache. A single row is multiplied by
kernels that read the weights at nearly the speed of the memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from burnish.engine.native.cache import Cache
from burnish.model import lora
from burnish.model.activations import swiglu
from burnish.model.attention import Attend
from burnish.model.transformer import Layer, Transformer, rotation


class CudaLayers:
    """Runs a model's layers on decoding rows and prompts."""

    def __init__(self, model: Transformer, cache: Cache) -> None:
        """Compute the rotation of all positions that the cache has room for."""
        self._model, self._cache = model, cache
        assert lora.adapter_of(model) is None, "engines run models with merged weights"
        config = model.config
        most = min(config.context, cache.count * cache.size)
        positions = torch.arange(most, device=cache.device)
        cos, sin = rotation(config.rope, positions, config.head_width, cache.dtype)
        self._turn = cos.squeeze(1), sin.squeeze(1)

    def __call__(self, tokens: Tensor, positions: Tensor, slots: Tensor, attend: Attend) -> Tensor:
        """Run the model on tokens [N] at positions [N], and write their keys and values to slots
        [N] of the cache; −1 is not written. Return the hidden states [N, d] after the final norm.
        ``attend``: called after the keys and values of a layer have been written."""
        from burnish.engine.native import layer_kernels

        model, eps = self._model, self._model.config.norm_eps
        layers = [layer for layer in model.layers if isinstance(layer, Layer)]
        norms = [*(layer.attention_norm.weight for layer in layers[1:]), model.norm.weight]
        x: Tensor = model.embed(tokens)
        h = layer_kernels.add_norm(x, None, layers[0].attention_norm.weight, eps)
        for layer, next_norm in zip(layers, norms, strict=True):
            qkv = multiplied(h, layer.qkv).view(len(h), -1, layer.width)
            places = *self._cache.slots(layer.index), positions, slots
            q = layer_kernels.place_heads(qkv, self._turn, _head_norms(layer), *places)
            _, k, v = torch.split(qkv, layer.heads, 1)
            change = multiplied(attend(layer.index, q, k, v).flatten(1), layer.out)
            h = layer_kernels.add_norm(x, change, layer.mlp_norm.weight, eps)
            if len(h) == 1:
                inner = layer_kernels.gate_single(h, layer.gate_up.weight)
            else:
                inner = swiglu(layer.gate_up(h))
            h = layer_kernels.add_norm(x, multiplied(inner, layer.down), next_norm, eps)
        return h


def multiplied(x: Tensor, product: torch.nn.Linear) -> Tensor:
    """Apply a product to rows [S, k] -> [S, n]."""
    from burnish.engine.native import layer_kernels

    if len(x) == 1:
        return layer_kernels.multiply_single(x, product.weight, product.bias)
    out: Tensor = product(x)
    return out


def _head_norms(layer: Layer) -> tuple[Tensor, Tensor, float] | None:
    """Return the weights of the norms of queries and keys and their epsilon; None if the model has
    none."""
    if layer.q_norm is None or layer.k_norm is None:
        return None
    assert layer.q_norm.eps is not None, "the model's config sets it"
    return layer.q_norm.weight, layer.k_norm.weight, layer.q_norm.eps
