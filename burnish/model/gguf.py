"""Conversion of a GGUF file, the form in which the default model is published, to Hugging Face's
layout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from gguf import MODEL_ARCH, GGUFReader, get_tensor_name_map
from gguf.quants import dequantize
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from torch import Tensor

from burnish.model import checkpoint
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import ModelConfig, Transformer

CONTROL = 3
"""GGUF's type of control tokens, which never result from encoding plain text."""


def convert(path: Path, config: Mapping[str, Any], directory: Path) -> None:
    """Convert the GGUF file at ``path``, a model of the Llama family, to a model directory with
    float32 weights and the byte-level tokenizer.

    The quantised weights are written as float32, because fewer bits would round them a second
    time. ``config`` is the content of the model's config.json.
    """
    reader, model = GGUFReader(path), Transformer(ModelConfig.from_hf(config))
    known = get_tensor_name_map(MODEL_ARCH.LLAMA, model.config.n_layers)
    names = {known.get_name(name, (".weight", ".bias")): name for name in model.exchange()}
    state: dict[str, Tensor] = {}
    for tensor in reader.tensors:
        name = names.get(tensor.name, tensor.name)
        # Copy, because float32 tensors are views of the memory-mapped file.
        values = np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        state[name] = torch.from_numpy(values)
        if ".q_proj." in name or ".k_proj." in name:
            state[name] = _halves(state[name], model.config.head_width)
    checkpoint.load_hf_state(model, state)
    checkpoint.save_model(model, directory)
    _tokenizer(reader).save(directory)


def _halves(weight: Tensor, width: int) -> Tensor:
    """Return the weight of q or k with its rows in Hugging Face's order. llama.cpp stores the two
    dimensions of a rotation side by side, and Hugging Face stores them D/2 apart."""
    pairs = weight.view(-1, width // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _tokenizer(reader: GGUFReader) -> Tokenizer:
    """Build the tokenizer from the vocabulary in a GGUF file: byte-level BPE that splits numbers
    into digits, which GGUF calls "smollm"."""
    given = {name.partition(".")[2]: field.contents() for name, field in reader.fields.items()}
    tokens: list[str] = given["ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in given.get("ggml.merges", ())]
    backend = tokenizers.Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    for token, kind in zip(tokens, given["ggml.token_type"], strict=True):
        if kind == CONTROL:
            backend.add_tokens([AddedToken(token, special=True, normalized=False)])
    roles = {"bos": "bos", "eos": "eos", "unknown": "unk", "padding": "pad"}
    ids = {role: given.get(f"ggml.{name}_token_id") for name, role in roles.items()}
    special = {f"{role}_token": tokens[i] for role, i in ids.items() if i is not None}
    return Tokenizer(backend, (given["ggml.eos_token_id"],), special, given.get("chat_template"))
