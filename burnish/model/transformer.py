"""The language model: a decoder of the Llama family, which both sampler and learner run.

Tokens are flat, [N], without batch dimension and padding; the attention function is an argument.
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
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from burnish.errors import ModelError
from burnish.model.activations import RMSNorm, swiglu
from burnish.model.attention import Attend, causal, packed
from burnish.model.chained import chained
from burnish.model.logprobs import Vocabulary, token_logprobs
from burnish.model.matmul import fuses, linear
from burnish.types import Measured, PackedBatch

FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""The class in transformers by family; a family's name is its `model_type`."""
Rotation = tuple[Tensor, Tensor]
"""cos and sin, each [N, 1, D]"""
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Hugging Face's names for the settings of Llama 3's RoPE scaling."""
PROBE = 16
"""Number of tokens whose log-probabilities show whether two models have the same weights."""
OPTIONAL = ("n_kv_heads", "head_dim", "tied", "init_std")
"""Fields of `ModelConfig` whose keys may be missing in config.json."""
SUPPORTED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1,
}
"""Keys of config.json that must have these values, or be missing."""
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
"""Hugging Face's modules that each module here consists of, in the order of its rows."""


class Rope(NamedTuple):
    """Settings of the rotary position embedding."""

    theta: float = 10000.0
    """Base of the frequencies."""
    llama3: tuple[float, ...] | None = None
    """Values of the settings in `LLAMA3`; None if the frequencies are not scaled."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Rope:
        """Read `rope_parameters` from the content of config.json, or the older `rope_theta` and
        `rope_scaling`. Raise a ModelError for a scaling other than Llama 3's, or without its
        settings."""
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        kind = given.get("rope_type") or given.get("type") or "default"
        theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
        if kind not in ("default", "llama3"):
            raise ModelError(f"rope_type must be default or llama3, got {kind!r}")
        if kind == "llama3" and (absent := [key for key in LLAMA3 if given.get(key) is None]):
            raise ModelError(f"config.json has rope_type 'llama3' without {', '.join(absent)}")
        return cls(theta, tuple(given[key] for key in LLAMA3) if kind == "llama3" else None)

    def to_hf(self) -> dict[str, Any]:
        """Return the settings in config.json's older layout, which all versions of transformers
        read."""
        scaling = None
        if self.llama3 is not None:
            scaling = {"rope_type": "llama3", **dict(zip(LLAMA3, self.llama3, strict=True))}
        return {"rope_theta": self.theta, "rope_scaling": scaling}

    def frequencies(self, head_dim: int) -> Tensor:
        """Compute the rotation frequencies [head_dim / 2] in float32, in radians per position.

        Llama 3's scaling keeps short wavelengths, multiplies long ones by a factor, and
        interpolates between them.
        """
        inverse = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.llama3 is None:
            return inverse
        factor, low, high, original = self.llama3
        turns = original * inverse / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * inverse + (1 - keep) * inverse / factor


def _hf(key: str, default: Any = MISSING) -> Any:
    """Return a dataclass field for the setting that config.json calls ``key``."""
    return field(default=default, metadata={"hf": key})


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of a decoder of the Llama family. Raises a ModelError if the numbers of
    heads and the widths do not fit each other."""

    vocab_size: int = _hf("vocab_size")
    n_layers: int = _hf("num_hidden_layers", 4)
    d_model: int = _hf("hidden_size", 512)
    n_heads: int = _hf("num_attention_heads", 16)
    d_ff: int = _hf("intermediate_size", 1344)
    context: int = _hf("max_position_embeddings", 256)
    norm_eps: float = _hf("rms_norm_eps", 1e-5)
    n_kv_heads: int | None = _hf("num_key_value_heads", None)
    """Number of key and value heads; None if it equals n_heads."""
    head_dim: int | None = _hf("head_dim", None)
    """Width of a head; None if it is d_model / n_heads."""
    tied: bool = _hf("tie_word_embeddings", True)
    """Whether the head shares the embedding's weights."""
    init_std: float = _hf("initializer_range", 0.02)
    family: str = "llama"
    """llama (SmolLM2 too), qwen2 (bias on q, k, v; Qwen2.5 too) or qwen3 (norm on q, k)."""
    rope: Rope = field(default_factory=Rope)
    fp32_head: bool = False
    """Whether logits are computed in float32, whatever the model's precision."""

    def __post_init__(self) -> None:
        divides = self.head_dim is not None or self.d_model % self.n_heads == 0
        if not divides or self.head_width % 2 or self.n_heads % self.kv_heads:
            raise ModelError(
                f"{self.n_heads} heads must divide a width of {self.d_model} into even widths, and "
                f"{self.kv_heads} key and value heads must divide the number of heads; change one "
                "of these numbers"
            )

    @property
    def kv_heads(self) -> int:
        return self.n_heads if self.n_kv_heads is None else self.n_kv_heads

    @property
    def heads(self) -> list[int]:
        """The numbers of heads of q, k and v, in this order."""
        return [self.n_heads, self.kv_heads, self.kv_heads]

    @property
    def probed(self) -> list[int]:
        """Ids of the fixed tokens of the probe: their log-probabilities show whether two models, or
        a model and an engine, have the same weights."""
        return [place * 7919 % self.vocab_size for place in range(min(PROBE, self.context))]

    @property
    def head_width(self) -> int:
        return self.d_model // self.n_heads if self.head_dim is None else self.head_dim

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> ModelConfig:
        """Read the content of config.json; raise a ModelError if burnish can't run the model."""
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
        """Return the key in config.json of each field that has one, by the field's name."""
        return {field.name: field.metadata["hf"] for field in fields(cls) if field.metadata}

    def to_hf(self) -> dict[str, Any]:
        """Return the content of config.json, without the model's dtype and special token ids."""
        return {
            "architectures": [FAMILIES[self.family]],
            "model_type": self.family,
            "hidden_act": "silu",
            **{key: getattr(self, name) for name, key in self.keys().items()},
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_width,
            **self.rope.to_hf(),
        }


