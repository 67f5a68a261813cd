"""The size of a recipe's model, and whether it fits this machine: its device, memory and disk."""

from __future__ import annotations

from pathlib import Path

import torch

from burnish import config, machine, preflight
from burnish.errors import BurnishError, ConfigError, ModelError
from burnish.model import checkpoint as models
from burnish.model import hub, lora, peft
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import ModelConfig, Transformer
from burnish.plan import BYTES, ENGINE, Size, checkpoint, needs, room
from burnish.schema.learning import LoraLearns
from burnish.schema.models import ScratchConfig, SorterConfig
from burnish.schema.recipe import Recipe
from burnish.strategy import LaggedLoop
from burnish.wording import counted

LITTLE = 1_000_000
"""Bytes that the sorting model takes at most."""


def measure(recipe: Recipe) -> Size | None:
    """The size of a recipe's language model; None if its files are not here yet."""
    if isinstance(recipe.model, SorterConfig):
        return None
    recipe, found = settled(recipe), _shape(recipe)
    if found is None:
        return None
    shape, model = found[0], _empty(found[0])
    others = {name: _shape(other) for name, other in preflight.frozen(recipe).items()}
    packed = recipe.engine.precision != "fp16" and device_of(recipe) == "cpu"
    narrow = recipe.engine.precision == "bf16" and machine.multiplies("bf16", "cpu")
    return Size(
        parameters=sum(p.numel() for p in model.parameters()),
        cached=2 * shape.n_layers * shape.kv_heads * shape.head_width,
        context=shape.context,
        longest_prompt=0,
        layers=shape.n_layers,
        outer=sum(p.numel() for name, p in model.named_parameters() if "layers." not in name),
        learned=sum(
            p.numel() for p in lora.learn(model, recipe.train, 0).parameters() if p.requires_grad
        ),
        copied=packed * (2 if narrow else 4),
        frozen=sum(
            p.numel() for one in others.values() if one for p in _empty(one[0]).parameters()
        ),
        frozen_contexts=tuple((name, one[0].context) for name, one in others.items() if one),
    )


def _shape(recipe: Recipe) -> tuple[ModelConfig, Tokenizer] | None:
    """The shape of a recipe's language model, and its tokenizer; None if its files are not here."""
    origin = preflight.origin(recipe)
    path = _local(origin.source)
    if path is None:
        return None
    tokenizer, is_scratch = Tokenizer.load(path), isinstance(origin.model, ScratchConfig)
    return scratch_shape(origin, tokenizer) if is_scratch else models.read_config(path), tokenizer


def shape_of(recipe: Recipe) -> ModelConfig:
    """The shape of a recipe's language model, whose files are here."""
    found = _shape(recipe)
    assert found is not None, "the files were looked for before"
    return found[0]


def _empty(shape: ModelConfig) -> Transformer:
    """A model without memory for its weights."""
    with torch.device("meta"):
        return Transformer(shape)


def check_frozen(recipe: Recipe) -> None:
    """Raises if a teacher does not read the policy's tokens. Models that are not here pass."""
    own = None if isinstance(recipe.model, SorterConfig) else _shape(recipe)
    for setting, other in preflight.frozen(recipe).items():
        theirs = _shape(other)
        if own is None or theirs is None:
            continue
        words, known = (tokenizer.backend.get_vocab() for _, tokenizer in (own, theirs))
        if words != known or theirs[0].vocab_size < own[0].vocab_size:
            differ = len(words.items() ^ known.items())
            raise ModelError(
                f"{setting} = {other.model.name!r} must have the vocabulary of "
                f"{recipe.model.name}, and {differ:,} tokens differ; choose a model with the same "
                "tokenizer"
            )


def check_heads(recipe: Recipe) -> None:
    """Raises if the heads of the policy or of its teacher can't be dealt out to the tensor ranks of
    a mesh. A reward model runs whole on every rank that scores."""
    ranks = recipe.mesh.tensor
    if ranks == 1:
        return
    teacher = preflight.frozen(recipe).get("teacher.model")
    models = {recipe.model.name: _shape(recipe)}
    if teacher is not None:
        models[f"teacher.model = {teacher.model.name!r}"] = _shape(teacher)
    shapes = {name: found[0] for name, found in models.items() if found is not None}
    counts = [n for shape in shapes.values() for n in (shape.n_heads, shape.kv_heads)]
    for name, shape in shapes.items():
        if shape.n_heads % ranks or shape.kv_heads % ranks:
            fit = [str(n) for n in range(1, min(counts) + 1) if not any(m % n for m in counts)]
            raise ConfigError(
                f"mesh.tensor = {ranks} must divide the {shape.n_heads} heads and {shape.kv_heads} "
                f"key and value heads of {name}; use {' or '.join(fit)}"
            )


