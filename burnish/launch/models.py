"""Finds the language models that recipes name, and opens and writes their files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from burnish.console.progress import tell
from burnish.errors import ConfigError, ModelError
from burnish.launch.preflight import Model, read_run_recipe
from burnish.machine import hardware
from burnish.model import checkpoint, hub, lora, peft
from burnish.model.reward import RewardModel
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe.load import with_precision
from burnish.recipe.models import ScratchConfig
from burnish.recipe.recipe import Recipe, TrainConfig
from burnish.recipe.tasks import PreferencesTask
from burnish.recipe.trainable import LoraLearns
from burnish.runs import checkpoints

BASE = "base"
"""Folder of an exported adapter that holds the adapter's base model, if it has to be written."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class ModelSource:
    """A language model whose files are on this machine."""

    name: str
    """The model's name in the recipe."""
    files: Path
    """Directory of the tokenizer and, unless the weights are random, of the weights."""
    shape: ModelConfig
    tokenizer: Tokenizer
    fp32_head: bool
    seed: int | None
    """Seed of random weights; None if ``files`` holds the weights."""
    adapter: str | None
    """Directory of a PEFT adapter; None if there is none."""
    run: RunSource | None = None
    """The run that trained the model; None if the model is not a run."""


@dataclass(frozen=True)
class RunSource:
    """A run whose checkpoints hold a model."""

    path: Path
    base: ModelSource
    """The model that the run started from."""
    train: TrainConfig
    """The run's training settings; the precision is not "auto"."""
    seed: int
    learns_reward: bool
    """Whether the run trained a reward model."""


def find_device(setting: str) -> str:
    """Return the device that a recipe's ``device`` selects on this machine."""
    if setting != "auto":
        return setting
    return "cuda" if torch.cuda.is_available() else "cpu"


def with_own_precision(recipe: Recipe) -> Recipe:
    """Return the recipe with each precision "auto" replaced: by bf16 if the recipe's device has
    native support for it, otherwise by fp32."""
    native = hardware.supports_precision("bf16", find_device(recipe.device))
    return with_precision(recipe, "bf16" if native else "fp32")


def find_model(model: Model, seed: int, *, fetch: bool = True) -> ModelSource | None:
    """Return the source (files, shape and tokenizer) of the language model that a section of a
    recipe names. Weights are not loaded.

    A model that is not on this machine is downloaded; without ``fetch``, the result is None
    instead. ``seed`` is the seed of the weights if the model has random weights. Raise a
    ConfigError if the model is a run that trained a reward model or the sorting model.
    """
    run = read_run_recipe(model)
    if run is not None:
        if isinstance(run.task, PreferencesTask):
            raise ConfigError(
                f"{model.name} is a run that trained a reward model, which can't sample; to use it "
                f"as reward_model.name, write it with: burnish export {model.name} DIRECTORY"
            )
        source = find_run(run, Path(model.name).expanduser(), fetch=fetch)
        if source is None:
            return None
        return replace(
            source.base,
            name=model.name,
            fp32_head=model.fp32_head,
            adapter=model.adapter,
            run=source,
        )
    files = hub.resolve_model(model.files) if fetch else hub.find_local(model.files)
    if files is None:
        return None
    tokenizer = Tokenizer.load(files)
    if isinstance(model, ScratchConfig):
        shape = _scratch_shape(model, tokenizer.vocab_size)
        return ModelSource(model.name, files, shape, tokenizer, model.fp32_head, seed, None)
    shape = checkpoint.read_model_config(files)
    return ModelSource(model.name, files, shape, tokenizer, model.fp32_head, None, model.adapter)


def find_run(run: Recipe, path: Path, *, fetch: bool = True) -> RunSource | None:
    """Return the source of the model that a run has trained. ``run`` is the run's recipe, ``path``
    its directory. The model that the run started from is downloaded if it is not on this machine;
    without ``fetch``, the result is None instead. Raise a ConfigError for the sorting model."""
    if not run.model.is_language:
        raise ConfigError(f"{path} trained the sorting model, which is not a language model")
    base = find_model(run.model, run.seed, fetch=fetch)
    if base is None:
        return None
    learns_reward = isinstance(run.task, PreferencesTask)
    return RunSource(path, base, with_own_precision(run).train, run.seed, learns_reward)


def _scratch_shape(model: ScratchConfig, vocab_size: int) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab_size,
        n_layers=model.layers,
        d_model=model.width,
        n_heads=model.heads,
        d_ff=model.d_ff,
        context=model.context,
        family="qwen3" if model.qk_norm else "llama",
        init_std=model.init_std,
        fp32_head=model.fp32_head,
    )


def open_model(source: ModelSource, dtype: torch.dtype = torch.float32) -> Transformer:
    """Load a model on the CPU, with its adapter merged if it has one. For a run, load its best
    checkpoint: the checkpoint with the best validation score, or else the last."""
    _tell_load(source, dtype)
    return _open_merged(source, dtype)


def _open_merged(source: ModelSource, dtype: torch.dtype) -> Transformer:
    model = _open_base(source, dtype if source.adapter is None else torch.float32)
    if source.adapter is not None:
        lora.fold(model, peft.read_adapter(source.adapter)).to(dtype)
    return model


def open_policy(
    source: ModelSource, train: TrainConfig, seed: int, dtype: torch.dtype = torch.float32
) -> Transformer:
    """Load a model for training, on the CPU, and make only the weights that ``train.learn`` selects
    trainable. If it selects LoRA, an adapter is added, which starts with the weights of the
    source's adapter or, if the source has none, is initialized from ``seed``. Otherwise the
    source's adapter is merged into the weights."""
    _tell_load(source, dtype)
    return _open_learned(source, train, seed, dtype)


