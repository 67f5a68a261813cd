"""Model directories in Hugging Face's layout (safetensors), read and written.

Hugging Face's names are the exchange format; inside, q, k, v and gate, up are fused. Pickles are
never read.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from burnish.errors import ModelError
from burnish.model.transformer import ModelConfig, Transformer

COMPANIONS = ("*token*.json", "chat_template.jinja", "generation_config.json")
"""Files of a model directory beside config and weights; `save` copies them from the source."""


def load(
    directory: Path | str, *, dtype: torch.dtype = torch.float32, fp32_head: bool = False
) -> Transformer:
    """The model in a Hugging Face directory, on the CPU."""
    config = replace(read_config(Path(directory)), fp32_head=fp32_head)
    model = Transformer(config).to(dtype)
    load_hf_state(model, read_state(Path(directory)))
    return model


def save(
    model: Any,
    directory: Path | str,
    *,
    source: Path | str | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write a directory that transformers loads; tokenizer and end ids are copied from `source`.

    The model has a config and `exchange`, as a `Transformer` has; `more` goes into config.json.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.cpu().contiguous() for name, tensor in model.exchange().items()}
    save_file(state, directory / "model.safetensors", metadata={"format": "pt"})
    dtype = next(iter(state.values())).dtype
    hf = model.config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")}
    if source is not None:
        config = Path(source) / "config.json"  # a tokenizer without a model has none
        given = read_json(config) if config.exists() else {}
        hf |= {key: given[key] for key in given if key.endswith("_token_id")}
        for file in (file for name in COMPANIONS for file in Path(source).glob(name)):
            shutil.copyfile(file, directory / file.name)
    text = json.dumps(hf | dict(more or {}), indent=2)
    (directory / "config.json").write_text(text + "\n")


def read_config(directory: Path) -> ModelConfig:
    return ModelConfig.from_hf(read_json(directory / "config.json"))


def read_state(directory: Path) -> dict[str, Tensor]:
    """All tensors of a directory, from one safetensors file or from the shards of an index."""
    index, names = directory / "model.safetensors.index.json", {"model.safetensors"}
    if index.exists():
        names = set(read_json(index)["weight_map"].values())
    state: dict[str, Tensor] = {}
    for file in sorted(directory / name for name in names):
        try:
            state |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{file} is missing or damaged ({error}); burnish reads safetensors, and never "
                "pickled weights"
            ) from error
    return state


@torch.no_grad()
def load_hf_state(
    model: Transformer, state: Mapping[str, Tensor], names: Collection[str] | None = None
) -> None:
    """Copy tensors under Hugging Face's names into the model: all of them, or none and an error.

    ``names``: the tensors that must be there; None for all of the model's.
    """
    views = model.exchange()
    if names is not None:
        views = {name: view for name, view in views.items() if name in names}
    # Older checkpoints carry RoPE's frequencies, which the config determines.
    # Only names are kept: a mesh gathers each tensor when it is asked for.
    given = {name for name in state if not name.endswith("rotary_emb.inv_freq")}
    if model.head is None and "lm_head.weight" in given:
        given.remove("lm_head.weight")
        head = state["lm_head.weight"]
        if not torch.equal(head, state.get("model.embed_tokens.weight", head)):
            raise ModelError("lm_head.weight differs from the embedding that the config ties it to")
    ours = {(name, *view.shape) for name, view in views.items()}
    theirs = {(name, *t.shape) for name, t in state.items() if name in given}
    if ours != theirs:
        missing, more = (
            ", ".join(f"{name} {shape}" for name, *shape in sorted(some)[:8]) or "nothing"
            for some in (ours - theirs, theirs - ours)
        )
        raise ModelError(
            f"the weights do not fit the model's config: missing {missing}; not expected {more}"
        )
    for name, view in views.items():
        view.copy_(state[name])


def read_json(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read, and a model needs it: {error}") from error
    return content
