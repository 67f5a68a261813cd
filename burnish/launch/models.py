"""The language models that recipes and runs name, opened from their files."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from burnish import preflight
from burnish.model import checkpoint, hub, lora, peft
from burnish.model.reward import RewardModel
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import Transformer
from burnish.progress import tell
from burnish.runs import checkpoints
from burnish.schema.learning import LoraLearns
from burnish.schema.models import LanguageConfig
from burnish.schema.recipe import Recipe
from burnish.schema.tasks import PreferencesTask
from burnish.sizes import scratch_shape, settled

BASE = "base"
"""The folder of an exported adapter that has the adapter's base model, if it has to be written."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


class Opened(NamedTuple):
    model: Transformer
    tokenizer: Tokenizer
    path: Path
    """Where the tokenizer came from."""


def open_tokenizer(recipe: Recipe) -> Tokenizer:
    return Tokenizer.load(hub.resolve(preflight.origin(recipe).source))


def open_model(recipe: Recipe, dtype: torch.dtype = torch.float32) -> Opened:
    """The recipe's language model, with the adapter merged that ``model.adapter`` names.

    If the model's name is a run's directory, the model is the run's best checkpoint.
    """
    adapter = _adapter(recipe)
    opened = _open_base(recipe, dtype if adapter is None else torch.float32)
    if adapter is not None:
        lora.fold(opened.model, peft.read(adapter)).to(dtype)
    return opened


def open_policy(recipe: Recipe, dtype: torch.dtype = torch.float32) -> Opened:
    """The recipe's model as it begins to learn. If ``train.learn`` is LoRA, the adapter that
    ``model.adapter`` names goes on learning; otherwise it is merged."""
    has_lora, adapter = isinstance(recipe.train.learn, LoraLearns), _adapter(recipe)
    opened = (_open_base if has_lora else open_model)(recipe, dtype)
    lora.learn(opened.model, recipe.train, recipe.seed)
    if has_lora and adapter is not None:
        lora.fill(opened.model, peft.read(adapter))
    return opened


def learned(recipe: Recipe, opened: Opened) -> Transformer | RewardModel:
    """The model that a recipe's run learns: as opened, or a reward model around it."""
    if not isinstance(recipe.task, PreferencesTask):
        return opened.model
    tokenizer = opened.tokenizer
    pad = tokenizer.backend.token_to_id(tokenizer.special.get("pad_token", ""))
    return RewardModel(opened.model, tokenizer.end_ids[0] if pad is None else pad)


def open_run(run: Recipe, chosen: Path) -> tuple[Opened, Transformer | RewardModel]:
    """The model of a run at a checkpoint, in fp32, with the run's adapter beside it if it has one;
    and the model that the run learned, see `learned`.

    A checkpoint holds the weights that learned. The others are as the run computed with them.
    """
    if run.train.learn.name == "all":
        opened = _open_origin(preflight.origin(run), torch.float32)
    else:
        opened = open_policy(run, DTYPES[settled(run).train.precision])
    model, (tensors, _) = learned(run, opened), checkpoints.load(chosen)
    for name, parameter in model.float().named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(tensors[f"policy.master.{name}"])
    return opened, model


def write_run(
    run: Recipe, chosen: Path, target: Path, *, adapter: bool = False, final: Path | None = None
) -> None:
    """Writes the model of a run at a checkpoint in Hugging Face's layout, its adapter merged; or
    the adapter alone, in PEFT's, which names the model that it was made for.

    If only burnish can open that model, it is written to the folder ``base`` of the target.
    ``final``: the path that the target is going to have; None if it stays where it is.
    """
    opened, model = open_run(run, chosen)
    own = lora.adapter_of(opened.model)
    if adapter and own is not None:
        base = named_base(run)
        peft.write(own, target, base=base or str((final or target).resolve() / BASE))
        if base is None:
            plain = lora.without(opened.model)
            checkpoint.save(plain, target / BASE, source=opened.path)
        return None
    lora.fold(opened.model)
    if isinstance(model, RewardModel):
        return model.save(target, source=opened.path)
    return checkpoint.save(model, target, source=opened.path)


def named_base(run: Recipe) -> str | None:
    """The name by which other programs load the model that a run's adapter was made for: a name on
    Hugging Face's hub or a directory; None if the model is a run or began with random weights."""
    if not isinstance(run.model, LanguageConfig) or preflight.run_of(run) is not None:
        return None
    if run.model.name.startswith("hf:"):
        return run.model.name.removeprefix("hf:")
    return str(hub.resolve(run.model.name).resolve())


def _open_base(recipe: Recipe, dtype: torch.dtype) -> Opened:
    """The recipe's model without its adapter."""
    run, kind = preflight.run_of(recipe), recipe.model
    if run is None or not isinstance(kind, LanguageConfig):
        return _open_origin(recipe, dtype)
    opened, _ = open_run(run, checkpoints.choose(Path(kind.name), "best"))
    opened.model.config = replace(opened.model.config, fp32_head=kind.fp32_head)
    lora.fold(opened.model).learn().to(dtype)
    return opened


def _open_origin(origin: Recipe, dtype: torch.dtype) -> Opened:
    path = hub.resolve(origin.source)
    tell("load", f"loading {origin.model.name} in {str(dtype).removeprefix('torch.')}")
    tokenizer = Tokenizer.load(path)
    if isinstance(origin.model, LanguageConfig):
        model = checkpoint.load(path, dtype=dtype, fp32_head=origin.model.fp32_head)
    else:
        model = Transformer(scratch_shape(origin, tokenizer)).init_weights(origin.seed).to(dtype)
    return Opened(model, tokenizer, path)


def _adapter(recipe: Recipe) -> str | None:
    """The directory of an adapter; None if the model has none."""
    return recipe.model.adapter if isinstance(recipe.model, LanguageConfig) else None
