"""Weights that an engine must not load."""

from __future__ import annotations

import torch

from burnish.errors import EngineError
from burnish.types import Weights


def check(
    weights: Weights, *, version: int, incarnation: int, dtype: torch.dtype = torch.float32
) -> None:
    """Refuse weights of an older incarnation than the loaded one's, or not finite in ``dtype``."""
    stays = f"version {version} stays loaded"
    if weights.incarnation < incarnation:
        raise EngineError(
            f"weights of incarnation {weights.incarnation} come from before the run was restarted "
            f"as incarnation {incarnation}; {stays}"
        )
    broken = [
        name
        for name, tensor in weights.tensors.items()
        if not bool(torch.stack(torch.aminmax(tensor)).to(dtype).isfinite().all())
    ]
    if broken:
        raise EngineError(
            f"weights must be finite, version {weights.version} has {len(broken)} tensors that "
            f"are not ({broken[0]}, …); {stays}"
        )
