"""The mesh's section of a recipe: the number of ranks that learn together, by dimension."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import Field

from burnish.recipe.base import Section


class MeshConfig(Section):
    """Settings of the mesh: replicate × shard × tensor ranks learn together.

    Replicas hold the same weights; shard and tensor ranks hold parts of them.
    """

    replicate: int = Field(1, ge=1, description="copies of the sharded weights")
    shard: int = Field(1, ge=1, description="ranks that share weights and moments (FSDP2)")
    tensor: int = Field(1, ge=1, description="ranks that share heads, MLP and vocabulary")
    gather: Literal["step", "layer"] = Field(
        "step", description="whether gathered weights are kept for a step or while a layer runs"
    )
    offload: bool = Field(
        False, description="whether the learner moves to main memory during sampling"
    )

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.replicate, self.shard, self.tensor

    @property
    def ranks(self) -> int:
        """The number of ranks of the mesh: the product of ``sizes``."""
        return math.prod(self.sizes)

    @property
    def data_ranks(self) -> int:
        """The number of ranks that process different responses; tensor ranks process the same."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return f"{self.replicate} replicate × {self.shard} shard × {self.tensor} tensor"
