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
"""cos and sin, each [N, 1, D]"""


@dataclass(frozen=True)
class Llama3:
    """Settings of Llama 3's stretched frequencies, by Hugging Face's names."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def stretch(self, inverse: Tensor) -> Tensor:
        """Short wavelengths stay, long ones are stretched by `factor`, those between are blended.

        inverse [D / 2] -> [D / 2]
        """
        low, high = self.low_freq_factor, self.high_freq_factor
        turns = self.original_max_position_embeddings * inverse / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * inverse + (1 - keep) * inverse / self.factor


@dataclass(frozen=True)
class Rope:
    theta: float = 10000.0
    llama3: Llama3 | None = None
    """None if the frequencies are not stretched."""

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> Rope:
        """From config.json: `rope_parameters`, or the older `rope_theta` and `rope_scaling`."""
        given = config.get("rope_scaling") or config.get("rope_parameters") or {}
        kind = given.get("rope_type") or given.get("type") or "default"
        theta = given.get("rope_theta") or config.get("rope_theta") or 10000.0
        if kind == "default":
            return cls(theta)
        if kind != "llama3":
            raise ModelError(f"rope_type must be default or llama3, got {kind!r}")
        return cls(theta, Llama3(**{field.name: given[field.name] for field in fields(Llama3)}))

    def to_hf(self) -> dict[str, Any]:
        """The older layout, which every reader knows."""
        scaling = None if self.llama3 is None else {"rope_type": "llama3", **asdict(self.llama3)}
        return {"rope_theta": self.theta, "rope_scaling": scaling}


# Cached by value rather than kept as a buffer: `model.to(bfloat16)` would round a buffer.
@lru_cache(maxsize=64)
def frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """[head_dim / 2] float32, in radians per position."""
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inverse = 1.0 / rope.theta**exponent
    return (inverse if rope.llama3 is None else rope.llama3.stretch(inverse)).to(device)


def rotation(rope: Rope, positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
    """positions [N] -> the rotation of heads at these positions."""
    angles = positions[:, None, None].float() * frequencies(rope, head_dim, positions.device)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """x [N, H, D]: dimension i turns with i + D/2, as Hugging Face stores q and k."""
    cos, sin = rotation
    left, right = x.chunk(2, dim=-1)
    return torch.addcmul(x * cos, torch.cat((right, left), dim=-1), sin)