# A cache instead of a buffer, because `model.to(bfloat16)` would round a buffer.
@lru_cache(maxsize=64)
def _frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    return rope.frequencies(head_dim).to(device)


def rotation(rope: Rope, positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
    """Compute the rotary position embedding at positions [N]: cos and sin, each [N, 1, D] of type
    ``dtype``, for `rotate`. The first half of sin is negated. ``head_dim`` is D."""
    angles = positions[:, None, None].float() * _frequencies(rope, head_dim, positions.device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Return the heads x [N, H, D] rotated by their positions. Dimensions i and i + D/2 form a
    pair, as in Hugging Face's layout."""
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((right, left), dim=-1), sin)


def rotate_qkv(qkv: Tensor, turn: Rotation, heads: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Split the heads qkv [N, Hq + 2 Hkv, D] into queries, keys and values, of which there are
    ``heads``, and rotate queries and keys by their positions."""
    if fuses(qkv):
        q, k, v = _RotateQkv.apply(qkv, *turn, heads)  # type: ignore[no-untyped-call]
        return q, k, v
    qk, v = qkv.tensor_split([-heads[2]], dim=1)
    # q and k in one call: with few tokens, the number of operations determines the time.
    q, k = torch.split(rotate(qk, turn), heads[:2], dim=1)
    return q, k, v


class _RotateQkv(torch.autograd.Function):
    """`rotate_qkv` on a GPU, in one kernel for each pass."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, cos: Tensor, sin: Tensor, heads: list[int]
    ) -> tuple[Tensor, ...]:
        from burnish.model import elementwise_kernels

        ctx.save_for_backward(cos, sin)
        parts = tuple(qkv.new_empty(len(qkv), count, qkv.shape[2]) for count in heads)
        elementwise_kernels.rotate_heads(qkv.contiguous(), cos, sin, parts)
        return parts

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *ups: Tensor) -> tuple[Tensor | None, ...]:
        from burnish.model import elementwise_kernels

        cos, sin = ctx.saved_tensors
        parts = [up.contiguous() for up in ups]
        rows, _, width = parts[0].shape
        joined = parts[0].new_empty(rows, sum(part.shape[1] for part in parts), width)
        elementwise_kernels.rotate_heads_back(joined, cos, sin, parts)
        return joined, None, None, None


