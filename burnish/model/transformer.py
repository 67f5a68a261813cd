"""The one model: a Llama-family decoder that sampler and learner both run.

Tokens are flat [N], without a batch dimension and without padding; how they attend is passed in.
Legend: N tokens, d model width, Hq query heads, Hkv key and value heads, D head width, V tokens in
the vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from burnish.errors import ModelError
from burnish.model.activations import RMSNorm, swiglu
from burnish.model.attention import Attend, causal, packed
from burnish.model.logprobs import Vocabulary, token_logprobs
from burnish.model.products import linear
from burnish.types import Measured, PackedBatch

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""The class in transformers of each family, which is its `model_type` there."""
Rotation = tuple[Tensor, Tensor]
"""cos and sin, each [N, 1, D]"""
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Hugging Face's names of the settings of Llama 3's stretched frequencies."""
PROBE = 16
"""Tokens whose log-probabilities show whether two models have the same weights."""
OPTIONAL = ("n_kv_heads", "head_dim", "tied", "init_std")
"""Settings that config.json may lack."""
SUPPORTED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1,
}
"""The only values of these keys that burnish can run."""
HF_MODULES = {
    "embed": ["model.embed_tokens"],
    "norm": ["model.norm"],
    "head": ["lm_head"],
    "attention_norm": ["input_layernorm"],
    "qkv": [f"self_attn.{part}_proj" for part in "qkv"],
    "q_norm": ["self_attn.q_norm"],
    "k_norm": ["self_attn.k_norm"],
    "out": ["self_attn.o_proj"],
    "mlp_norm": ["post_attention_layernorm"],
    "gate_up": ["mlp.gate_proj", "mlp.up_proj"],
    "down": ["mlp.down_proj"],
}
"""Hugging Face's modules in each module here, from its first row on."""


class Rope(NamedTuple):
    theta: float = 10000.0
    llama3: tuple[float, ...] | None = None
    """The numbers that `LLAMA3` names; None if the frequencies are not stretched."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Rope:
        """From config.json: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        kind = given.get("rope_type") or given.get("type") or "default"
        theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
        if kind not in ("default", "llama3"):
            raise ModelError(f"rope_type must be default or llama3, got {kind!r}")
        return cls(theta, tuple(given[key] for key in LLAMA3) if kind == "llama3" else None)

    def to_hf(self) -> dict[str, Any]:
        """The older layout, which every reader knows."""
        scaling = None
        if self.llama3 is not None:
            scaling = {"rope_type": "llama3", **dict(zip(LLAMA3, self.llama3, strict=True))}
        return {"rope_theta": self.theta, "rope_scaling": scaling}

    def frequencies(self, head_dim: int) -> Tensor:
        """[head_dim / 2] float32, in radians per position.

        Llama 3 keeps short wavelengths, stretches long ones by a factor, and blends the others.
        """
        inverse = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.llama3 is None:
            return inverse
        factor, low, high, original = self.llama3
        turns = original * inverse / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * inverse + (1 - keep) * inverse / factor


def _hf(key: str, default: Any = MISSING) -> Any:
    """A setting that config.json calls ``key``."""
    return field(default=default, metadata={"hf": key})


