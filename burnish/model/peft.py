"""Adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.errors import ModelError

if TYPE_CHECKING:
    from burnish.model.lora import Adapter

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PLAIN = (
    *("use_rslora", "use_dora", "fan_in_fan_out", "lora_bias", "modules_to_save", "bias"),
    *("rank_pattern", "alpha_pattern", "layer_replication", "trainable_token_indices"),
)
"""Settings of PEFT that must be off: burnish has LoRA as its paper has it."""
PREFIX = "base_model.model."


def read_config(directory: Path | str) -> dict[str, Any]:
    """The settings of an adapter; other kinds than plain LoRA are refused."""
    path = Path(directory).expanduser() / CONFIG
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        kind, _, _ = found["peft_type"], found["r"], found["lora_alpha"]
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"model.adapter = '{directory}' is no adapter in PEFT's layout ({error!r}); it needs "
            f"{CONFIG} and {TENSORS}, as `burnish export --adapter` writes them"
        ) from error
    more = [f"{key} = {found[key]!r}" for key in PLAIN if found.get(key) not in OFF]
    if kind != "LORA" or more:
        told = ", ".join([f"peft_type = {kind!r}", *more])
        raise ModelError(
            f"model.adapter = '{directory}' must be plain LoRA, got {told}; merge it into its "
            "model with PEFT, and give that model as model.name"
        )
    return found


OFF: tuple[Any, ...] = (None, False, "none", [], {})


def read(directory: Path | str) -> Adapter:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from burnish.model.lora import Adapter

    config, path = read_config(directory), Path(directory).expanduser() / TENSORS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is missing or damaged ({error}); export it again") from error
    modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}
    ends = ("lora_A.weight", "lora_B.weight")
    wanted = {f"{PREFIX}{module}.{end}" for module in modules for end in ends}
    if wanted ^ set(tensors) or not tensors:
        told = ", ".join(sorted(wanted ^ set(tensors))[:4]) or "nothing"
        raise ModelError(
            f"{path} must hold a pair lora_A, lora_B for each linear layer and nothing else; these "
            f"lack or are not known: {told}"
        )
    pairs = {
        m: (tensors[f"{PREFIX}{m}.{ends[0]}"], tensors[f"{PREFIX}{m}.{ends[1]}"]) for m in modules
    }
    return Adapter(config["r"], float(config["lora_alpha"]), pairs)


def write(adapter: Adapter, directory: Path | str, *, base: str) -> None:
    """``base`` names the model that the adapter changes."""
    from safetensors.torch import save_file

    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{PREFIX}{module}.lora_{kind}.weight": tensor.float().cpu().contiguous()
        for module, pair in adapter.pairs.items()
        for kind, tensor in zip("AB", pair, strict=True)
    }
    save_file(tensors, directory / TENSORS, metadata={"format": "pt"})
    layers = sorted({int(module.split(".")[2]) for module in adapter.pairs})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base.removeprefix("hf:"),
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in adapter.pairs}),
        "layers_to_transform": layers,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
