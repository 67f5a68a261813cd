"""Reading and writing model directories in Hugging Face's layout (safetensors).

Tensors are exchanged under Hugging Face's names; inside the model, q, k, v and gate, up are fused.
Pickled files are never read.
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
from safetensors.torch import load_file
from torch import Tensor

from burnish.errors import ModelError
from burnish.model.tensor_files import write_tensors
from burnish.model.transformer import ModelConfig, Transformer

COMPANIONS = ("*token*.json", "chat_template.jinja", "generation_config.json")
"""Further files of a model directory; `save_model` copies them from the source directory."""


def load_model(
    directory: Path | str, *, dtype: torch.dtype = torch.float32, fp32_head: bool = False
) -> Transformer:
    """Load the model in a Hugging Face directory onto the CPU, with weights of type ``dtype``. With
    ``fp32_head``, the model computes logits in float32. Raises a ModelError if burnish can't run
    the model, or if files are missing, damaged, or do not fit each other."""
    config = replace(read_model_config(Path(directory)), fp32_head=fp32_head)
    model = Transformer(config).to(dtype)
    load_hf_state(model, read_state(Path(directory)))
    return model


def save_model(
    model: Any,
    directory: Path | str,
    *,
    source: Path | str | None = None,
    more: Mapping[str, Any] | None = None,
) -> None:
    """Write a model's weights and config.json to a directory that transformers can load.

    ``model`` is a `Transformer`, or another model with ``config`` and ``exchange``. ``source`` is
    the model directory from which the tokenizer and the special token ids are copied; None to write
    neither. ``more`` holds further fields of config.json, which replace fields of the same name.
    The directory is created if needed, and files of the same name are replaced.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.cpu().contiguous() for name, tensor in model.exchange().items()}
    write_tensors(state, directory / "model.safetensors", {"format": "pt"})
    dtype = next(iter(state.values())).dtype
    hf = model.config.to_hf() | {"dtype": str(dtype).removeprefix("torch.")}
    if source is not None:
        config = Path(source) / "config.json"  # missing if the source is only a tokenizer
        given = read_model_json(config) if config.exists() else {}
        hf |= {key: given[key] for key in given if key.endswith("_token_id")}
        for file in (file for name in COMPANIONS for file in Path(source).glob(name)):
            shutil.copyfile(file, directory / file.name)
    text = json.dumps(hf | dict(more or {}), indent=2)
    (directory / "config.json").write_text(text + "\n")


def read_model_config(directory: Path) -> ModelConfig:
    """Read the config.json of a model directory. Raise a ModelError if it is missing or damaged, or
    if burnish can't run the model."""
    return ModelConfig.from_hf(read_model_json(directory / "config.json"))


def read_state(directory: Path) -> dict[str, Tensor]:
    """Read all tensors of a model directory, by name: those of the files that
    model.safetensors.index.json lists, or without this index those of model.safetensors. Raise a
    ModelError if a file is missing or damaged."""
    index, names = directory / "model.safetensors.index.json", {"model.safetensors"}
    if index.exists():
        names = set(read_model_json(index)["weight_map"].values())
    state: dict[str, Tensor] = {}
    for file in sorted(directory / name for name in names):
        try:
            state |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{file} is missing or damaged ({error}); burnish reads weights from safetensors "
                "files only, never from pickles"
            ) from error
    return state


@torch.no_grad()
def load_hf_state(
    model: Transformer, state: Mapping[str, Tensor], names: Collection[str] | None = None
) -> None:
    """Copy the tensors ``state``, with Hugging Face's names, into the model. If they do not fit the
    model, raise a ModelError and copy nothing.

    ``names`` are the names of the tensors that ``state`` must have; None for all tensors of the
    model. Other tensors are an error, except RoPE's frequencies and, in a model without a separate
    head, an lm_head that equals the embedding.
    """
    views = model.exchange()
    if names is not None:
        views = {name: view for name, view in views.items() if name in names}
    # Older checkpoints contain RoPE's frequencies, which the config determines.
    # This keeps names only, because a mesh gathers a tensor whenever it is read.
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


def read_model_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of a model directory. Raise a ModelError if it is missing or not JSON."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read, and a model needs it: {error}") from error
    return content