@dataclass(frozen=True)
class ModelConfig:
    vocab_size: int = _hf("vocab_size")
    n_layers: int = _hf("num_hidden_layers", 4)
    d_model: int = _hf("hidden_size", 512)
    n_heads: int = _hf("num_attention_heads", 16)
    d_ff: int = _hf("intermediate_size", 1344)
    context: int = _hf("max_position_embeddings", 256)
    norm_eps: float = _hf("rms_norm_eps", 1e-5)
    n_kv_heads: int | None = _hf("num_key_value_heads", None)
    """None if there are as many as n_heads."""
    head_dim: int | None = _hf("head_dim", None)
    """None if it is d_model / n_heads."""
    tied: bool = _hf("tie_word_embeddings", True)
    """The head is the embedding."""
    init_std: float = _hf("initializer_range", 0.02)
    family: str = "llama"
    """llama (SmolLM2 too), qwen2 (bias on q, k, v; Qwen2.5 too) or qwen3 (norm on q, k)."""
    rope: Rope = field(default_factory=Rope)
    fp32_head: bool = False
    """Logits are computed in float32 whatever the precision of the rest."""

    def __post_init__(self) -> None:
        divides = self.head_dim is not None or self.d_model % self.n_heads == 0
        if not divides or self.head_width % 2 or self.n_heads % self.kv_heads:
            raise ModelError(
                f"{self.n_heads} heads must divide a width of {self.d_model} into even parts, and "
                f"{self.kv_heads} key and value heads must divide the heads; use other numbers"
            )

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def heads(self) -> list[int]:
        """How many q, k and v have."""
        return [self.n_heads, self.kv_heads, self.kv_heads]

    @property
    def probed(self) -> list[int]:
        """Fixed tokens that all engines probe their weights with."""
        return [place * 7919 % self.vocab_size for place in range(min(PROBE, self.context))]

    @property
    def head_width(self) -> int:
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """From the content of config.json; a setting that burnish can't run is refused."""
        family = hf.get("model_type")
        if family not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise ModelError(f"model_type {family!r} is not supported; burnish runs {known}")
        wrong = [key for key, value in SUPPORTED.items() if (hf.get(key) or value) != value]
        if wrong:
            listed = ", ".join(f"{key} = {hf[key]!r}" for key in wrong)
            raise ModelError(f"config.json has settings that burnish can't run: {listed}")
        given: dict[str, Any] = {name: hf.get(key) for name, key in cls.keys().items()}
        absent = {name for name, value in given.items() if value is None}
        if absent - set(OPTIONAL):
            raise ModelError(f"config.json lacks {', '.join(cls.keys()[name] for name in absent)}")
        given = {name: given[name] for name in given if name not in absent}
        return cls(family=family, rope=Rope.from_hf(hf), **{"tied": False} | given)

    @classmethod
    def keys(cls) -> dict[str, str]:
        """The key in config.json of each field that has one."""
        return {field.name: field.metadata["hf"] for field in fields(cls) if field.metadata}

    def to_hf(self) -> dict[str, Any]:
        return {
            "architectures": [FAMILIES[self.family]],
            "model_type": self.family,
            "hidden_act": "silu",
            **{key: getattr(self, name) for name, key in self.keys().items()},
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width,
            **self.rope.to_hf(),
        }


# Cached by value rather than kept as a buffer: `model.to(bfloat16)` would round a buffer.
@lru_cache(maxsize=64)
def _frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    return rope.frequencies(head_dim).to(device)


