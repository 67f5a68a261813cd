"""Check weights before they are loaded by an engine whose model is not burnish's own."""

from __future__ import annotations

import torch

from burnish.errors import EngineError
from burnish.model.transformer import ModelConfig, Transformer
from burnish.types import Weights


class Shapes:
    """Checks weights against the names (Hugging Face's) and shapes of a model's tensors."""

    def __init__(self, config: ModelConfig) -> None:
        with torch.device("meta"):
            views = Transformer(config).exchange()
        self._shapes = {name: tuple(view.shape) for name, view in views.items()}
        self._loaded: set[str] = set()
        """Tensors that any load has changed. Partial weights must contain all of them."""

    def check(self, weights: Weights, version: int) -> None:
        """Raise an EngineError if tensors are missing, unknown or of another shape, since the model
        would then mix weights of several versions. ``version``: the loaded one, for the message.

        Otherwise remember the tensors as changed: call this only for weights that are loaded next.
        """
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