class _Linear(nn.Linear):
    def __init__(self, inner: int, outer: int, *, bias: bool) -> None:
        super().__init__(inner, outer, bias=bias)
        self.lora: nn.Module | None = None
        """Low-rank change that is added to the output (see `lora`); None if there is none."""

    def forward(self, x: Tensor) -> Tensor:
        out = linear(x, self.weight, self.bias)
        return out if self.lora is None else out + self.lora(x)

    def reset_parameters(self) -> None:
        """Does nothing: weights come from a checkpoint or from `init_weights`."""


class Layer(nn.Module):
    """One layer of a decoder: attention and MLP, each with its norm and residual connection."""

    def __init__(self, config: ModelConfig, index: int) -> None:
        """``index`` is the number of the layer, counted from 0, which the attention function
        gets."""
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

    def forward(
        self, x: Tensor, turn: Rotation, attend: Attend, is_recomputed: bool = False
    ) -> Tensor:
        """Apply attention and MLP, each with its norm and residual connection: [N, d] -> [N, d].
        ``turn`` is the `rotation` of queries and keys, and ``attend`` the attention function.
        ``is_recomputed`` says whether the caller recomputes the layer in the backward pass."""
        qkv = chained(self.attention_norm, self.qkv, x, keep=is_recomputed)
        qkv = qkv.view(-1, sum(self.heads), self.width)
        if self.q_norm is not None and self.k_norm is not None:
            q, k, v = torch.split(qkv, self.heads, dim=1)
            qkv = torch.cat((self.q_norm(q), self.k_norm(k), v), dim=1)
        q, k, v = rotate_qkv(qkv, turn, self.heads)
        x = x + self.out(attend(self.index, q, k, v).reshape(x.shape[0], -1))
        gate_up = chained(self.mlp_norm, self.gate_up, x, keep=is_recomputed)
        return x + chained(swiglu, self.down, gate_up, keep=is_recomputed)


