"""The loss of each token, and the weight of each token in the sum."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from burnish.console.text import counted
from burnish.errors import ConfigError
from burnish.recipe.base import nearest
from burnish.recipe.objective.piece import Function, Piece, arxiv, name_of

if TYPE_CHECKING:
    from torch import Tensor

    from burnish.types import PackedBatch

Streams = dict[str, "Tensor"]
"""Tensors [N] by name: logprobs, ratio, advantages, and those of ``STREAMS``."""
STREAMS = ("mask", "sequence_ids", "behavior", "proximal", "entropy")
"""Further streams that a loss from a script can take: whether a token is an action, the number of
its response in the pack, its log-probabilities under the behavior and the proximal policy, and the
entropy of the policy's distribution, with gradient."""


class Loss(Piece):
    """Base class of the losses that a recipe can select. A loss maps streams to one value per
    token; a `Reduction` weights and sums these values."""

    reads: ClassVar[tuple[str, ...]] = ("ratio", "advantages")
    """The streams that it reads."""

    @property
    def compares(self) -> bool:
        """Whether it compares the policy with the proximal policy."""
        return "ratio" in self.reads or "proximal" in self.reads

    @property
    def has_term(self) -> bool:
        """Whether the loss has a term without the advantage, so that tokens with an advantage of 0
        have a gradient too."""
        return False

    def per_token(self, streams: Streams) -> Tensor:
        """Return the loss of each token, [N], before the reduction."""
        raise NotImplementedError

    def is_clipped(self, streams: Streams) -> Tensor | None:
        """Return whether a bound of the loss is active on each token, [N] bool; None if the loss
        has no bounds."""
        return None


class Reinforce(Loss):
    name: Literal["reinforce"] = "reinforce"
    written: ClassVar[str] = "L_t = −A_t log π"
    paper: ClassVar[str] = "Williams 1992"
    reads: ClassVar[tuple[str, ...]] = ("logprobs", "advantages")

    def per_token(self, streams: Streams) -> Tensor:
        from burnish.rl.losses import reinforce

        return reinforce(streams["logprobs"], streams["advantages"])


class Unclipped(Loss):
    name: Literal["unclipped"] = "unclipped"
    written: ClassVar[str] = "L_t = −A_t ρ_t"

    def per_token(self, streams: Streams) -> Tensor:
        from burnish.rl.losses import unclipped

        return unclipped(streams["ratio"], streams["advantages"])


class Clip(Loss):
    name: Literal["clip"] = "clip"
    paper: ClassVar[str] = (
        f"PPO, {arxiv('1707.06347')}; DAPO, {arxiv('2503.14476')}; dual clip, {arxiv('1912.09729')}"
    )
    low: float = Field(0.2, ge=0, description="ratio at least 1 − low; inf: unbounded")
    high: float = Field(0.2, ge=0, description="ratio at most 1 + high; inf: unbounded")
    dual: float | None = Field(
        None, gt=1, description="bounds the loss where the advantage is negative; None: unbounded"
    )

    def formula(self) -> str:
        clipped = f"clip(ρ_t, {1 - self.low:g}, {1 + self.high:g})"
        dual = "" if self.dual is None else f", at most −{self.dual:g} A_t where A_t < 0"
        return f"L_t = −min(ρ_t A_t, {clipped} A_t){dual}"

    def per_token(self, streams: Streams) -> Tensor:
        from burnish.rl.losses import clipped

        ratio, advantages = streams["ratio"], streams["advantages"]
        return clipped(ratio, advantages, low=self.low, high=self.high, dual=self.dual)

    def is_clipped(self, streams: Streams) -> Tensor:
        from burnish.rl.losses import is_clipped, is_dual_clipped

        ratio, advantages = streams["ratio"], streams["advantages"]
        found = is_clipped(ratio, advantages, low=self.low, high=self.high)
        if self.dual is not None:
            found |= is_dual_clipped(ratio, advantages, dual=self.dual)
        return found


class Cispo(Loss):
    ordered: ClassVar[tuple[str, str] | None] = ("floor", "cap")
    name: Literal["cispo"] = "cispo"
    written: ClassVar[str] = "L_t = −sg[clip(ρ_t, {floor:g}, {cap:g})] A_t log π"
    paper: ClassVar[str] = f"MiniMax-M1, {arxiv('2506.13585')}"
    reads: ClassVar[tuple[str, ...]] = ("logprobs", "ratio", "advantages")
    cap: float = Field(5.0, gt=0, description="the largest ratio")
    floor: float = Field(0.0, ge=0, description="the smallest ratio")

    def per_token(self, streams: Streams) -> Tensor:
        from burnish.rl.losses import cispo

        logprobs, ratio, advantages = (streams[name] for name in self.reads)
        return cispo(logprobs, ratio, advantages, cap=self.cap, floor=self.floor)

    def is_clipped(self, streams: Streams) -> Tensor:
        return (streams["ratio"] < self.floor) | (streams["ratio"] > self.cap)