def rotation(rope: Rope, positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
    """positions [N] -> the rotation of heads at these positions."""
    angles = positions[:, None, None].float() * _frequencies(rope, head_dim, positions.device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [N, H, D]: dimension i turns with i + D/2, as Hugging Face stores q and k."""
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((right, left), dim=-1), sin)


class _Linear(nn.Linear):
    def __init__(self, inner: int, outer: int, *, bias: bool) -> None:
        super().__init__(inner, outer, bias=bias)
        self.lora: nn.Module | None = None
        """A change that is added to the product (see `lora`); None if there is none."""

    def forward(self, x: Tensor) -> Tensor:
        out = linear(x, self.weight, self.bias)
        return out if self.lora is None else out + self.lora(x)

    def reset_parameters(self) -> None:
        """Weights come from a checkpoint or from `init_weights`; drawing them twice is waste."""


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, index: int) -> None:
        super().__init__()
        self.index = index
        d, width, eps = config.d_model, config.head_width, config.norm_eps
        self.heads, self.width = config.heads, width
        self.attention_norm = RMSNorm(d, eps)
        self.qkv = _Linear(d, sum(self.heads) * width, bias=config.family == "qwen2")
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
        # Both at once: with few tokens, time goes by the number of operations.
        q, k = torch.split(rotate(qk, turn), self.heads[:2], dim=1)
        x = x + self.out(attend(self.index, q, k, v).reshape(x.shape[0], -1))
        out: Tensor = x + self.down(swiglu(self.gate_up(self.mlp_norm(x))))
        return out


def hf_views(config: ModelConfig, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Views of the parameter ``name`` of a transformer under Hugging Face's names."""
    *layer, module, kind = name.split(".")
    prefix = f"model.{'.'.join(layer)}." if layer else ""
    parts = HF_MODULES[module]
    rows = [len(tensor) // len(parts)] * len(parts)
    if module == "qkv":
        rows = [config.head_width * heads for heads in config.heads]
    cut = torch.split(tensor, rows)
    return {f"{prefix}{part}.{kind}": view for part, view in zip(parts, cut, strict=True)}


class Transformer(nn.Module):
    """Weights are uninitialised until a checkpoint or `init_weights` fills them."""

    lower_layers = 0
    """How many of the first layers do not learn; 0 if all weights learn."""
    recompute = False
    """Whether the backward pass makes the activations of a layer again, which are not kept then."""
    vocabulary: Vocabulary | None = None
    """The part of the vocabulary that this process has; None if it has all of it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        sizes = config.vocab_size, config.d_model
        self.embed = nn.Embedding(sizes[0], sizes[1], _weight=torch.empty(sizes))
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = None if config.tied else _Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """tokens [N], positions [N] -> hidden [N, d] after the final norm."""
        x = self._run(self.layers, self.embed(tokens), positions, attend)
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [M, d] -> [M, V], in float32 if the config asks for an fp32 head."""
        return linear(*self.head_inputs(hidden))

    def head_inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden [M, d] and the head's weight [V, d], in the precision of the logits."""
        weight = self.embed.weight if self.head is None else self.head.weight
        if self.config.fp32_head and hidden.dtype != torch.float64:
            return hidden.float(), weight.float()
        return hidden, weight

    def learn(self, layers: int | None = None, *, recompute: bool = False) -> Transformer:
        """Makes only the last ``layers`` and the final norm learn; None if all weights do."""
        self.recompute = recompute
        self.requires_grad_(layers is None)
        self.lower_layers = 0 if layers is None else max(0, self.config.n_layers - layers)
        if layers is not None:
            self.layers[self.lower_layers :].requires_grad_(True)
            self.norm.requires_grad_(True)
        return self

    def score(self, batch: PackedBatch, lower: Tensor | None = None) -> Measured:
        """Log-probability and entropy of each action token, [N]; 0 in other slots.

        A group's prompt runs once, and the head runs on the contexts of actions alone. ``lower``
        [N, d] are the hidden states below the layers that learn; None if they are not known.
        """
        return self.measure(self._hidden(batch, lower), batch)

    def read(self, batch: PackedBatch, lower: Tensor | None = None) -> tuple[Measured, Tensor]:
        """As `score`, and the hidden states [N, d] after the final norm."""
        hidden = self._hidden(batch, lower)
        return self.measure(hidden, batch), hidden

    def hidden(self, batch: PackedBatch, lower: Tensor | None = None) -> Tensor:
        """[N, d] after the final norm; ``lower`` as in `score`."""
        return self._hidden(batch, lower)

    # Ranks wrap each public pass and gather weights for it, so no pass calls another.
    def _hidden(self, batch: PackedBatch, lower: Tensor | None) -> Tensor:
        attend = self._attend(batch)
        if lower is None:
            lower = self.lower(batch, attend)
        x = self._run(self.layers[self.lower_layers :], lower, batch.positions, attend)
        hidden: Tensor = self.norm(x)
        return hidden

    def measure(self, hidden: Tensor, batch: PackedBatch) -> Measured:
        """As `score`, from the hidden states [N, d] after the final norm."""
        actions = batch.is_action.nonzero().squeeze(1)
        streams = batch.tokens, batch.predecessor, actions, batch.temperature
        measured = token_logprobs(self, hidden, *streams)
        zeros = measured.logprobs.new_zeros(len(batch.tokens))
        return Measured(*(zeros.index_copy(0, actions, x) for x in measured))

    def lower(self, batch: PackedBatch, attend: Attend | None = None) -> Tensor:
        """[N, d] hidden states below the layers that learn; copies of a policy share them."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.lower_layers):
            layers, embedded = self.layers[: self.lower_layers], self.embed(batch.tokens)
            return self._run(layers, embedded, batch.positions, attend or self._attend(batch))

    @torch.no_grad()
    def probe(self) -> tuple[float, ...]:
        """Log-probabilities of a few tokens after a few fixed ones."""
        tokens = torch.tensor(self.config.probed, device=self.embed.weight.device)
        places = torch.arange(len(tokens), device=tokens.device)
        hidden = self.forward(tokens, places, causal([len(places)], places.device))
        last, heat = torch.full_like(places, len(places) - 1), torch.ones_like(places).float()
        found = token_logprobs(self, hidden, tokens, last, places, heat)
        return tuple(found.logprobs.tolist())

    def exchange(self, *, learned: bool = False) -> dict[str, Tensor]:
        """Views of the weights under Hugging Face's names, without gradient; clone to keep.

        ``learned``: only of those that learn. An adapter is not among them.
        """
        views: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            if ".lora." not in name and (parameter.requires_grad or not learned):
                views |= hf_views(self.config, name, parameter.detach())
        return views

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

    def _attend(self, batch: PackedBatch) -> Attend:
        dtype, width = self.embed.weight.dtype, self.config.head_width
        return packed(batch.segment_offsets, batch.segment_is_prompt, dtype, width)

    def _run(self, layers: nn.ModuleList, x: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """x [N, d] through some of the layers -> [N, d], before the final norm."""
        turn = rotation(self.config.rope, positions, self.config.head_width, x.dtype)
        again = self.recompute and torch.is_grad_enabled()
        for layer in layers:
            if again:
                x = checkpoint(
                    layer, x, turn, attend, use_reentrant=False, preserve_rng_state=False
                )
            else:
                x = layer(x, turn, attend)
        return x