def hf_views(config: ModelConfig, name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Split ``tensor``, the transformer's parameter ``name`` or a tensor of the same shape, into
    views under Hugging Face's names, such as qkv into the projections q, k and v."""
    *layer, module, kind = name.split(".")
    prefix = f"model.{'.'.join(layer)}." if layer else ""
    parts = HF_MODULES[module]
    rows = [len(tensor) // len(parts)] * len(parts)
    if module == "qkv":
        rows = [config.head_width * heads for heads in config.heads]
    cut = torch.split(tensor, rows)
    return {f"{prefix}{part}.{kind}": view for part, view in zip(parts, cut, strict=True)}


class Transformer(nn.Module):
    """A decoder. Its weights are uninitialised until a checkpoint or `init_weights` sets them."""

    lower_layers = 0
    """Number of frozen layers below the first layer with trainable weights."""
    recompute = False
    """Whether activations are recomputed in the backward pass, layer by layer, to save memory."""
    vocabulary: Vocabulary | None = None
    """This process's shard of the vocabulary; None if the process has the whole vocabulary."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        sizes = config.vocab_size, config.d_model
        self.embed = nn.Embedding(sizes[0], sizes[1], _weight=torch.empty(sizes))
        self.layers = nn.ModuleList(Layer(config, i) for i in range(config.n_layers))
        self.norm = RMSNorm(config.d_model, config.norm_eps)
        self.head = None if config.tied else _Linear(config.d_model, config.vocab_size, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers: tokens [N], positions [N] -> hidden states [N, d] after the final
        norm."""
        x = self._run(self.layers, self.embed(tokens), positions, attend)
        hidden: Tensor = self.norm(x)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits of hidden states: [M, d] -> [M, V], in float32 if the config has an
        fp32 head."""
        return linear(*self.head_inputs(hidden))

    def head_inputs(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Return hidden [M, d] and the head's weight [V, d], converted to the precision of the
        logits."""
        weight = self.embed.weight if self.head is None else self.head.weight
        if self.config.fp32_head and hidden.dtype != torch.float64:
            return hidden.float(), weight.float()
        return hidden, weight

    def learn(self, layers: int | None = None, *, recompute: bool = False) -> Transformer:
        """Make only the last ``layers`` layers and the final norm trainable; None for all weights.
        Return the model. With ``recompute``, activations are recomputed in the backward pass, to
        save memory."""
        self.recompute = recompute
        self.requires_grad_(layers is None)
        self.lower_layers = 0 if layers is None else max(0, self.config.n_layers - layers)
        if layers is not None:
            self.layers[self.lower_layers :].requires_grad_(True)
            self.norm.requires_grad_(True)
        return self

    def score(self, batch: PackedBatch, lower: Tensor | None = None) -> Measured:
        """Compute the log-probability of each action token, and the entropy of the distribution
        that it was sampled from, [N] each, at the sampling temperature; 0 in other slots.

        A group's prompt is computed once, and the head is applied only to the positions that
        precede actions. ``lower`` [N, d] are the hidden states that enter the trainable layers; if
        it is None, they are computed here.
        """
        return self.measure(self._hidden(batch, lower), batch)

    def read(self, batch: PackedBatch, lower: Tensor | None = None) -> tuple[Measured, Tensor]:
        """Return the result of `score`, and the hidden states [N, d] after the final norm, from one
        forward pass."""
        hidden = self._hidden(batch, lower)
        return self.measure(hidden, batch), hidden

    def hidden(self, batch: PackedBatch, lower: Tensor | None = None) -> Tensor:
        """Compute the hidden states [N, d] after the final norm; ``lower`` as in `score`."""
        return self._hidden(batch, lower)

    # Ranks wrap each public forward pass to gather weights, so public passes do not call others.
    def _hidden(self, batch: PackedBatch, lower: Tensor | None) -> Tensor:
        attend = self._attend(batch)
        if lower is None:
            lower = self.lower(batch, attend)
        x = self._run(self.layers[self.lower_layers :], lower, batch.positions, attend)
        hidden: Tensor = self.norm(x)
        return hidden

    def measure(self, hidden: Tensor, batch: PackedBatch) -> Measured:
        """Compute the result of `score` from the hidden states [N, d] after the final norm."""
        actions = batch.is_action.nonzero().squeeze(1)
        streams = batch.tokens, batch.predecessor, actions, batch.temperature
        measured = token_logprobs(self, hidden, *streams)
        zeros = measured.logprobs.new_zeros(len(batch.tokens))
        return Measured(*(zeros.index_copy(0, actions, x) for x in measured))

    def lower(self, batch: PackedBatch, attend: Attend | None = None) -> Tensor:
        """Compute the hidden states [N, d] that enter the trainable layers. If there are frozen
        layers, the hidden states have no gradient and are the same for all copies of a policy.
        ``attend`` is the batch's attention function; None to build it here."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.lower_layers):
            layers, embedded = self.layers[: self.lower_layers], self.embed(batch.tokens)
            return self._run(layers, embedded, batch.positions, attend or self._attend(batch))

    @torch.no_grad()
    def probe(self) -> tuple[float, ...]:
        """Return the log-probabilities of fixed tokens after a fixed context. Comparing them shows
        whether two models have the same weights."""
        tokens = torch.tensor(self.config.probed, device=self.embed.weight.device)
        places = torch.arange(len(tokens), device=tokens.device)
        hidden = self.forward(tokens, places, causal([len(places)], places.device))
        last, heat = torch.full_like(places, len(places) - 1), torch.ones_like(places).float()
        found = token_logprobs(self, hidden, tokens, last, places, heat)
        return tuple(found.logprobs.tolist())

    def exchange(self, *, learned: bool = False) -> dict[str, Tensor]:
        """Return views of the weights under Hugging Face's names, without gradients. Training
        changes the views: clone them to keep their values.

        With ``learned``, return only the trainable weights. Adapters are not included.
        """
        views: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            if ".lora." not in name and (parameter.requires_grad or not learned):
                views |= hf_views(self.config, name, parameter.detach())
        return views

    @torch.no_grad()
    def init_weights(self, seed: int) -> Transformer:
        """Initialise the model: matrices are drawn from a normal distribution, biases are 0 and
        norms 1. The std is the config's ``init_std``, multiplied by 1/√(2 · layers) for projections
        into the residual stream. Return the model.

        Weights are drawn on the CPU in float32, so that a seed gives the same model on every
        device.
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
        """Apply some of the layers: x [N, d] -> [N, d], before the final norm."""
        turn = rotation(self.config.rope, positions, self.config.head_width, x.dtype)
        again = self.recompute and torch.is_grad_enabled()
        for layer in layers:
            if again:
                given = x, turn, attend, True
                x = checkpoint(layer, *given, use_reentrant=False, preserve_rng_state=False)
            else:
                x = layer(x, turn, attend)
        return x