class Sapo(Loss):
    name: Literal["sapo"] = "sapo"
    written: ClassVar[str] = (
        "L_t = −A_t (4 / τ) σ(τ (ρ_t − 1)),  τ = {positive:g} if A_t > 0, else {negative:g}"
    )
    paper: ClassVar[str] = f"SAPO, {arxiv('2511.20347')}"
    positive: float = Field(
        1.0, gt=0, allow_inf_nan=False, description="τ of tokens with a positive advantage"
    )
    negative: float = Field(1.05, gt=0, allow_inf_nan=False, description="τ of the other tokens")

    def per_token(self, streams: Streams) -> Tensor:
        from burnish.rl.losses import sapo

        ratio, advantages = streams["ratio"], streams["advantages"]
        return sapo(ratio, advantages, positive=self.positive, negative=self.negative)


class Gmpo(Loss):
    name: Literal["gmpo"] = "gmpo"
    written: ClassVar[str] = (
        "L_t = −A_t exp(mean over the response of x_t),  x_t = log π − log π_prox, at most "
        "{high:g} if A_t > 0, at least −{low:g} if A_t < 0"
    )
    paper: ClassVar[str] = f"GMPO, {arxiv('2507.20673')}"
    reads: ClassVar[tuple[str, ...]] = (
        *("logprobs", "proximal", "advantages"),
        *("mask", "sequence_ids"),
    )
    low: float = Field(0.4, ge=0, description="log-ratio at least −low; inf: unbounded")
    high: float = Field(0.4, ge=0, description="log-ratio at most high; inf: unbounded")

    def per_token(self, streams: Streams) -> Tensor:
        from burnish.rl.losses import gmpo

        given = {name: streams[name] for name in self.reads}
        return gmpo(**given, low=self.low, high=self.high)

    def is_clipped(self, streams: Streams) -> Tensor:
        from burnish.rl.losses import is_beyond

        moved = streams["logprobs"] - streams["proximal"]
        return is_beyond(moved, streams["advantages"], low=self.low, high=self.high)


class Dppo(Loss):
    name: Literal["dppo"] = "dppo"
    paper: ClassVar[str] = f"DPPO, {arxiv('2602.04879')}"
    reads: ClassVar[tuple[str, ...]] = ("logprobs", "proximal", "advantages")
    low: float = Field(
        0.2, ge=0, description="bound where A_t < 0; the paper uses 0.15 with tv and 0.05 with kl"
    )
    high: float = Field(
        0.2, ge=0, description="bound where A_t > 0; the paper uses the same values as for low"
    )
    divergence: Literal["tv", "kl"] = Field(
        "tv", description="divergence of the token against all other tokens"
    )
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

    def per_token(self, streams: Streams) -> Tensor:
        from burnish.rl.losses import dppo

        logprobs, proximal, advantages = (streams[name] for name in self.reads)
        return dppo(logprobs, proximal, advantages, **self.settings)

    def is_clipped(self, streams: Streams) -> Tensor:
        from burnish.rl.losses import is_beyond, signed_divergence

        moved = signed_divergence(
            streams["logprobs"], streams["proximal"], divergence=self.divergence
        )
        return is_beyond(moved, streams["advantages"], low=self.low, high=self.high)


class OwnLoss(Loss):
    """A function from a script that maps log π, ratio and advantages, [N] each, to the loss [N].

    Further parameters of the function with names of ``STREAMS`` receive these streams as keyword
    arguments.
    """

    name: Literal["own"] = "own"
    function: Function = Field(description="the function, or its name")

    @field_validator("function")
    @classmethod
    def _check_parameters(cls, function: Any) -> Any:
        if not isinstance(function, str):
            asked_streams(function)
        return function

    @property
    def asked(self) -> tuple[str, ...]:
        """Names of the streams that the function takes as keyword arguments."""
        return () if isinstance(self.function, str) else asked_streams(self.function)

    @property
    def has_term(self) -> bool:
        """With its own streams, a function can have a term without the advantage."""
        return bool(self.asked)

    def formula(self) -> str:
        further = "".join(f", {name}" for name in self.asked)
        return f"L_t = {name_of(self.function)}(log π, ρ_t, A_t{further})"

    def per_token(self, streams: Streams) -> Tensor:
        given = [streams[name] for name in ("logprobs", "ratio", "advantages")]
        result: Tensor = self.function(*given, **{name: streams[name] for name in self.asked})
        shape = getattr(result, "shape", None)
        if shape != given[0].shape:
            got = type(result).__name__ if shape is None else f"the shape {list(shape)}"
            raise ConfigError(
                f"objective.loss.function: {name_of(self.function)} must return the loss of each "
                f"token, of the shape {list(given[0].shape)} of log π, got {got}; leave out sums "
                "and means, because objective.reduction weights the tokens"
            )
        return result


