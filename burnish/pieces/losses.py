"""The loss of each token, and its weight in the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from burnish.pieces.piece import Function, Piece, name_of, rl

if TYPE_CHECKING:
    from torch import Tensor


class Loss(Piece):
    """The loss of each token, before its weight.

    It has the name of its function in ``rl.losses``, and its settings are keywords there.
    """

    reads: ClassVar[tuple[str, ...]] = ("ratio", "advantages")
    """The streams that the function takes, out of logprobs, ratio and advantages."""

    def per_token(self, logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        """The loss [N] of three streams, [N] each."""
        streams = {"logprobs": logprobs, "ratio": ratio, "advantages": advantages}
        taken = (streams[name] for name in self.reads)
        return rl("losses", self.name)(*taken, **self.settings)

    def is_clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor | None:
        """[N] bool: whether a bound is in force; None if the loss has no bounds."""
        return None


class Reinforce(Loss):
    name: Literal["reinforce"] = "reinforce"
    written: ClassVar[str] = "L_t = −A_t log π"
    reads: ClassVar[tuple[str, ...]] = ("logprobs", "advantages")


class Unclipped(Loss):
    name: Literal["unclipped"] = "unclipped"
    written: ClassVar[str] = "L_t = −A_t ρ_t"


class Clip(Loss):
    name: Literal["clip"] = "clip"
    low: float = Field(0.2, ge=0, description="ratio at least 1 − low; inf: no bound")
    high: float = Field(0.2, ge=0, description="ratio at most 1 + high; inf: no bound")
    dual: float | None = Field(None, gt=1, description="bounds the loss of bad tokens")

    def formula(self) -> str:
        clipped = f"clip(ρ_t, {1 - self.low:g}, {1 + self.high:g})"
        dual = "" if self.dual is None else f", at most −{self.dual:g} A_t where A_t < 0"
        return f"L_t = −min(ρ_t A_t, {clipped} A_t){dual}"

    def per_token(self, logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        return rl("losses", "clipped")(ratio, advantages, **self.settings)

    def is_clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        found = rl("losses", "is_clipped")(ratio, advantages, low=self.low, high=self.high)
        if self.dual is not None:
            found |= rl("losses", "is_dual_clipped")(ratio, advantages, dual=self.dual)
        return found


class Cispo(Loss):
    ordered: ClassVar[tuple[str, str] | None] = ("floor", "cap")
    name: Literal["cispo"] = "cispo"
    written: ClassVar[str] = "L_t = −sg[clip(ρ_t, {floor:g}, {cap:g})] A_t log π"
    reads: ClassVar[tuple[str, ...]] = ("logprobs", "ratio", "advantages")
    cap: float = Field(5.0, gt=0, description="the largest ratio")
    floor: float = Field(0.0, ge=0, description="the smallest ratio")

    def is_clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return (ratio < self.floor) | (ratio > self.cap)


class OwnLoss(Loss):
    """A function of a script: log π, ratio and advantages, [N] each, to the loss [N]."""

    name: Literal["own"] = "own"
    function: Function = Field(description="the function, or its name")

    def formula(self) -> str:
        return f"L_t = {name_of(self.function)}(log π, ρ_t, A_t)"

    def per_token(self, logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        result: Tensor = self.function(logprobs, ratio, advantages)
        return result


class Reduction(Piece):
    """The weight of each token: its denominator.

    It has the name of its function in ``rl.reduce``, and its settings are keywords there.
    """

    def weights(self, mask: Tensor, sequence_ids: Tensor) -> Tensor:
        """[N] over a whole train batch."""
        return rl("reduce", self.name)(mask, sequence_ids=sequence_ids, **self.settings)


class SequenceMean(Reduction):
    name: Literal["sequence_mean"] = "sequence_mean"
    written: ClassVar[str] = "w_(i,t) = 1 / (S |y_i|)"


class TokenMean(Reduction):
    name: Literal["token_mean"] = "token_mean"
    written: ClassVar[str] = "w_(i,t) = 1 / Σ_i |y_i|"


class Constant(Reduction):
    name: Literal["constant"] = "constant"
    written: ClassVar[str] = "w_(i,t) = 1 / (S · {length})"
    length: int = Field(ge=1, description="left out: the largest response length")


AnyLoss = Reinforce | Unclipped | Clip | Cispo | OwnLoss
AnyReduction = SequenceMean | TokenMean | Constant
