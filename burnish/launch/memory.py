"""Measures a model, and checks that it fits the device, the memory and the disk of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from burnish.console.progress import tell
from burnish.console.text import counted
from burnish.errors import BurnishError, ConfigError, ModelError, RunError
from burnish.launch.models import ModelSource, find_device
from burnish.machine import hardware
from burnish.model import lora, peft
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe.activations import Widths
from burnish.recipe.costs import ACTIVATIONS, ENGINE, Need, Size, format_bytes
from burnish.recipe.recipe import TrainConfig
from burnish.recipe.trainable import LoraLearns

REMEDIES = {
    "memory": "end other programs, lower engine.kv_mb, or use a smaller model or a larger machine",
    "cache": "lower engine.kv_mb",
    "main memory": "end other programs, remove train.offload, or use a larger machine",
    "disk": "make room, choose another --out, or lower checkpoint.keep",
}


def measure_model(
    source: ModelSource,
    frozen: Mapping[str, ModelSource],
    train: TrainConfig,
    engine_precision: str,
    device: str,
) -> Size:
    """Count the parameters, layers and cache entries of the policy ``source``, and the parameters
    of the frozen models beside it (teacher and reward model, by the setting that names them).
    Weights are not loaded. The length of the longest prompt is left at 0."""
    shape, model = source.shape, _empty(source.shape)
    packed = engine_precision != "fp16" and device == "cpu"
    narrow = engine_precision == "bf16" and hardware.supports_precision("bf16", "cpu")
    others = [_empty(other.shape) for other in frozen.values()]
    return Size(
        parameters=sum(p.numel() for p in model.parameters()),
        cached=2 * shape.n_layers * shape.kv_heads * shape.head_width,
        context=shape.context,
        longest_prompt=0,
        layers=shape.n_layers,
        outer=sum(p.numel() for name, p in model.named_parameters() if "layers." not in name),
        learned=sum(p.numel() for p in lora.learn(model, train, 0).parameters() if p.requires_grad),
        copied=packed * (2 if narrow else 4),
        frozen=sum(p.numel() for other in others for p in other.parameters()),
        frozen_contexts=tuple((setting, other.shape.context) for setting, other in frozen.items()),
        widths=None if device == "cpu" else widths_of(shape),
    )


def widths_of(shape: ModelConfig) -> Widths:
    """Return the widths of a model's tensors, which determine the memory of its activations."""
    return Widths(
        model=shape.d_model,
        queries=shape.n_heads * shape.head_width,
        keys=shape.kv_heads * shape.head_width,
        mlp=shape.d_ff,
        heads=shape.n_heads,
        key_heads=shape.kv_heads,
        vocabulary=shape.vocab_size,
        is_tied=shape.tied,
        has_head_norms=shape.family == "qwen3",
        has_fp32_head=shape.fp32_head,
    )


def _empty(shape: ModelConfig) -> Transformer:
    """Return a transformer of this shape on the meta device, which allocates no weights."""
    with torch.device("meta"):
        return Transformer(shape)


def check_vocabulary(policy: ModelSource, frozen: Mapping[str, ModelSource]) -> None:
    """Raise a ModelError if a frozen model does not have the policy's vocabulary."""
    for setting, other in frozen.items():
        own, theirs = (one.tokenizer.backend.get_vocab() for one in (policy, other))
        if own != theirs or other.shape.vocab_size < policy.shape.vocab_size:
            differ = len(own.items() ^ theirs.items())
            raise ModelError(
                f"{setting} = {other.name!r} must have the vocabulary of {policy.name}, and "
                f"{differ:,} tokens differ; choose a model with the same tokenizer"
            )


def check_heads(ranks: int, policy: ModelSource, teacher: ModelSource | None) -> None:
    """Raise a ConfigError if the attention heads of the policy or the teacher can't be divided
    among ``ranks`` tensor ranks.

    A reward model is not checked, because it is not divided.
    """
    shapes = {policy.name: policy.shape}
    if teacher is not None:
        shapes[f"teacher.model = {teacher.name!r}"] = teacher.shape
    counts = [n for shape in shapes.values() for n in (shape.n_heads, shape.kv_heads)]
    for name, shape in shapes.items():
        if shape.n_heads % ranks or shape.kv_heads % ranks:
            fit = [str(n) for n in range(1, min(counts) + 1) if not any(m % n for m in counts)]
            raise ConfigError(
                f"mesh.tensor = {ranks} must divide the {shape.n_heads} heads and {shape.kv_heads} "
                f"key and value heads of {name}; use {' or '.join(fit)}"
            )


