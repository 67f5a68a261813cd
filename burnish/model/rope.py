"""Rotary position embedding, plain or with Llama 3's stretched frequencies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from burnish.errors import ModelError

Rotation = tuple[Tensor, Tensor]
"""cos and sin, each [N, 1, D]"""
LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
"""Hugging Face's names of the settings of Llama 3's stretched frequencies."""


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

        Llama 3 keeps short wavelengths, stretches long ones by a factor, and blends those between.
        """
        inverse = 1.0 / self.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        if self.llama3 is None:
            return inverse
        factor, low, high, original = self.llama3
        turns = original * inverse / (2 * math.pi)
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        return keep * inverse + (1 - keep) * inverse / factor


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