def asked_streams(function: Any) -> tuple[str, ...]:
    """Return the names of the streams that ``function``, a loss from a script, takes as keyword
    arguments.

    Its first three positional parameters are log π, ratio and advantages. Other parameters must be
    named like a stream, or have a default. Raise a ValueError for any other signature.
    """
    known, name = ", ".join(STREAMS), name_of(function)
    if not callable(function):
        raise ValueError(f"must be a function, got {function!r}; pass a function of a script")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some functions of C extensions have no signature
        return ()
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    placed = [p for p in parameters if p.kind in by_place]
    takes_more = any(p.kind == inspect.Parameter.VAR_POSITIONAL for p in parameters)
    if len(placed) < 3 and not takes_more:
        raise ValueError(
            f"{name} takes {counted(len(placed), 'positional parameter')}, and a loss is called "
            "with three, log π, ratio and advantages; give it the parameters (logprobs, ratio, "
            f"advantages), and after a * any of {known}"
        )
    named = [p for p in parameters if p.kind in (*by_place, inspect.Parameter.KEYWORD_ONLY)]
    asked = [p for p in named if p not in placed[:3]]
    for parameter in asked:
        is_known = parameter.name in STREAMS
        by_name = parameter.kind != inspect.Parameter.POSITIONAL_ONLY
        if (is_known and by_name) or parameter.default is not inspect.Parameter.empty:
            continue
        if is_known:
            raise ValueError(
                f"{name} takes {parameter.name} by position only; move it behind the /, so that it "
                "can be passed by name"
            )
        raise ValueError(
            f"{name} has the parameter {parameter.name!r}, and a loss can receive {known}"
            f"{nearest(parameter.name, STREAMS)}; rename it, remove it, or give it a default"
        )
    return tuple(p.name for p in asked if p.name in STREAMS)


class Reduction(Piece):
    """Base class of the reductions that a recipe can select. A reduction determines the weight of
    each token in the loss of a train batch."""

    def weights(self, batch: PackedBatch) -> Tensor:
        """Return the weight of each token in the loss, [N]; 0 for tokens that are not actions.

        ``batch`` must be a whole train batch and not a part of it, because the weights depend on
        its numbers of responses and tokens. They need not sum to 1.
        """
        raise NotImplementedError


class SequenceMean(Reduction):
    name: Literal["sequence_mean"] = "sequence_mean"
    written: ClassVar[str] = "w_(i,t) = 1 / (S |y_i|)"
    paper: ClassVar[str] = f"GRPO, {arxiv('2402.03300')}"

    def weights(self, batch: PackedBatch) -> Tensor:
        from burnish.rl.reduce import sequence_mean

        return sequence_mean(batch.is_action, sequence_ids=batch.sample_ids)


class TokenMean(Reduction):
    name: Literal["token_mean"] = "token_mean"
    written: ClassVar[str] = "w_(i,t) = 1 / Σ_i |y_i|"
    paper: ClassVar[str] = f"DAPO, {arxiv('2503.14476')}"

    def weights(self, batch: PackedBatch) -> Tensor:
        from burnish.rl.reduce import token_mean

        return token_mean(batch.is_action, sequence_ids=batch.sample_ids)


class PromptMean(Reduction):
    name: Literal["prompt_mean"] = "prompt_mean"
    written: ClassVar[str] = "w_(i,t) = 1 / (prompts · Σ_g |y_j|)"
    paper: ClassVar[str] = f"ScaleRL, {arxiv('2510.13786')}"

    def weights(self, batch: PackedBatch) -> Tensor:
        from burnish.rl.reduce import prompt_mean

        groups, ids = batch.group_ids, batch.sample_ids
        return prompt_mean(batch.is_action, group_ids=groups, sequence_ids=ids)


class Constant(Reduction):
    name: Literal["constant"] = "constant"
    written: ClassVar[str] = "w_(i,t) = 1 / (S · {length})"
    paper: ClassVar[str] = f"Dr. GRPO, {arxiv('2503.20783')}"
    length: int = Field(ge=1, description="default: the largest length of a response")

    def weights(self, batch: PackedBatch) -> Tensor:
        from burnish.rl.reduce import constant

        return constant(batch.is_action, length=self.length, sequence_ids=batch.sample_ids)


AnyLoss = Reinforce | Unclipped | Clip | Cispo | Sapo | Gmpo | Dppo | OwnLoss
AnyReduction = SequenceMean | TokenMean | PromptMean | Constant
