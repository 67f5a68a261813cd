"""Build an engine in this process from its settings.

`burnish/launch/engines.py` decides where an engine runs. It calls ``make_engine`` for an engine in
the run's own process; `burnish/engine/remote/server.py` calls it in an engine's process.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from burnish.engine.settings import EngineSettings

if TYPE_CHECKING:
    from burnish.engine.protocol import Engine
    from burnish.model.sorter import Sorter
    from burnish.model.tokenizer import Tokenizer
    from burnish.model.transformer import Transformer


class LoadedModel(NamedTuple):
    """A model in memory, and the tokenizer that belongs to it."""

    model: Transformer | Sorter
    tokenizer: Tokenizer | None = None
    """None if the model does not read text."""


def make_engine(settings: EngineSettings, loaded: LoadedModel | None = None) -> Engine:
    """Build the engine that ``settings.name`` selects.

    ``loaded``: a model in memory, which the engine uses itself, without a copy; None to load
    ``settings.model``. The engines hf and vllm always load ``settings.model``; the sorter needs
    ``loaded``.
    """
    return MAKERS[settings.name](settings, loaded)


def _make_native(settings: EngineSettings, loaded: LoadedModel | None) -> Engine:
    model, tokenizer = loaded or _load_model(settings)
    from burnish.engine.native.engine import NativeEngine  # numba takes a second to import
    from burnish.model.transformer import Transformer

    assert isinstance(model, Transformer), "the native engine samples from language models"
    return NativeEngine(model.to(settings.device), tokenizer, settings)


def _load_model(settings: EngineSettings) -> LoadedModel:
    from burnish.machine import hardware

    hardware.set_up_torch(settings.threads)
    import torch

    from burnish.model import checkpoint
    from burnish.model.tokenizer import Tokenizer

    dtype: torch.dtype = getattr(torch, settings.dtype)
    model = checkpoint.load_model(settings.directory, dtype=dtype, fp32_head=settings.fp32_head)
    return LoadedModel(model, Tokenizer.load(settings.directory))


def _make_hf(settings: EngineSettings, loaded: LoadedModel | None) -> Engine:
    from burnish.engine.remote.hf import HfEngine

    return HfEngine(settings)


def _make_vllm(settings: EngineSettings, loaded: LoadedModel | None) -> Engine:
    from burnish.engine.remote.vllm import VllmEngine

    return VllmEngine(settings)


def _make_sorter(settings: EngineSettings, loaded: LoadedModel | None) -> Engine:
    from burnish.engine.sorter import SorterEngine
    from burnish.model.sorter import Sorter

    assert loaded is not None, "the sorting model has no directory"
    assert isinstance(loaded.model, Sorter), "the sorting engine samples from the sorting model"
    return SorterEngine(loaded.model)


MAKERS: dict[str, Callable[[EngineSettings, LoadedModel | None], Engine]] = {
    "native": _make_native,
    "hf": _make_hf,
    "vllm": _make_vllm,
    "sorter": _make_sorter,
}
"""Functions that build an engine, by the engine's name. SGLang is missing because it is an HTTP
server that burnish does not start."""
