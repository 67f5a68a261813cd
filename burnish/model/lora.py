"""LoRA: a change of low rank beside each linear layer of a model that stays as it is.

    W x + (alpha / rank) · B A x,    A [rank, d], B [f, rank], B = 0 at first

Hu et al. 2021, https://arxiv.org/abs/2106.09685. There is a pair A, B for each of Hugging Face's
modules, as in PEFT's files, though q, k, v and gate, up are one product here. It differs from the
paper in A, which is drawn as PEFT draws it: uniform in ±1/√d.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from burnish.errors import ModelError
from burnish.model.products import linear
from burnish.model.transformer import HF_MODULES, Transformer
from burnish.schema.learning import MODULES, LoraLearns
from burnish.schema.recipe import TrainConfig

PRODUCTS = ("qkv", "out", "gate_up", "down")
"""The linear layers of a layer; each holds one or several of Hugging Face's modules."""
Model = TypeVar("Model", bound=nn.Module)


class Adapter(NamedTuple):
    rank: int
    alpha: float
    pairs: dict[str, tuple[Tensor, Tensor]]
    """A and B by the name of Hugging Face's module, such as model.layers.0.mlp.up_proj."""

    @property
    def shapes(self) -> dict[str, list[list[int]]]:
        return {name: [[*tensor.shape] for tensor in pair] for name, pair in self.pairs.items()}


class Lora(nn.Module):
    """The change of one product: x [N, d] -> [N, f]."""

    def __init__(self, rows: Mapping[str, int], alpha: float, a: Mapping[str, Tensor]) -> None:
        """``rows`` of each module in the product, of which those in ``a`` have an adapter."""
        super().__init__()
        self.rows, self.alpha = dict(rows), alpha
        self.a = nn.ParameterDict(a)
        self.b = nn.ParameterDict(
            {part: first.new_zeros(rows[part], len(first)) for part, first in a.items()}
        )

    def forward(self, x: Tensor) -> Tensor:
        rank = len(next(iter(self.a.values())))
        low = linear(x, torch.cat([*self.a.values()])) * (self.alpha / rank)
        inner = dict(zip(self.a, torch.split(low, rank, -1), strict=True))
        parts = [
            linear(inner[part], self.b[part]) if part in inner else x.new_zeros(len(x), rows)
            for part, rows in self.rows.items()
        ]
        return torch.cat(parts, -1)


def learn(model: Transformer, train: TrainConfig, seed: int) -> Transformer:
    """Makes the weights learn that ``train.learn`` names, and no others."""
    chosen = train.learn
    model.learn(getattr(chosen, "last", None), recompute=train.recompute)
    return _attach(model, chosen, seed) if isinstance(chosen, LoraLearns) else model


def _attach(model: Transformer, chosen: LoraLearns, seed: int) -> Transformer:
    """Drawn on the CPU in float32, so that the same seed gives the same A everywhere."""
    model.requires_grad_(False)
    generator, views = torch.Generator().manual_seed(seed), model.exchange()
    for index in range(model.lower_layers, model.config.n_layers):
        for product in PRODUCTS:
            names = {name.rpartition(".")[2]: name for name in HF_MODULES[product]}
            weights = {p: views[f"model.layers.{index}.{n}.weight"] for p, n in names.items()}
            drawn: dict[str, Tensor] = {}
            for part, weight in weights.items():
                if part in chosen.modules:
                    bound = 1 / math.sqrt(weight.shape[1])
                    a = torch.empty(chosen.rank, weight.shape[1])
                    drawn[part] = a.uniform_(-bound, bound, generator=generator).to(weight)
            if drawn:
                rows = {part: len(weight) for part, weight in weights.items()}
                getattr(model.layers[index], product).lora = Lora(rows, chosen.alpha, drawn)
    return model


def adapter_of(model: nn.Module) -> Adapter | None:
    """The adapter that a model has, as views; None if it has none."""
    pairs, alpha = {}, 0.0
    for name, _, lora in _loras(model):
        *layer, product = name.split(".")
        for module in HF_MODULES[product]:
            part = module.rpartition(".")[2]
            if part in lora.a:
                pair = lora.a[part].detach(), lora.b[part].detach()
                pairs[f"model.{'.'.join(layer)}.{module}"] = pair
        alpha = lora.alpha
    return Adapter(len(next(iter(pairs.values()))[0]), alpha, pairs) if pairs else None


def starts_at_base(model: nn.Module) -> bool:
    """Whether a model's adapter, if it has one, changes nothing yet."""
    return not any(bool(b.any()) for _, _, lora in _loras(model) for b in lora.b.values())


def without(model: Model) -> Model:
    """The model, whose adapter is taken away."""
    for _, product, _ in list(_loras(model)):
        product.lora = None  # type: ignore[assignment]
    return model


@torch.no_grad()
def merged(model: Transformer, adapter: Adapter) -> dict[str, Tensor]:
    """The weights that an adapter changes, by Hugging Face's names: W + (alpha / rank) · B A, added
    in float32 and rounded once to the model's precision."""
    views, scale, found = model.exchange(), adapter.alpha / adapter.rank, {}
    for name, (a, b) in adapter.pairs.items():
        weight = views[f"{name}.weight"]
        wide = torch.promote_types(weight.dtype, torch.float32)
        change = b.to(weight.device, wide) @ a.to(weight.device, wide)
        found[f"{name}.weight"] = (weight.to(wide) + scale * change).to(weight.dtype)
    return found


@torch.no_grad()
def fold(model: Transformer, adapter: Adapter | None = None) -> Transformer:
    """The model with an adapter in its weights, by default its own, which it has no more then."""
    adapter = adapter or adapter_of(model)
    if adapter is not None:
        views, rank, wanted = model.exchange(), adapter.rank, {}
        for name, view in views.items():
            if name.split(".")[-2] in MODULES and view.ndim == 2:
                wanted[name.removesuffix(".weight")] = [[rank, view.shape[1]], [len(view), rank]]
        _check(adapter.shapes, wanted | dict.fromkeys(wanted.keys() - adapter.pairs.keys()))
        for name, tensor in merged(model, adapter).items():
            views[name].copy_(tensor)
    return without(model)


@torch.no_grad()
def fill(model: Transformer, adapter: Adapter) -> None:
    """Goes on from an adapter that was read: all of it must fit the model's own, and none lack."""
    own = adapter_of(model)
    assert own is not None, "the model has an adapter"
    _check(adapter.shapes, own.shapes)
    for name, pair in adapter.pairs.items():
        for ours, theirs in zip(own.pairs[name], pair, strict=True):
            ours.copy_(theirs)


def _check(given: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Compares the shapes of A and B by module; None for a module that may lack."""
    names = sorted(given.keys() | wanted.keys())
    wrong = [
        f"{n}: {given.get(n)}, not {wanted.get(n)}" for n in names if given.get(n) != wanted.get(n)
    ]
    if wrong:
        raise ModelError(
            f"the adapter does not fit: {len(wrong)} modules have other shapes of A and B than the "
            f"model and train.learn ask for ({'; '.join(wrong[:3])}); model.name must be the model "
            "that it was made for, and train.learn must name its rank, modules and layers"
        )


def _loras(model: nn.Module) -> Iterator[tuple[str, nn.Module, Lora]]:
    """The name of each product that has a change, the product and the change."""
    for name, module in model.named_modules():
        lora = getattr(module, "lora", None)
        if isinstance(lora, Lora):
            yield name, module, lora