def check_adapter(recipe: Recipe) -> None:
    """Raises if ``model.adapter`` was made for another model. A model that is not here passes."""
    adapter = getattr(recipe.model, "adapter", None)
    found = None if adapter is None else _shape(recipe)
    if adapter is not None and found is not None:
        put = lora.fill if isinstance(recipe.train.learn, LoraLearns) else lora.fold
        put(lora.learn(_empty(found[0]), recipe.train, 0), peft.read(adapter))


def measured(recipe: Recipe) -> Size:
    size = measure(recipe)
    assert size is not None, "the files were looked for before"
    return size


def scratch_shape(recipe: Recipe, tokenizer: Tokenizer) -> ModelConfig:
    kind = recipe.model
    assert isinstance(kind, ScratchConfig)
    return ModelConfig(
        vocab_size=tokenizer.vocab_size,
        n_layers=kind.layers,
        d_model=kind.width,
        n_heads=kind.heads,
        d_ff=kind.d_ff,
        context=kind.context,
        fp32_head=kind.fp32_head,
    )


def _local(name: str) -> Path | None:
    """The path of a model's files; None if they are not here, since a plan downloads nothing."""
    if name == hub.DEFAULT:
        return hub.default_directory() if hub.default_directory().exists() else None
    if not name.startswith("hf:"):
        return hub.resolve(name)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name.removeprefix("hf:"), local_files_only=True))
    except (ImportError, OSError, ValueError):
        return None


def settled(recipe: Recipe) -> Recipe:
    """The recipe as it would run on this machine: no precision is left open."""
    native = machine.multiplies("bf16", device_of(recipe))
    return config.with_precision(recipe, "bf16" if native else "fp32")


def device_of(recipe: Recipe) -> str:
    if recipe.device != "auto":
        return recipe.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def check_device(recipe: Recipe) -> None:
    """Raises if torch does not find the GPU that the recipe names."""
    name, _, number = recipe.device.partition(":")
    known = torch.cuda.device_count()
    if name == "cuda" and int(number or 0) >= known:
        told = counted(known, "CUDA device") if known else "no CUDA device"
        raise ConfigError(f"device = '{recipe.device}' but torch finds {told}; use 'auto'")
    if recipe.engine.sleep and device_of(recipe) == "cpu":
        raise ConfigError("engine.sleep = true frees memory of a GPU, and none is used; remove it")


def shared_memory(recipe: Recipe) -> int:
    """Bytes of shared memory that a run on Ray takes at most for the weights of all versions that
    are in use at once, and for the learner's state when it is saved or loaded."""
    if isinstance(recipe.model, SorterConfig):
        return LITTLE
    recipe, size = settled(recipe), measured(recipe)
    merges = isinstance(recipe.train.learn, LoraLearns)
    learned = size.parameters if merges or size.learned is None else size.learned
    loop = recipe.loop
    versions = 2 + (loop.lag if isinstance(loop, LaggedLoop) else recipe.runtime.generators)
    state = 0 if recipe.mesh.ranks > 1 else checkpoint(recipe, size)
    return versions * BYTES[recipe.train.precision] * learned + state


def check_room(recipe: Recipe, path: Path) -> None:
    """Refuses a run whose model does not fit, once its files are here."""
    if not isinstance(recipe.model, SorterConfig):
        for one in (recipe, *preflight.frozen(recipe).values()):
            hub.resolve(preflight.origin(one).source)
        check_frozen(recipe)
        check_heads(recipe)
        check_adapter(recipe)
        size = measured(recipe)
        preflight.raise_all(lacking_room(recipe, path, size))
        if not recipe.is_supervised:
            room(recipe, size)  # it raises if there is none


def lacking_room(recipe: Recipe, path: Path, size: Size | None) -> list[BurnishError]:
    """Too little disk or memory; ``size`` is None if the model is not here."""
    if size is None:
        return []
    device, found = device_of(recipe), needs(recipe, size)
    total, free = machine.memory(device)
    if device == "cpu":  # ranks share the machine's memory
        ranks = recipe.mesh.ranks if recipe.on_mesh else 1
        is_own = [n.resource == "memory" and n.what != ENGINE for n in found]
        found = [n._replace(size=n.size * ranks**own) for n, own in zip(found, is_own, strict=True)]
    else:  # all of the cache is taken at once
        found = [n._replace(resource="memory") if n.resource == "cache" else n for n in found]
    saved = sum(file.stat().st_size for file in (path / "checkpoints").rglob("*"))
    there = {"memory": free, "cache": total, "disk": machine.disk(path) + saved}
    return preflight.lacking(found, there)
