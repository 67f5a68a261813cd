"""The one model: a Llama-family decoder that sampler and learner both run.

Tokens are flat [N], without a batch dimension and without padding; how they attend is passed in.
Legend: N tokens, d model width, Hq query heads, Hkv key and value heads, D head width, V tokens in
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from burnish.errors import ModelError
from burnish.model.attention import Attend
from burnish.model.norm import RMSNorm
from burnish.model.products import linear
from burnish.model.rope import Rope, Rotation, rotate, rotation
from burnish.model.swiglu import swiglu

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int
    n_layers: int = 4
    d_model: int = 512
    n_heads: int = 16
    d_ff: int = 1344
    context: int = 256
    n_kv_heads: int | None = None
    """None: as many as n_heads."""
    head_dim: int | None = None
    """None: d_model / n_heads."""
    family: str = "llama"
    """llama (SmolLM2 too), qwen2 (bias on q, k, v; Qwen2.5 too) or qwen3 (norm on q, k)."""
    rope: Rope = field(default_factory=Rope)
    norm_eps: float = 1e-5
    tied: bool = True
    """The head is the embedding."""
    fp32_head: bool = False
    """Logits are computed in float32 whatever the precision of the rest."""
    init_std: float = 0.02

    def __post_init__(self) -> None:
        if self.family not in ARCHITECTURES:
            families = ", ".join(ARCHITECTURES)
            raise ModelError(f"family must be one of {families}, got {self.family!r}")
        sizes = ("vocab_size", "n_layers", "d_model", "n_heads", "d_ff", "context")
        for name in (*sizes, "kv_heads"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.n_heads % self.kv_heads:
            raise ModelError(
                f"n_heads must be a multiple of n_kv_heads, got {self.n_heads} and {self.kv_heads}"
            )
        if self.head_dim is None and self.d_model % self.n_heads:
            raise ModelError(
                f"d_model must be a multiple of n_heads, got {self.d_model} and {self.n_heads}; "
                "or give head_dim"
            )
        if self.head_width % 2:
            raise ModelError(f"a head's width must be even to rotate, got {self.head_width}")

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def head_width(self) -> int:
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """From what config.json holds; a setting that burnish would not honour is refused."""
        names = hf.get("architectures") or [ARCHITECTURES.get(str(hf.get("model_type")))]
        families = {name: family for family, name in ARCHITECTURES.items()}
        if names[0] not in families:
            raise ModelError(
                f"architecture {names[0] or hf.get('model_type')!r} is not supported; "
                f"burnish runs {', '.join(families)}"
            )
        _refuse_unsupported(hf)
        family = families[names[0]]
        absent = {"num_key_value_heads": None, "head_dim": 128 if family == "qwen3" else None}
        full = ABSENT | absent | {key: value for key, value in hf.items() if value is not None}
        missing = [name for name in HF_NAMES.values() if name not in full]
        if missing:
            raise ModelError(f"config.json lacks {', '.join(missing)}")
        sizes = {ours: full[name] for ours, name in HF_NAMES.items()}
        return cls(family=family, rope=Rope.from_hf(full), **sizes)

    def to_hf(self) -> dict[str, Any]:
        derived = {"num_key_value_heads": self.kv_heads, "head_dim": self.head_width}
        return {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "hidden_act": "silu",
            **{name: getattr(self, ours) for ours, name in HF_NAMES.items()},
            **derived,
            **self.rope.to_hf(),
        }


HF_NAMES = {
    "vocab_size": "vocab_size",
    "n_layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "d_ff": "intermediate_size",
    "context": "max_position_embeddings",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "norm_eps": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "init_std": "initializer_range",
}
ABSENT = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02}
"""What transformers takes where config.json says nothing."""


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    wrong = [key for key in ("attention_bias", "mlp_bias", "use_sliding_window") if hf.get(key)]
    if hf.get("hidden_act", "silu") != "silu":
        wrong.append("hidden_act")
    if set(hf.get("layer_types") or ()) - {"full_attention"}:
        wrong.append("layer_types")
    if wrong:
        listed = ", ".join(f"{key} = {hf[key]!r}" for key in wrong)
        raise ModelError(f"config.json asks for what burnish's model does not do: {listed}")


class _Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    def reset_parameters(self) -> None:
        """Weights come from a checkpoint or from `init_weights`; drawing them twice is waste."""


class _Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        """As `_Linear`."""


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        d, width, eps = config.d_model, config.head_width, config.norm_eps
        heads = (config.n_heads, config.kv_heads, config.kv_heads)
        self.heads, self.width = list(heads), width
        self.attention_norm = RMSNorm(d, eps)
        self.qkv = _Linear(d, sum(heads) * width, bias=config.family == "qwen2")
        qk_norm = config.family == "qwen3"
        self.q_norm = RMSNorm(width, eps) if qk_norm else None
        self.k_norm = RMSNorm(width, eps) if qk_norm else None
        self.out = _Linear(config.n_heads * width, d, bias=False)
        self.mlp_norm = RMSNorm(d, eps)
        self.gate_up = _Linear(d, 2 * config.d_ff, bias=False)
        self.down = _Linear(config.d_ff, d, bias=False)

    def forward(self, x: Tensor, turn: Rotation, attend: Attend) -> Tensor:
        """[N, d] -> [N, d]"""
        qkv = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, self.width))
        qk, v = qkv.tensor_split([-self.heads[2]], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = qk.split(self.heads[:2], dim=1)
            qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        # Both at once: with few tokens, the number of operations is what costs.
        q, k = torch.split(rotate(qk, turn), self.heads[:2], dim=1)
        x = x + self.out(attend(self.index, q, k, v).reshape(x.shape[0], -1))
        out: Tensor = x + self.down(swiglu(self.gate_up(self.mlp_norm(x))))
        return out


class Transformer(nn.Module):
    """Weights are uninitialised until a checkpoint or `init_weights` fills them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = _Embedding(config.vocab_size, config.d_model)
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = None if config.tied else _Linear(config.d_model, config.vocab_size, bias=False)

    def forward(
        self, tokens: Tensor, positions: Tensor, attend: Attend, *, recompute: bool = False
    ) -> Tensor:
        """tokens [N], positions [N] -> hidden [N, d] after the final norm.

        ``recompute``: only layers' inputs are kept; the backward pass runs each layer again.
        """
        x = self.run_layers(self.embed(tokens), positions, attend, recompute=recompute)
        hidden: Tensor = self.norm(x)
        return hidden

    def run_layers(
        self,
        x: Tensor,
        positions: Tensor,
        attend: Attend,
        *,
        which: slice = slice(None),
        recompute: bool = False,
    ) -> Tensor:
        """x [N, d] through some of the layers -> [N, d], before the final norm."""
        turn = rotation(self.config.rope, positions, self.config.head_width, x.dtype)
        for layer in self.layers[which]:
            if recompute and torch.is_grad_enabled():
                x = checkpoint(
                    layer, x, turn, attend, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = layer(x, turn, attend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, d] -> [M, V], in float32 where the config asks for an fp32 head."""
        return linear(*self.head_inputs(hidden))

    def head_inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [M, d] and the head's weight [V, d], in the precision of the logits."""
        weight = self.embed.weight if self.head is None else self.head.weight
        if self.config.fp32_head and hidden.dtype != torch.float64:
            return hidden.float(), weight.float()
        return hidden, weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> Transformer:
        """Normal weights, projections into the residual stream scaled by 1/√(2 · layers).

        Drawn on the CPU in float32, so that the same seed gives the same model everywhere.
        """
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1)
            else:
                inward = name.endswith(("out.weight", "down.weight"))
                std = self.config.init_std / (2 * self.config.n_layers) ** (0.5 * inward)
                drawn = torch.empty(parameter.shape, dtype=torch.float32)
                parameter.copy_(drawn.normal_(0, std, generator=generator))
        return self
