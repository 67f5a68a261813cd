"""Rotary position embedding, plain or with Llama 3's stretched frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from burnish.errors import ModelError

Rotation = tuple[Tensor, Tensor]
"""cos and sin, each [N, 1, D / 2]"""

NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "llama3": (
        "factor",
        "low_freq_factor",
        "high_freq_factor",
        "original_max_position_embeddings",
    ),
}
"""The kinds, and the settings that each of them reads beside rope_theta."""


@dataclass(frozen=True)
class Rope:
    """Hugging Face's names; None is "not set"."""

    rope_type: str = "default"
    rope_theta: float = 10000.0
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None

    def __post_init__(self) -> None:
        _check_kind(self.rope_type)
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
        _check_kind(given["rope_type"])
        if given.get("rope_theta") is None:
            given["rope_theta"] = config.get("rope_theta") or 10000.0
        if given.pop("partial_rotary_factor", config.get("partial_rotary_factor")) not in (None, 1):
            raise ModelError("partial_rotary_factor must be 1: burnish rotates the whole head")
        unknown = sorted(given.keys() - {f.name for f in fields(cls)})
        if unknown:
            raise ModelError(f"unknown rope settings in config.json: {', '.join(unknown)}")
        if given["rope_type"] == "llama3":
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


def _check_kind(kind: str) -> None:
    if kind not in NEEDS:
        raise ModelError(
            f"rope_type must be {' or '.join(NEEDS)}, got {kind!r}; burnish can't run this "
            "checkpoint's position embedding"
        )


def _given(value: float | None) -> float:
    assert value is not None, "NEEDS names it"
    return value


def _llama3(rope: Rope, inverse: Tensor) -> Tensor:
    """Short wavelengths stay, long ones are stretched by `factor`, those between are blended."""
    low, high = _given(rope.low_freq_factor), _given(rope.high_freq_factor)
    turns = _given(rope.original_max_position_embeddings) * inverse / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * inverse + (1 - keep) * inverse / _given(rope.factor)


# Cached by value rather than kept as a buffer: `model.to(bfloat16)` would round a buffer.
@lru_cache(maxsize=64)
def frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """[head_dim / 2] float32, in radians per position."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / rope.rope_theta**exponent
    return (_llama3(rope, inverse) if rope.rope_type == "llama3" else inverse).to(device)


def rotation(rope: Rope, positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
    """positions [N] -> what turns the heads at these positions: cos and sin, [N, 1, head_dim]."""
    angles = positions[:, None, None].float() * frequencies(rope, head_dim, positions.device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [N, H, D]: dimension i turns with i + D/2, as Hugging Face stores q and k."""
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((right, left), dim=-1), sin)