def _open_learned(
    source: ModelSource, train: TrainConfig, seed: int, dtype: torch.dtype
) -> Transformer:
    has_lora = isinstance(train.learn, LoraLearns)
    model = (_open_base if has_lora else _open_merged)(source, dtype)
    lora.learn(model, train, seed)
    if has_lora and source.adapter is not None:
        lora.load_adapter(model, peft.read_adapter(source.adapter))
    return model


def with_reward_head(model: Transformer, tokenizer: Tokenizer) -> RewardModel:
    """Return a reward model with this transformer, not a copy, as its body and a new head."""
    pad = tokenizer.backend.token_to_id(tokenizer.special.get("pad_token", ""))
    return RewardModel(model, tokenizer.end_ids[0] if pad is None else pad)


def open_run(run: RunSource, chosen: Path) -> tuple[Transformer, Transformer | RewardModel]:
    """Load the model of a run at the checkpoint ``chosen``, in fp32.

    Return the transformer, and the model that the run trained: the transformer itself, or a reward
    model around it. The run's adapter is not merged. A checkpoint holds only the trained weights.
    The other weights come from the base model, rounded to the run's precision.
    """
    if run.train.learn.name == "all":
        transformer = _open_first(run.base, torch.float32)
    else:
        dtype = DTYPES[run.train.precision]
        transformer = _open_learned(run.base, run.train, run.seed, dtype)
    model: Transformer | RewardModel = transformer
    if run.learns_reward:
        model = with_reward_head(transformer, run.base.tokenizer)
    tensors, _ = checkpoints.load_checkpoint(chosen)
    for name, parameter in model.float().named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(tensors[f"policy.master.{name}"])
    return transformer, model


def write_run(
    run: RunSource,
    chosen: Path,
    target: Path,
    *,
    adapter: bool = False,
    dtype: torch.dtype = torch.float32,
    final: Path | None = None,
) -> None:
    """Write the model of a run at the checkpoint ``chosen`` to the directory ``target``.

    The model is written in Hugging Face's layout, with the run's adapter merged. With ``adapter``,
    only the adapter that the run trained is written, in PEFT's layout, with the name of its base
    model. A base model that only burnish can load is written to the folder ``base`` of the target.
    ``dtype`` is the type of all tensors that are written. ``final`` is the path that the target
    will be renamed to; None if it is not renamed.
    """
    transformer, model = open_run(run, chosen)
    own = lora.adapter_of(transformer)
    if adapter and own is not None:
        base = loadable_name(run.base)
        name = base or str((final or target).resolve() / BASE)
        _check_range([tensor for pair in own.pairs.values() for tensor in pair], dtype)
        peft.write_adapter(own, target, base=name, dtype=dtype)
        if base is None:
            plain = _rounded(lora.without(transformer), dtype)
            checkpoint.save_model(plain, target / BASE, source=run.base.files)
        return None
    lora.fold(transformer)
    model = _rounded(model, dtype)
    if isinstance(model, RewardModel):
        return model.save(target, source=run.base.files)
    return checkpoint.save_model(model, target, source=run.base.files)


def _rounded(model: Transformer | RewardModel, dtype: torch.dtype) -> Transformer | RewardModel:
    """Round a model's weights to ``dtype``, in place; return the model. Raise a ModelError if a
    weight would become infinite."""
    _check_range(model.parameters(), dtype)
    return model.to(dtype)


def _check_range(tensors: Iterable[torch.Tensor], dtype: torch.dtype) -> None:
    """Raise a ModelError if a value would become infinite in ``dtype``."""
    limit = torch.finfo(dtype).max
    largest = max(float(tensor.detach().abs().max()) for tensor in tensors)
    if largest > limit:
        name = str(dtype).removeprefix("torch.")
        raise ModelError(
            f"the weights reach {largest:g}, and {name} ends at {limit:g}; export with --dtype "
            "bf16 or fp32"
        )


def loadable_name(source: ModelSource) -> str | None:
    """Return the name by which other programs load a model: a name on Hugging Face's hub, or a
    directory. None if the model is a run or has random weights."""
    if source.run is not None or source.seed is not None:
        return None
    if source.name.startswith("hf:"):
        return source.name.removeprefix("hf:")
    return str(source.files.resolve())


def _tell_load(source: ModelSource, dtype: torch.dtype) -> None:
    """Tell the user which model is loaded, by the name that the recipe gives it."""
    tell("load", f"loading {source.name} in {str(dtype).removeprefix('torch.')}")


def _open_base(source: ModelSource, dtype: torch.dtype) -> Transformer:
    """Load a model without merging ``source.adapter``. For a run, load its best checkpoint, with
    the adapter that the run trained merged."""
    if source.run is None:
        return _open_first(source, dtype)
    model, _ = open_run(source.run, checkpoints.find_checkpoint(source.run.path, "best"))
    model.config = replace(model.config, fp32_head=source.fp32_head)
    lora.fold(model).learn().to(dtype)
    return model


def _open_first(source: ModelSource, dtype: torch.dtype) -> Transformer:
    """Load a model that is not a run, from its files, or create it with random weights."""
    if source.seed is None:
        return checkpoint.load_model(source.files, dtype=dtype, fp32_head=source.fp32_head)
    shape = replace(source.shape, fp32_head=source.fp32_head)
    return Transformer(shape).init_weights(source.seed).to(dtype)
