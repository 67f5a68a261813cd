"""The tensors that weights must have, for engines whose model is not burnish's own."""

from __future__ import annotations

import torch

from burnish.errors import EngineError
from burnish.model.transformer import ModelConfig, Transformer
from burnish.types import Weights


class Shapes:
    """Hugging Face's names of a model's tensors, and their shapes."""

    def __init__(self, config: ModelConfig) -> None:
        with torch.device("meta"):
            views = Transformer(config).exchange()
        self._shapes = {name: tuple(view.shape) for name, view in views.items()}
        self._loaded: set[str] = set()
        """The tensors that any load has changed: weights that name a part must name them."""

    def check(self, weights: Weights, version: int) -> None:
        """Refuses weights that would leave a mixture; ``version`` is loaded now."""
        found = {name: tuple(tensor.shape) for name, tensor in weights.tensors.items()}
        named = self._loaded | found.keys() if weights.is_partial else self._shapes.keys()
        wanted = {name: self._shapes.get(name) for name in named}
        if found != wanted:
            raise EngineError(
                "the weights do not fit the model's config: "
                f"{sorted(set(found.items()) ^ set(wanted.items()), key=str)[:4]} differ; version "
                f"{version} stays loaded"
            )
        self._loaded |= found.keys()
