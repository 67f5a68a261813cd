"""Rotary position embedding and the ways its frequencies are stretched for longer contexts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from burnish.errors import ModelError

Rotation = tuple[Tensor, Tensor]
"""cos and sin, each [N, 1, D / 2]"""


@dataclass(frozen=True)
class Rope:
    """Hugging Face's names; None is "not set", and a kind reads only what it needs."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        if self.rope_type not in KINDS:
            raise ModelError(
                f"rope_type must be one of {', '.join(KINDS)}, got {self.rope_type!r}; "
                "burnish can't run this checkpoint's position embedding"
            )
        missing = [name for name in NEEDS[self.rope_type] if getattr(self, name) is None]
        if missing:
            raise ModelError(
                f"rope_type {self.rope_type!r} needs {', '.join(missing)}, which the config lacks"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Rope:
        """From config.json: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
        given = dict(config.get("rope_scaling") or config.get("rope_parameters") or {})
        given["rope_type"] = given.pop("rope_type", None) or given.pop("type", "default")
        given.pop("type", None)
        if given.get("rope_theta") is None:
            given["rope_theta"] = config.get("rope_theta") or 10000.0
        if given.pop("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1):
            raise ModelError("partial_rotary_factor must be 1: burnish rotates the whole head")
        unknown = sorted(given.keys() - {f.name for f in fields(cls)})
        if unknown:
            raise ModelError(f"unknown rope settings in config.json: {', '.join(unknown)}")
        if "original_max_position_embeddings" in NEEDS.get(given["rope_type"], ()):
            # As transformers: a value beside the rope settings wins over one inside them.
            original = config.get("original_max_position_embeddings")
            inside = given.get("original_max_position_embeddings")
            original = original or inside or config["max_position_embeddings"]
            given["original_max_position_embeddings"] = original
        return cls(**given)

    def to_hf(self) -> dict[str, Any]:
        """The older layout, which every reader knows."""
        given = {key: value for key, value in asdict(self).items() if value is not None}
        theta = given.pop("rope_theta")
        scaling = None if self.rope_type == "default" else given
        return {"rope_theta": theta, "rope_scaling": scaling}


def _given(value: float | None) -> float:
    assert value is not None, "NEEDS names it"
    return value


def _plain(rope: Rope, inverse: Tensor) -> Tensor:
    return inverse


def _linear(rope: Rope, inverse: Tensor) -> Tensor:
    return inverse / _given(rope.factor)


def _llama3(rope: Rope, inverse: Tensor) -> Tensor:
    """Short wavelengths stay, long ones are stretched by `factor`, those between are blended."""
    low, high = _given(rope.low_freq_factor), _given(rope.high_freq_factor)
    turns = _given(rope.original_max_position_embeddings) * inverse / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inverse + (1 - keep) * inverse / _given(rope.factor)


def _yarn(rope: Rope, inverse: Tensor) -> Tensor:
    """YaRN (arXiv:2309.00071), "NTK by parts": a ramp over dimensions from kept to stretched."""
    half = inverse.numel()
    context = _given(rope.original_max_position_embeddings)

    def dimension(rotations: float) -> float:
        return half * math.log(context / (rotations * 2 * math.pi)) / math.log(rope.rope_theta)

    low, high = dimension(rope.beta_fast or 32), dimension(rope.beta_slow or 1)
    if rope.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * half - 1)
    if low == high:
        high += 0.001  # a step, not a division by zero
    stretch = ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inverse / _given(rope.factor) * stretch + inverse * (1 - stretch)


KINDS: dict[str, Callable[[Rope, Tensor], Tensor]] = {
    "default": _plain,
    "linear": _linear,
    # NTK by length changes nothing up to the context, and burnish never runs past it.
    "dynamic": _plain,
    "llama3": _llama3,
    "yarn": _yarn,
}
NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
    "yarn": ("factor", "original_max_position_embeddings"),
}


def _magnitude(rope: Rope) -> float:
    """What cos and sin are multiplied by: YaRN's attention temperature, 1 for every other kind."""
    if rope.rope_type != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    log = math.log(max(_given(rope.factor), 1.0))
    if rope.mscale and rope.mscale_all_dim:
        return (0.1 * rope.mscale * log + 1) / (0.1 * rope.mscale_all_dim * log + 1)
    return 0.1 * log + 1


# Cached by value rather than kept as a buffer: `model.to(bfloat16)` would round a buffer.
@lru_cache(maxsize=64)
def frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """[head_dim / 2] float32, in radians per position."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return KINDS[rope.rope_type](rope, 1.0 / rope.rope_theta**exponent).to(device)


def rotation(rope: Rope, positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
    """positions [N] -> what turns the heads at these positions: cos and sin, [N, 1, head_dim]."""
    angles = positions[:, None, None].float() * frequencies(rope, head_dim, positions.device)
    cos, sin = angles.cos() * _magnitude(rope), angles.sin() * _magnitude(rope)
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [N, H, D]: dimension i turns with i + D/2, as Hugging Face stores q and k."""
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((right, left), dim=-1), sin)
