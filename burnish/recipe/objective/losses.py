"""The loss of each token, and its weight in the sum."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from burnish.pieces.piece import Function, Piece, name_of, rl

if TYPE_CHECKING:
    from torch import Tensor

    from burnish.types import PackedBatch

Streams = dict[str, "Tensor"]
"""Tensors [N] by name: logprobs, proximal, ratio, advantages, mask, sequence_ids."""


class Loss(Piece):
    """The loss of each token, before its weight.

    It has the name of its function in ``rl.losses``, and its settings are keywords there.
    """

    reads: ClassVar[tuple[str, ...]] = ("ratio", "advantages")
    """The streams that the function takes."""

    @property
    def compares(self) -> bool:
        """Whether it compares the policy with the proximal policy."""
        return "ratio" in self.reads or "proximal" in self.reads

    @property
    def has_term(self) -> bool:
        """Whether a token whose advantage is 0 has a gradient, too."""
        return False

    def per_token(self, streams: Streams) -> Tensor:
        """The loss [N]."""
        taken = {name: streams[name] for name in self.reads}
        return rl("losses", self.name)(**taken, **self.settings)

    def is_clipped(self, streams: Streams) -> Tensor | None:
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

    def per_token(self, streams: Streams) -> Tensor:
        return rl("losses", "clipped")(streams["ratio"], streams["advantages"], **self.settings)

    def is_clipped(self, streams: Streams) -> Tensor:
        ratio, advantages = streams["ratio"], streams["advantages"]
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

    def is_clipped(self, streams: Streams) -> Tensor:
        return (streams["ratio"] < self.floor) | (streams["ratio"] > self.cap)


class Sapo(Loss):
    name: Literal["sapo"] = "sapo"
    written: ClassVar[str] = (
        "L_t = −A_t (4 / τ) σ(τ (ρ_t − 1)),  τ = {positive:g} if A_t > 0, else {negative:g}"
    )
    positive: float = Field(1.0, gt=0, allow_inf_nan=False, description="τ of good tokens")
    negative: float = Field(1.05, gt=0, allow_inf_nan=False, description="τ of the others")


class Gmpo(Loss):
    name: Literal["gmpo"] = "gmpo"
    written: ClassVar[str] = (
        "L_t = −A_t exp(mean over the response of x_t),  x_t = log π − log π_prox, at most "
        "{high:g} if A_t > 0, at least −{low:g} if A_t < 0"
    )
    reads: ClassVar[tuple[str, ...]] = (
        *("logprobs", "proximal", "advantages"),
        *("mask", "sequence_ids"),
    )
    low: float = Field(0.4, ge=0, description="log-ratio at least −low; inf: no bound")
    high: float = Field(0.4, ge=0, description="log-ratio at most high; inf: no bound")

    def is_clipped(self, streams: Streams) -> Tensor:
        moved = streams["logprobs"] - streams["proximal"]
        return rl("losses", "is_beyond")(moved, streams["advantages"], **self.settings)


class Dppo(Loss):
    name: Literal["dppo"] = "dppo"
    reads: ClassVar[tuple[str, ...]] = ("logprobs", "proximal", "advantages")
    low: float = Field(0.2, ge=0, description="for bad tokens; the paper: 0.15 by tv, 0.05 by kl")
    high: float = Field(0.2, ge=0, description="for good tokens; the paper: the same")
    divergence: Literal["tv", "kl"] = Field("tv", description="of the token against the rest")
    cap: float = Field(20.0, gt=0, description="the largest ratio")
    kl: float = Field(0.0, ge=0, allow_inf_nan=False, description="weight of (log ρ)²")

    def formula(self) -> str:
        distance = "π − π_prox" if self.divergence == "tv" else "±KL(π_prox ‖ π) of token and rest"
        term = f" + {self.kl:g} (log ρ_t)²" if self.kl else ""
        mask = f"M_t = 0 if A_t > 0, D_t > {self.high:g} or A_t < 0, D_t < −{self.low:g}"
        return f"L_t = −M_t sg[min(ρ_t, {self.cap:g})] A_t log π{term},  {mask},  D_t = {distance}"

    @property
    def has_term(self) -> bool:
        return self.kl > 0

    def is_clipped(self, streams: Streams) -> Tensor:
        moved = rl("losses", "signed_divergence")(
            streams["logprobs"], streams["proximal"], divergence=self.divergence
        )
        bounds = {"low": self.low, "high": self.high}
        return rl("losses", "is_beyond")(moved, streams["advantages"], **bounds)


class OwnLoss(Loss):
    """A function of a script: log π, ratio and advantages, [N] each, to the loss [N]."""

    name: Literal["own"] = "own"
    function: Function = Field(description="the function, or its name")

    def formula(self) -> str:
        return f"L_t = {name_of(self.function)}(log π, ρ_t, A_t)"

    def per_token(self, streams: Streams) -> Tensor:
        taken = (streams[name] for name in ("logprobs", "ratio", "advantages"))
        result: Tensor = self.function(*taken)
        return result


class Reduction(Piece):
    """The weight of each token: its denominator.

    It has the name of its function in ``rl.reduce``, and its settings are keywords there.
    """

    def weights(self, batch: PackedBatch) -> Tensor:
        """[N] over a whole train batch."""
        ids = batch.sequence_ids
        return rl("reduce", self.name)(batch.is_action, sequence_ids=ids, **self.settings)


class SequenceMean(Reduction):
    name: Literal["sequence_mean"] = "sequence_mean"
    written: ClassVar[str] = "w_(i,t) = 1 / (S |y_i|)"


class TokenMean(Reduction):
    name: Literal["token_mean"] = "token_mean"
    written: ClassVar[str] = "w_(i,t) = 1 / Σ_i |y_i|"


class PromptMean(Reduction):
    name: Literal["prompt_mean"] = "prompt_mean"
    written: ClassVar[str] = "w_(i,t) = 1 / (prompts · Σ_g |y_j|)"

    def weights(self, batch: PackedBatch) -> Tensor:
        groups, ids = batch.group_ids, batch.sequence_ids
        return rl("reduce", "prompt_mean")(batch.is_action, group_ids=groups, sequence_ids=ids)


class Constant(Reduction):
    name: Literal["constant"] = "constant"
    written: ClassVar[str] = "w_(i,t) = 1 / (S · {length})"
    length: int = Field(ge=1, description="left out: the largest response length")


AnyLoss = Reinforce | Unclipped | Clip | Cispo | Sapo | Gmpo | Dppo | OwnLoss
AnyReduction = SequenceMean | TokenMean | PromptMean | Constant
