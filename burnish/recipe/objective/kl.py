"""Terms beside the loss: a KL to a reference, and a correction of the sampler's gap."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pydantic import Field, model_validator

from burnish.pieces.piece import rl
from burnish.sections import Section

if TYPE_CHECKING:
    from torch import Tensor

    from burnish.types import PackedBatch


class Absent(Section):
    """The recipe has no piece of this kind."""

    name: Literal["none"] = "none"
    where: ClassVar[None] = None
    refresh: ClassVar[None] = None


class KL(Section):
    """A term that pulls the policy back to a reference."""

    name: Literal["k1", "k2", "k3"]
    coefficient: float = Field(0.01, gt=0, allow_inf_nan=False)
    where: Literal["loss", "reward"] = "loss"
    refresh: int | None = Field(None, ge=1, description="reference := policy every n steps")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.name, self.where) == ("k1", "loss"):
            raise ValueError(
                "= 'k1' has a gradient of mean 0 in the loss; use name = 'k3', or where = 'reward'"
            )
        return self

    def formula(self) -> str:
        values = {"k1": "x", "k2": "½ x²", "k3": "exp(−x) + x − 1"}
        return f"{self.name} = {values[self.name]},  x = log π − log π_ref"

    def per_token(self, logprobs: Tensor, reference: Tensor) -> Tensor:
        """[N]"""
        return rl("kl", self.name)(logprobs, reference)


class Importance(Section):
    """A weight per token that corrects the gap between sampler and learner."""

    ordered: ClassVar[tuple[str, str] | None] = ("low", "high")
    name: Literal["truncate", "mask"]
    level: Literal["token", "sequence", "geometric"] = "token"
    low: float = Field(0.0, ge=0, allow_inf_nan=False)
    high: float = Field(2.0, gt=0)

    def formula(self) -> str:
        over = {"token": "", "sequence": "product over the response of "}
        told = over.get(self.level, "geometric mean over the response of ")
        u = f"u_t = {told}π_prox / π_behavior"
        if self.name == "truncate":
            return f"v_t = clip(u_t, {self.low:g}, {self.high:g}),  {u}"
        return f"v_t = u_t if {self.low:g} ≤ u_t ≤ {self.high:g}, else 0,  {u}"

    def weights(self, proximal: Tensor, batch: PackedBatch) -> Tensor:
        """[N], without gradient."""
        behavior, mask, ids = batch.behavior_logprobs, batch.is_action, batch.sequence_ids
        ratio = rl("ratios", "importance_ratio")
        weights = ratio(proximal, behavior, mask, level=self.level, sequence_ids=ids)
        bound = rl("ratios", "truncate" if self.name == "truncate" else "keep_between")
        return bound(weights, low=self.low, high=self.high)