def check_adapter_shape(source: ModelSource, train: TrainConfig) -> None:
    """Raise an error if the adapter of a model does not have the model's shapes, because it was
    made for another model."""
    if source.adapter is not None:
        put = lora.load_adapter if isinstance(train.learn, LoraLearns) else lora.fold
        put(lora.learn(_empty(source.shape), train, 0), peft.read_adapter(source.adapter))


def check_device(setting: str, *, sleep: bool) -> None:
    """Raise a ConfigError if torch does not find the GPU that the setting ``device`` names, or if
    the engine is to free GPU memory (``sleep``) and no GPU is used."""
    name, _, number = setting.partition(":")
    known = torch.cuda.device_count()
    if name == "cuda" and int(number or 0) >= known:
        found = counted(known, "CUDA device") if known else "no CUDA device"
        raise ConfigError(f"device = '{setting}' but torch finds {found}; use 'auto'")
    if sleep and find_device(setting) == "cpu":
        raise ConfigError("engine.sleep = true frees memory of a GPU, and none is used; remove it")


def check_offload(train: TrainConfig, device: str) -> None:
    """Raise a ConfigError if a learner on ``device`` is to free GPU memory and uses no GPU. On Ray,
    only the learner's actor knows its device; programs without a learner need no check."""
    if train.offload and device == "cpu":
        raise ConfigError("train.offload = true frees memory of a GPU, and none is used; remove it")


def missing_room(
    needed: Sequence[Need], device: str, out: Path, *, ranks: int
) -> list[BurnishError]:
    """Return an error for each of memory, cache and disk that is too small for a run in the
    directory ``out``.

    ``needed`` lists the memory of one rank's learner, and the memory, cache and disk space of all
    other components. On a CPU, the ranks share the machine's memory. The checkpoints that the
    directory already has count as free disk space. Activations are not counted, because responses
    may be shorter than estimated.
    """
    needed = [need for need in needed if need.what != ACTIVATIONS]
    total, free = hardware.memory(device)
    if device == "cpu":  # the ranks share the machine's memory
        each = [need.resource == "memory" and need.what != ENGINE for need in needed]
        needed = [n._replace(size=n.size * ranks**e) for n, e in zip(needed, each, strict=True)]
    else:  # the whole cache is allocated at the start
        needed = [n._replace(resource="memory") if n.resource == "cache" else n for n in needed]
    saved = sum(file.stat().st_size for file in (out / "checkpoints").rglob("*"))
    available = {"memory": free, "cache": total, "disk": hardware.disk(out) + saved}
    if device != "cpu":
        available["main memory"] = hardware.memory("cpu")[1]
    return compare_needs(needed, available)


def warn_of_activations(needed: Sequence[Need], device: str) -> None:
    """Print a note if a run may not fit into the GPU's memory with responses of the maximum length,
    although it would fit without activations."""
    sizes = {n.what: n.size for n in needed if n.resource in ("memory", "cache")}
    whole, free = sum(sizes.values()), hardware.memory(device)[1]
    if ACTIVATIONS in sizes and whole > free:
        tell(
            "note",
            f"note: with responses of the maximum length the run may need {format_bytes(whole)} of "
            f"GPU memory, of which activations are {format_bytes(sizes[ACTIVATIONS])}, and "
            f"{format_bytes(free)} are available; if it runs out of memory, lower "
            "train.micro_tokens or set train.recompute",
        )


def compare_needs(needed: Sequence[Need], available: Mapping[str, int]) -> list[BurnishError]:
    """Return an error for each resource of which the needs together exceed the available bytes. A
    resource that is not in ``available`` is not checked."""
    found: list[BurnishError] = []
    for resource, room in available.items():
        parts = sorted((need.size, need.what) for need in needed if need.resource == resource)
        whole = sum(size for size, _ in parts)
        if whole > room:
            most = ", ".join(f"{what} {format_bytes(size)}" for size, what in reversed(parts[-3:]))
            needs_text = f"the run needs {format_bytes(whole)} of {resource} (the most: {most})"
            have = f"{format_bytes(room)} are available"
            found.append(RunError(f"{needs_text}, and {have}; {REMEDIES[resource]}"))
    return found
