"""Checkpoints: Hugging Face directories (safetensors) read and written, GGUF files read.

Hugging Face's names are the exchange format; inside, q, k, v and gate, up are fused. Pickles are
never read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from burnish.errors import ModelError
from burnish.model.transformer import Layer, ModelConfig, Transformer

COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)
"""What a model directory holds beside config and weights; `save` copies it from the source."""


def load(
    path: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    fp32_head: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Transformer:
    """The model in a Hugging Face directory or in a GGUF file, on the CPU."""
    path = Path(path)
    if path.suffix == ".gguf":
        from burnish.model.gguf import Gguf

        gguf = Gguf(path)
        config = gguf.config()
        state = gguf.state(config, progress)
    else:
        config = read_config(path)
        state = read_state(path)
    model = Transformer(replace(config, fp32_head=fp32_head)).to(dtype)
    load_hf_state(model, state)
    return model


def save(model: Transformer, directory: Path | str, *, source: Path | str | None = None) -> None:
    """Write a directory that transformers loads; tokenizer and end ids are copied from `source`."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.cpu().contiguous() for name, tensor in hf_state(model).items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    hf = model.config.to_hf() | {"dtype": str(model.embed.weight.dtype).removeprefix("torch.")}
    if source is not None:
        given = _read_json(Path(source) / "config.json")
        hf |= {key: given[key] for key in given if key.endswith("_token_id")}
        for name in COMPANIONS:
            if (Path(source) / name).exists():
                shutil.copyfile(Path(source) / name, directory / name)
    (directory / "config.json").write_text(json.dumps(hf, indent=2) + "\n")


def read_config(path: Path) -> ModelConfig:
    """The shape of the model in a Hugging Face directory or in a GGUF file."""
    if path.suffix == ".gguf":
        from burnish.model.gguf import Gguf

        return Gguf(path).config()
    return ModelConfig.from_hf(_read_json(path / "config.json"))


def read_state(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory, from one safetensors file or from the shards of an index."""
    index = directory / "model.safetensors.index.json"
    if index.exists():
        files = sorted({directory / name for name in _read_json(index)["weight_map"].values()})
    else:
        files = [directory / "model.safetensors"]
    state: dict[str, Tensor] = {}
    for file in files:
        if not file.exists():
            pickled = " (pickled weights are never read)" if any(directory.glob("*.bin")) else ""
            raise ModelError(f"{file} is missing{pickled}; a model directory needs safetensors")
        try:
            with safe_open(file, framework="pt") as opened:
                state |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ModelError(f"{file} is damaged ({error}); fetch it again") from error
    return state


def hf_state(model: Transformer) -> dict[str, Tensor]:
    """Hugging Face name -> view into the model's own storage, without gradient; clone to keep."""
    views: dict[str, Tensor] = {
        "model.embed_tokens.weight": model.embed.weight,
        "model.norm.weight": model.norm.weight,
    }
    if model.head is not None:
        views["lm_head.weight"] = model.head.weight
    for layer in model.layers:
        assert isinstance(layer, Layer)
        for name, view in _layer_views(layer, model.config).items():
            views[f"model.layers.{layer.index}.{name}"] = view
    return {name: view.detach() for name, view in views.items()}


def _layer_views(layer: Layer, config: ModelConfig) -> dict[str, Tensor]:
    gate, up = layer.gate_up.weight.chunk(2)
    views = {
        "input_layernorm.weight": layer.attention_norm.weight,
        "post_attention_layernorm.weight": layer.mlp_norm.weight,
        "self_attn.o_proj.weight": layer.out.weight,
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": layer.down.weight,
    }
    rows = [heads * layer.width for heads in layer.heads]
    for kind, parameter in layer.qkv.named_parameters():  # weight, and for Qwen2 bias
        for part, view in zip("qkv", torch.split(parameter, rows), strict=True):
            views[f"self_attn.{part}_proj.{kind}"] = view
    if layer.q_norm is not None and layer.k_norm is not None:
        views["self_attn.q_norm.weight"] = layer.q_norm.weight
        views["self_attn.k_norm.weight"] = layer.k_norm.weight
    return views


@torch.no_grad()
def load_hf_state(model: Transformer, state: Mapping[str, Tensor]) -> None:
    """Copy tensors under Hugging Face's names into the model: all of them, or none and an error."""
    views = hf_state(model)
    # Older checkpoints carry RoPE's frequencies, which the config determines.
    given = {k: v for k, v in state.items() if not k.endswith("rotary_emb.inv_freq")}
    if model.head is None and "lm_head.weight" in given:
        head = given.pop("lm_head.weight")
        if not torch.equal(head, given.get("model.embed_tokens.weight", head)):
            raise ModelError("lm_head.weight differs from the embedding that the config ties it to")
    problems = {
        "missing": sorted(views.keys() - given.keys()),
        "not part of this model": sorted(given.keys() - views.keys()),
        "misshapen": [
            f"{name} {list(given[name].shape)} for {list(view.shape)}"
            for name, view in views.items()
            if name in given and given[name].shape != view.shape
        ],
    }
    if any(problems.values()):
        found = "; ".join(f"{what}: {_some(names)}" for what, names in problems.items() if names)
        raise ModelError(f"the checkpoint does not fit its config: {found}")
    for name, view in views.items():
        view.copy_(given[name])


def _some(names: list[str], limit: int = 8) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; a model directory needs it") from None
    except ValueError as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return content
