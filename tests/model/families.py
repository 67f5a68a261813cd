"""Tiny random models of each family, made with transformers, and their GGUF files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,  # wide, so that a wrong norm or bias shows in the logits
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "smollm2": {"model_type": "llama", "tie_word_embeddings": True, "rms_norm_eps": 1e-5},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True},
    "qwen2.5": {"model_type": "qwen2", "rms_norm_eps": 1e-6},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "tie_word_embeddings": True},
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
}


def make(family: str, rope: str = "default", **changes: Any) -> Any:
    """A transformers model with every parameter random, norms and biases too."""
    import transformers

    settings = SIZES | FAMILIES[family] | {"rope_parameters": dict(ROPES[rope])} | changes
    config = transformers.AutoConfig.for_model(settings.pop("model_type"), **settings)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0, 0.3)
    return model


def save(model: Any, directory: Path, **options: Any) -> Path:
    model.save_pretrained(directory, **options)
    return directory


def side_by_side(weight: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of q and k: the dimensions that turn together are neighbours."""
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def write(path: Path, model: Any, kind: Kind = Kind.F32, **extra: np.ndarray) -> Path:
    """A GGUF of a model of Llama's family, with a tokenizer of single characters."""
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["<|bos|>", "<|end|>", *map(chr, range(33, 127))])
    writer.add_token_types([3, 3, *[1] * 94])
    writer.add_eos_token_id(1)
    known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            values = side_by_side(values, heads)
        used = kind if values.ndim == 2 else Kind.F32
        theirs = known.get_name(name, (".weight", ".bias"))
        writer.add_tensor(theirs, gguf.quantize(values, used), raw_dtype=used)
    for name, values in extra.items():
        writer.add_tensor(name.replace("__", "."), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
