"""The mesh's section of a recipe: how many ranks learn together, and along which dimensions."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from burnish.schema.models import SorterConfig
from burnish.sections import Section

if TYPE_CHECKING:
    from burnish.schema.recipe import Recipe


class MeshConfig(Section):
    """Replicas hold the same weights; shards and tensor ranks hold parts of them."""

    replicate: int = Field(1, ge=1, description="copies of the weights that are cut over shard")
    shard: int = Field(1, ge=1, description="ranks that share weights and moments (FSDP2)")
    tensor: int = Field(1, ge=1, description="ranks that share heads, MLP and vocabulary")
    gather: Literal["step", "layer"] = Field(
        "step", description="gathered weights are kept for a step, or while their layer runs"
    )
    offload: bool = Field(False, description="the learner waits in main memory during sampling")

    @property
    def sizes(self) -> tuple[int, int, int]:
        return self.replicate, self.shard, self.tensor

    @property
    def ranks(self) -> int:
        return math.prod(self.sizes)

    @property
    def data_ranks(self) -> int:
        """Ranks that have packs of their own."""
        return self.replicate * self.shard

    def __str__(self) -> str:
        return f"{self.replicate} replicate × {self.shard} shard × {self.tensor} tensor"


def check(recipe: Recipe) -> None:
    """Raises where a recipe can't learn on a mesh."""
    mesh, train = recipe.mesh, recipe.train
    if not recipe.on_mesh:
        return
    if recipe.runtime.transport in ("gloo", "nccl"):
        raise ValueError(
            f"runtime.transport = '{recipe.runtime.transport}' can't go with a mesh, whose ranks "
            "have a group of their own; use 'auto'"
        )
    if isinstance(recipe.model, SorterConfig):
        raise ValueError("a mesh needs a language model, got the sorting model; use 'local'")
    if train.learn.name != "all":
        raise ValueError(
            f"a mesh learns all weights, got train.learn = "
            f"'{train.learn.name}'; use train.learn = 'all', or runtime.name = 'local'"
        )
    if recipe.task.name == "preferences":
        raise ValueError("a mesh can't learn a reward; use runtime.name = 'local'")
    if recipe.device.startswith("cuda:"):
        raise ValueError(
            f"device = '{recipe.device}' would put all ranks on one GPU; use 'cuda' with "
            "a mesh, where every rank takes its own"
        )
    if train.batch % mesh.data_ranks:
        unit = math.lcm(mesh.data_ranks, 1 if recipe.is_supervised else recipe.rollout.group_size)
        fit = [str(n) for n in range(1, train.batch + 1) if train.batch % n == 0]
        raise ValueError(
            f"train.batch = {train.batch} must be a multiple of mesh.replicate × mesh.shard = "
            f"{mesh.data_ranks}; use train.batch = {-(-train.batch // unit) * unit}, or a product "
            f"of {', '.join(fit)}"
        )


def shapes(ranks: int) -> str:
    """Meshes of so many ranks, in words."""
    found = [f"mesh.shard = {ranks}", f"mesh.replicate = {ranks}"]
    found += [f"mesh.shard = {ranks // 2} with mesh.tensor = 2"] * (ranks % 2 == 0 and ranks > 2)
    return " or ".join(found)


def describe(recipe: Recipe) -> list[tuple[str, list[tuple[str, str]]]]:
    """A section of a plan; it is empty if one process learns."""
    if not recipe.on_mesh:
        return []
    mesh = recipe.mesh
    lines = [("ranks", f"{mesh.ranks} = {mesh}")]
    share = recipe.train.batch / mesh.data_ranks
    lines.append(("packs", f"about {share:g} of {recipe.train.batch} responses per rank and step"))
    kept = {"step": "once, and kept for the step", "layer": "whenever their layer runs"}
    lines.append(("weights", f"gathered {kept[mesh.gather]}"))
    if mesh.offload:
        lines.append(("offload", "the learner's weights and moments leave the GPU to sample"))
    return [("mesh", lines)]
