"""LoRA: a trainable low-rank change beside each linear layer of a frozen model.

    W x + (alpha / rank) · B A x,    A [rank, d], B [f, rank], B = 0 at first

Hu et al. 2021, https://arxiv.org/abs/2106.09685. As in PEFT's files, each of Hugging Face's modules
has a pair A, B, although q, k, v and gate, up are one matrix product here. Differs from the paper
in the initial A, which is uniform in ±1/√d as in PEFT.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from burnish.errors import ModelError
from burnish.model.matmul import linear
from burnish.model.protocol import Exchanging, Module
from burnish.model.transformer import HF_MODULES, Transformer
from burnish.recipe.recipe import TrainConfig
from burnish.recipe.trainable import MODULES, LoraLearns

PRODUCTS = ("qkv", "out", "gate_up", "down")
"""Linear layers of a transformer layer; each consists of one or several of Hugging Face's
modules."""
Model = TypeVar("Model", bound=Module)


class Adapter(NamedTuple):
    """The matrices of a LoRA adapter, apart from their model."""

    rank: int
    alpha: float
    pairs: dict[str, tuple[Tensor, Tensor]]
    """A [rank, d] and B [f, rank] of each module with an adapter, keyed by Hugging Face's module
    name, for example model.layers.0.mlp.up_proj."""

    @property
    def shapes(self) -> dict[str, list[list[int]]]:
        """The shapes of A and B, keyed as ``pairs``."""
        return {name: [[*tensor.shape] for tensor in pair] for name, pair in self.pairs.items()}


class Lora(nn.Module):
    """Computes the low-rank change of one linear layer's output, (alpha / rank) · B A x: x [N, d]
    -> [N, f]. It is 0 for modules without an adapter."""

    def __init__(self, rows: Mapping[str, int], alpha: float, a: Mapping[str, Tensor]) -> None:
        """``rows`` has the number of output rows of each module in the linear layer, keyed by its
        name, such as q_proj. ``a`` has A [rank, d] of each module with an adapter; B is 0."""
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
    """Make the weights that ``train.learn`` selects trainable, and freeze all others, in place. For
    LoRA, add adapters, whose initial A ``seed`` determines. Also set whether activations are
    recomputed (``train.recompute``). Return the model."""
    chosen = train.learn
    model.learn(getattr(chosen, "last", None), recompute=train.recompute)
    return _attach(model, chosen, seed) if isinstance(chosen, LoraLearns) else model


def _attach(model: Transformer, chosen: LoraLearns, seed: int) -> Transformer:
    """Freeze the model and add trainable adapters to it. A is drawn on the CPU in float32, so that
    a seed gives the same A on every device."""
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


def adapter_of(model: Module) -> Adapter | None:
    """Return the adapter of a model, as views of its tensors; None if the model has no adapter."""
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


def starts_at_base(model: Module) -> bool:
    """Return whether a model computes the same as its base model: it has no adapter, or every B of
    its adapter is 0."""
    return not any(bool(b.any()) for _, _, lora in _loras(model) for b in lora.b.values())


def is_second_factor(name: str) -> bool:
    """Return whether the parameter of this name is the matrix B of an adapter."""
    return ".lora.b." in name


def without(model: Model) -> Model:
    """Remove the model's adapter in place, without merging it; return the model. A model without an
    adapter is returned unchanged."""
    for _, product, _ in list(_loras(model)):
        product.lora = None  # type: ignore[assignment]
    return model


@torch.no_grad()
def merged(model: Exchanging, adapter: Adapter) -> dict[str, Tensor]:
    """Return merged weights W + (alpha / rank) · B A under Hugging Face's names, only for modules
    with an adapter. The model does not change. The sum is computed in float32 and rounded once to
    the model's precision."""
    views, scale, found = model.exchange(), adapter.alpha / adapter.rank, {}
    for name, (a, b) in adapter.pairs.items():
        weight = views[f"{name}.weight"]
        wide = torch.promote_types(weight.dtype, torch.float32)
        change = b.to(weight.device, wide) @ a.to(weight.device, wide)
        found[f"{name}.weight"] = (weight.to(wide) + scale * change).to(weight.dtype)
    return found


@torch.no_grad()
def fold(model: Transformer, adapter: Adapter | None = None) -> Transformer:
    """Merge an adapter into the model's weights in place, remove the model's own adapter, and
    return the model. ``adapter`` is None for the model's own. Raises a ModelError if the adapter
    does not fit the model."""
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
def load_adapter(model: Transformer, adapter: Adapter) -> None:
    """Copy the values of an adapter that was read from a file into the model's adapter, which must
    exist. Raise a ModelError if the modules or shapes of the two adapters differ."""
    own = adapter_of(model)
    assert own is not None, "the model has an adapter"
    _check(adapter.shapes, own.shapes)
    for name, pair in adapter.pairs.items():
        for ours, theirs in zip(own.pairs[name], pair, strict=True):
            ours.copy_(theirs)


def _check(given: Mapping[str, object], wanted: Mapping[str, object]) -> None:
    """Raise a ModelError if the given shapes of A and B differ from the wanted ones. Both mappings
    are keyed by module; None stands for a module without an adapter."""
    names = sorted(given.keys() | wanted.keys())
    wrong = [
        f"{n}: {given.get(n)}, not {wanted.get(n)}" for n in names if given.get(n) != wanted.get(n)
    ]
    if wrong:
        raise ModelError(
            f"the adapter does not fit: in {len(wrong)} modules, A and B do not have the shapes "
            f"that the model and train.learn require ({'; '.join(wrong[:3])}); model.name must be "
            "the model that the adapter was made for, and train.learn must give the adapter's "
            "rank, modules and layers"
        )


def _loras(model: Module) -> Iterator[tuple[str, nn.Module, Lora]]:
    """Yield name, module and `Lora` of each linear layer that has an adapter."""
    for name, module in model.named_modules():
        lora = getattr(module, "lora", None)
        if isinstance(lora, Lora):
            yield name, module, lora
