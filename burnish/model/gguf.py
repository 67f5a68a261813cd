"""GGUF files: their settings and tensors under Hugging Face's names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import QuantError, dequantize
from torch import Tensor

from burnish.errors import ModelError
from burnish.model.rope import Llama3, Rope, frequencies
from burnish.model.transformer import ARCHITECTURES, ModelConfig

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA3_FACTORS = "rope_freqs.weight"


class Gguf:
    def __init__(self, path: Path) -> None:
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path} is not a GGUF file that can be read: {error}") from error
        self.path = path

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.fields.get(key)
        return default if field is None else field.contents()

    def config(self) -> ModelConfig:
        arch = self.get("general.architecture")

        def setting(key: str) -> Any:
            return self.get(f"{arch}.{key}")

        names = {tensor.name for tensor in self._reader.tensors}
        heads, width = setting("attention.head_count"), setting("attention.key_length")
        width = width or (setting("embedding_length") or 0) // (heads or 1)
        given = {
            "vocab_size": setting("vocab_size") or len(self.get("tokenizer.ggml.tokens", ())),
            "num_hidden_layers": setting("block_count"),
            "hidden_size": setting("embedding_length"),
            "num_attention_heads": heads,
            "num_key_value_heads": setting("attention.head_count_kv"),
            "head_dim": width,
            "intermediate_size": setting("feed_forward_length"),
            "max_position_embeddings": setting("context_length"),
            # Stored as float32: the shortest decimal is what was meant (1e-05).
            "rms_norm_eps": float(str(np.float32(setting("attention.layer_norm_rms_epsilon")))),
            "rope_theta": setting("rope.freq_base"),
            "rope_scaling": self._rope_scaling(setting, width) or None,
            "partial_rotary_factor": (setting("rope.dimension_count") or width) / max(width, 1),
        }
        hf = {key: value for key, value in given.items() if value is not None}
        architecture = ARCHITECTURES.get(arch, arch)
        tied = "output.weight" not in names
        return ModelConfig.from_hf(
            {**hf, "architectures": [architecture], "tie_word_embeddings": tied}
        )

    def _rope_scaling(self, setting: Callable[[str], Any], width: int) -> dict[str, Any]:
        kind = setting("rope.scaling.type")
        for tensor in self._reader.tensors:
            if tensor.name == LLAMA3_FACTORS:
                theta = setting("rope.freq_base") or 10000.0
                return _llama3_scaling(torch.from_numpy(tensor.data.copy()), theta, width)
        return {} if kind in (None, "none") else {"rope_type": kind}

    def state(self, config: ModelConfig, progress: Callable[[int, int], None]) -> dict[str, Tensor]:
        """Every tensor in float32, dequantised; `progress(done, total)` after each."""
        state: dict[str, Tensor] = {}
        for done, tensor in enumerate(self._reader.tensors, 1):
            if tensor.name != LLAMA3_FACTORS:
                name = _hf_name(tensor.name)
                try:
                    values = dequantize(tensor.data, tensor.tensor_type)
                except (NotImplementedError, QuantError) as error:
                    kind = tensor.tensor_type.name
                    raise ModelError(f"{self.path}: {tensor.name} is {kind}: {error}") from error
                # A copy, because float32 comes as a view of the mapped file.
                state[name] = torch.from_numpy(np.array(values, dtype=np.float32))
                if config.family == "llama" and (".q_proj." in name or ".k_proj." in name):
                    state[name] = _halves(state[name], config.head_width)
            progress(done, len(self._reader.tensors))
        return state


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight; unknown names stay."""
    *block, stem, kind = name.split(".")
    prefix = f"model.layers.{block[1]}." if len(block) == 2 else ""
    return f"{prefix}{NAMES[stem]}.{kind}" if stem in NAMES else name


def _halves(weight: Tensor, width: int) -> Tensor:
    """llama.cpp keeps the two dimensions that turn together side by side; put them D/2 apart."""
    pairs = weight.view(-1, width // 2, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)


def _llama3_scaling(factors: Tensor, theta: float, width: int) -> dict[str, Any]:
    """A GGUF keeps Llama 3's stretching as one factor per frequency; find the settings again."""
    found = Llama3(
        factor=round(float(factors.max()), 3),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    cpu = torch.device("cpu")
    plain = frequencies(Rope(theta), width, cpu)
    stretched = frequencies(Rope(theta, found), width, cpu)
    if not torch.allclose(plain / stretched, factors.float(), rtol=1e-3):
        raise ModelError(f"{LLAMA3_FACTORS} does not follow Llama 3's rule; burnish can't read it")
    return {"rope_type": "llama3", **asdict(found)}
