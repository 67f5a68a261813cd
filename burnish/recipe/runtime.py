"""The sections of a recipe that say how sampling and learning share time and machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from burnish.pieces.terms import Importance
from burnish.sections import Section, as_table, named

if TYPE_CHECKING:
    from burnish.schema.recipe import Recipe


class LaggedLoop(Section):
    """Rollout n is sampled with the weights after step n − 1 − lag."""

    name: Literal["lagged"] = "lagged"
    lag: int = Field(0, ge=0, description="rollouts that are sampled ahead; 0: none")
    on_update: ClassVar[str] = "wait"
    """A sample keeps its weights to its end."""


class FreeLoop(Section):
    """Generators never wait for the learner, except to keep the bound on lag."""

    name: Literal["free"] = "free"
    max_lag: int = Field(1, ge=0, description="versions that a token may be behind the learner")
    on_stale: Literal["wait", "drop"] = Field("wait", description="how the bound is kept")
    window: int | None = Field(None, ge=1, description="groups looked at; None: one rollout")
    on_update: Literal["wait", "recompute", "keep"] = "wait"
    """When weights come, samples in flight end first, or they go on and their caches are computed
    again (AReaL) or kept (PipelineRL)."""


AnyLoop = Annotated[Annotated[LaggedLoop | FreeLoop, Field(discriminator="name")], named("lagged")]


class Resources(Section):
    """What Ray keeps free for each actor of a kind."""

    cpus: float = Field(1.0, ge=0)
    gpus: float = Field(0.0, ge=0)
    custom: dict[str, Annotated[float, Field(gt=0)]] = Field({})
    """Resources that nodes were started with; they say where actors may sit."""

    def __str__(self) -> str:
        units = {"CPUs": self.cpus, "GPUs": self.gpus, **self.custom}
        return ", ".join(f"{amount:g} {unit}" for unit, amount in units.items())


class RuntimeConfig(Section):
    name: Literal["local", "ray", "torchrun"] = "local"
    """One process, Ray's actors, or ranks that learn together on a mesh."""
    address: str | None = Field(None, description="of a Ray cluster; None: one is started here")
    generators: int = Field(1, ge=1, description="actors that sample")
    generator: Resources = Resources()
    learner: Resources = Resources()
    threads: int | None = Field(None, ge=1, description="of each actor; None: one per core")
    transport: Literal["auto", "shared", "store", "nixl", "gloo", "nccl", "ipc"] = "auto"
    """How weights travel; auto is the fastest way that works."""
    deadline: float = Field(600.0, gt=0, description="seconds in which an actor must answer")


AnyRuntime = Annotated[RuntimeConfig, BeforeValidator(as_table)]


class BufferConfig(Section):
    """Groups that were sampled are kept, and each step learns from some of them."""

    capacity: int = Field(..., ge=1, description="groups that are kept")
    order: Literal["recent", "uniform", "weighted"] = "uniform"
    """The newest first (which replays nothing), all alike, or by 1 / (1 + age)."""
    max_age: int | None = Field(None, ge=0, description="versions; None: no bound")
    max_uses: int = Field(1, ge=1, description="steps that may learn from a group")


def check(recipe: Recipe) -> None:
    """Raises where a strategy can't work."""
    loop, objective = recipe.loop, recipe.objective
    if isinstance(loop, FreeLoop):
        if recipe.runtime.name != "ray":
            raise ValueError("loop.name = 'free' needs actors; set runtime.name = 'ray'")
        if loop.window is not None and loop.window < recipe.prompts_per_rollout:
            raise ValueError(
                f"loop.window = {loop.window} is smaller than the {recipe.prompts_per_rollout} "
                "groups of a rollout; use that or more"
            )
        if recipe.buffer is not None:
            raise ValueError("has a buffer, which goes with loop.name = 'lagged' alone")
    if recipe.buffer is not None and recipe.buffer.order == "recent" and recipe.buffer.max_uses > 1:
        raise ValueError(
            f"buffer.max_uses = {recipe.buffer.max_uses} has no effect with buffer.order = "
            "'recent': as many groups are learned from as are new, so that none is used again; "
            "use buffer.order = 'uniform' or 'weighted'"
        )
    if recipe.buffer is not None and recipe.buffer.capacity < recipe.prompts_per_rollout:
        raise ValueError(
            f"buffer.capacity = {recipe.buffer.capacity} is smaller than the "
            f"{recipe.prompts_per_rollout} groups of a batch; use that or more"
        )
    if not recipe.is_stale:
        return
    by_behavior = objective.loss.compares and objective.proximal == "behavior"
    if not by_behavior and not isinstance(objective.importance, Importance):
        raise ValueError(
            "loop or buffer gives tokens of older versions, which need a ratio to the policy "
            "that sampled them; use a loss with a ratio and objective.proximal = 'behavior', "
            "or objective.importance = 'truncate' or 'mask'"
        )


def describe(recipe: Recipe) -> list[tuple[str, list[tuple[str, str]]]]:
    """A section of a plan: who samples and learns where, and how far apart. It is empty for the
    synchronous loop in this process."""
    runtime, loop, lines = recipe.runtime, recipe.loop, list[tuple[str, str]]()
    k = recipe.gradient_steps_per_rollout
    if isinstance(loop, FreeLoop):
        told = f"at most {loop.max_lag} versions, of which a rollout adds {k}"
        late = "generators wait" if loop.on_stale == "wait" else "groups are dropped"
        lines.append(("lag", f"{told}; beyond that, {late}"))
        batch = recipe.prompts_per_rollout
        lines.append(("window", f"the learner takes {batch} of {loop.window or batch} groups"))
        lines.append(("new weights", f"loop.on_update = {loop.on_update!r}"))
    elif loop.lag:
        told = f"rollout n is sampled with the weights after step n − {loop.lag + 1}"
        lines.append(("lag", f"{loop.lag} × {k} versions: {told}"))
    if recipe.buffer is not None:
        buffer = recipe.buffer
        told = f"{buffer.capacity} groups, {buffer.order}, each for {buffer.max_uses} steps at most"
        lines.append(("buffer", told))
    if runtime.name == "ray":
        where = "a Ray of its own on this machine"
        lines.append(("Ray", where if runtime.address is None else f"at {runtime.address}"))
        lines.append(("generators", f"{runtime.generators} × ({runtime.generator})"))
        lines.append(("learner", f"{recipe.mesh.ranks} × ({runtime.learner})"))
        lines.append(("scorer", "1, with grader processes of its own"))
    return [("strategy", lines)] if lines else []
