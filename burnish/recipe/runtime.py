"""The sections that determine how sampling and learning share time and machines."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from burnish.recipe.base import BY_NAME, Section, named


class LaggedLoop(Section):
    """A loop with a fixed lag: rollout n is sampled with the weights after step n − 1 − lag.

    With a lag of 0, sampling and learning take turns.
    """

    name: Literal["lagged"] = "lagged"
    lag: int = Field(0, ge=0, description="number of rollouts sampled ahead of the learner")
    on_update: ClassVar[str] = "wait"
    """Weights are not updated while samples are in flight."""


class FreeLoop(Section):
    """An asynchronous loop: generators sample without waiting for the learner, except to keep the
    lag of their samples within its bound."""

    name: Literal["free"] = "free"
    max_lag: int = Field(1, ge=0, description="largest lag of a token, in versions")
    on_stale: Literal["wait", "drop"] = Field("wait", description="how max_lag is enforced")
    window: int | None = Field(
        None, ge=1, description="groups that the learner selects from; None: one rollout"
    )
    on_update: Literal["wait", "recompute", "keep"] = Field(
        "wait",
        description="when new weights arrive, samples in flight finish first (wait), or they "
        "continue and their cache is recomputed (AReaL) or kept (PipelineRL)",
    )


AnyLoop = Annotated[LaggedLoop | FreeLoop, BY_NAME, named("lagged")]


class Resources(Section):
    """The resources that Ray reserves for one actor. A recipe has one such section per kind of
    actor, which applies to each actor of that kind."""

    cpus: float = Field(1.0, ge=0, description="CPUs that Ray reserves for an actor")
    gpus: float = Field(0.0, ge=0, description="GPUs, or a share of one, reserved for an actor")
    custom: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="custom resources of Ray's nodes, which determine where actors may run"
    )

    def __str__(self) -> str:
        units = {"CPUs": self.cpus, "GPUs": self.gpus, **self.custom}
        return ", ".join(f"{amount:g} {unit}" for unit, amount in units.items())


class LocalRuntime(Section):
    """Sampling and learning take place in one process."""

    name: Literal["local"] = "local"
    threads: ClassVar[None] = None
    """None: one thread per core."""


class RayRuntime(Section):
    """Generators, scorer and learner are Ray actors."""

    name: Literal["ray"] = "ray"
    address: str | None = Field(
        None, description="address of a Ray cluster; None: Ray is started on this machine"
    )
    generators: int = Field(1, ge=1, description="number of actors that sample")
    generator: Resources = Field(Resources(), description="resources of each generator")
    learner: Resources = Field(Resources(), description="resources of the learner, or of each rank")
    threads: int | None = Field(None, ge=1, description="threads of each actor; None: one per core")
    transport: Literal["auto", "shared", "store", "nixl", "gloo", "nccl", "ipc"] = Field(
        "auto",
        description="how weights are transferred; auto: the fastest transport that works",
    )
    deadline: float = Field(600.0, gt=0, description="timeout in seconds of a call to an actor")


class TorchrunRuntime(Section):
    """Ranks started by torchrun learn together on a mesh; the first one also samples."""

    name: Literal["torchrun"] = "torchrun"
    threads: int | None = Field(
        None, ge=1, description="threads of each rank; None: an equal share"
    )
    deadline: float = Field(600.0, gt=0, description="timeout in seconds of a collective")


AnyRuntime = Annotated[LocalRuntime | RayRuntime | TorchrunRuntime, BY_NAME, named("local")]


class BufferConfig(Section):
    """A replay buffer: sampled groups are kept, and each step learns from some of them."""

    capacity: int = Field(..., ge=1, description="number of groups kept")
    order: Literal["recent", "uniform", "weighted"] = Field(
        "uniform",
        description="how a step selects groups: the newest first (which replays nothing), at "
        "random with equal probability, or with a probability proportional to 1 / (1 + age)",
    )
    max_age: int | None = Field(None, ge=0, description="largest age in versions; None: unbounded")
    max_uses: int = Field(1, ge=1, description="maximum number of steps that use a group")

    @model_validator(mode="after")
    def _check_uses(self) -> Self:
        if self.order == "recent" and self.max_uses > 1:
            raise ValueError(
                f"has max_uses = {self.max_uses}, which has no effect with order = 'recent': each "
                "step takes as many groups as are new, so that none is used again; use order = "
                "'uniform' or 'weighted'"
            )
        return self
