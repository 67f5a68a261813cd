"""Adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.errors import ModelError
from burnish.model.tensor_files import write_tensors

if TYPE_CHECKING:
    import torch

    from burnish.model.lora import Adapter

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
NO_EFFECT = {
    *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_version", "revision"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"),
    *("lora_dropout", "eva_config", "megatron_core", "qalora_group_size", "runtime_config"),
}
"""Fields of adapter_config.json that do not change the adapter's function: the modules are read
from the tensors' names, dropout acts only in training, and the others describe the file or belong
to a feature that is off."""
ACCEPTED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "task_type": (None, "CAUSAL_LM"),
    "bias": ("none",),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva", "mica"),
}
"""Accepted values of fields that may be set. The other initializations of PEFT (PiSSA, OLoRA,
CorDA, LoRA-GA, LoftQ) also change the weights of the base model."""
OFF: tuple[Any, ...] = (None, False, [], {})
"""Accepted values of every other field, including fields that a later version of PEFT adds."""


def read_adapter_config(directory: Path | str) -> dict[str, Any]:
    """Read adapter_config.json and return all of its settings. Raise a ModelError if the file can't
    be read, if the adapter does not compute W x + (alpha / rank) · B A x, or if a setting that
    burnish does not know is on."""
    path = Path(directory).expanduser() / CONFIG
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        _ = found["peft_type"], found["r"], found["lora_alpha"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"model.adapter = '{directory}' is not an adapter in PEFT's layout ({error!r}); it "
            f"needs {CONFIG} and {TENSORS}, as `burnish export --adapter` writes them"
        ) from error
    wrong = [key for key in sorted(found) if not _is_plain(key, found[key])]
    if wrong:
        listed = ", ".join(f"{key} = {found[key]!r}" for key in wrong)
        remedy = "merge it into its model with PEFT, and give that model as model.name"
        if "init_lora_weights" in wrong:
            remedy += ", or save it again with PEFT's path_initial_model_for_weight_conversion"
        if "alora_invocation_tokens" in wrong:
            remedy = "it can't be merged, because it acts on some tokens only: train plain LoRA"
        raise ModelError(
            f"model.adapter = '{directory}' must be plain LoRA, got {listed}; {remedy}"
        )
    return found


def _is_plain(key: str, value: Any) -> bool:
    if key == "r":
        return type(value) is int and value > 0
    if key == "lora_alpha":
        return type(value) in (int, float) and math.isfinite(value)
    accepted = ACCEPTED.get(key, OFF)
    # Compare types too, because 0 == False and 1 == True.
    return key in NO_EFFECT or any(type(value) is type(x) and value == x for x in accepted)


def read_adapter(directory: Path | str) -> Adapter:
    """Read an adapter in PEFT's layout from a directory, onto the CPU. Raise a ModelError if
    `read_adapter_config` does, or if the tensors are missing or are not pairs of A and B."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from burnish.model.lora import Adapter

    config, path = read_adapter_config(directory), Path(directory).expanduser() / TENSORS
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} is missing or damaged ({error}); export it again") from error
    modules = {name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors}
    ends = ("lora_A.weight", "lora_B.weight")
    wanted = {f"{PREFIX}{module}.{end}" for module in modules for end in ends}
    if wanted ^ set(tensors) or not tensors:
        listed = ", ".join(sorted(wanted ^ set(tensors))[:4]) or "all"
        raise ModelError(
            f"{path} must hold a pair lora_A, lora_B for each linear layer and nothing else; "
            f"missing or unknown tensors: {listed}"
        )
    pairs = {
        m: (tensors[f"{PREFIX}{m}.{ends[0]}"], tensors[f"{PREFIX}{m}.{ends[1]}"]) for m in modules
    }
    return Adapter(config["r"], float(config["lora_alpha"]), pairs)


def write_adapter(
    adapter: Adapter, directory: Path | str, *, base: str, dtype: torch.dtype | None = None
) -> None:
    """Write an adapter to a directory in PEFT's layout; create the directory if needed. ``base`` is
    the path of the base model's directory, or its name on the Hugging Face hub, for
    adapter_config.json. ``dtype`` is the type of the tensors in the file; None for float32."""
    import torch

    directory, dtype = Path(directory), dtype or torch.float32
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"{PREFIX}{module}.lora_{kind}.weight": tensor.to("cpu", dtype).contiguous()
        for module, pair in adapter.pairs.items()
        for kind, tensor in zip("AB", pair, strict=True)
    }
    write_tensors(tensors, directory / TENSORS, {"format": "pt"})
    layers = sorted({int(module.split(".")[2]) for module in adapter.pairs})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": int(adapter.alpha) if adapter.alpha.is_integer() else adapter.alpha,
        "target_modules": sorted({module.rpartition(".")[2] for module in adapter.pairs}),
        "layers_to_transform": layers,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
