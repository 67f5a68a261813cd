"""The pieces of an objective: advantage × ratio × loss × reduction × KL × importance.

A piece is one section here: its name, its settings, its formula, and a method that calls its
function in ``rl/``. The method imports the function when it is called, so that ``burnish plan`` can
print an objective, and refuse a wrong one, without loading torch. ``learner/objective.py`` puts the
pieces of a recipe together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, model_validator

from burnish.sections import OWN, Section, named

if TYPE_CHECKING:
    from torch import Tensor

    from burnish.types import PackedBatch


class Advantage(Section):
    """How much better than expected a response or a token was."""

    group: ClassVar[int] = 2
    """The least responses that a group needs."""
    over_time: ClassVar[bool] = False
    """Whether it takes a reward per token, [N], and not one per response, [S]."""

    def formula(self) -> str:
        raise NotImplementedError

    def per_response(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        """[S] of rewards [S]."""
        raise NotImplementedError

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        """[N], 0 outside of actions."""
        from burnish.rl.sequences import to_tokens

        per_response = self.per_response(rewards, batch.group_ids)
        return to_tokens(per_response, batch.is_action, batch.sequence_ids)


class Raw(Advantage):
    name: Literal["raw"] = "raw"
    group: ClassVar[int] = 1

    def formula(self) -> str:
        return "A_i = r_i"

    def per_response(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        from burnish.rl.advantages import raw

        return raw(rewards, group_ids)


class GroupMean(Advantage):
    name: Literal["group_mean"] = "group_mean"

    def formula(self) -> str:
        return "A_i = r_i − mean_g(r)"

    def per_response(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        from burnish.rl.advantages import group_mean

        return group_mean(rewards, group_ids)


class GroupZscore(Advantage):
    name: Literal["group_zscore"] = "group_zscore"
    eps: float = Field(1e-6, gt=0, description="added to the std")

    def formula(self) -> str:
        return f"A_i = (r_i − mean_g(r)) / (std_g(r) + {self.eps:g})"

    def per_response(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        from burnish.rl.advantages import group_zscore

        return group_zscore(rewards, group_ids, eps=self.eps)


class LeaveOneOut(Advantage):
    name: Literal["leave_one_out"] = "leave_one_out"

    def formula(self) -> str:
        return "A_i = r_i − mean of the other r of the group"

    def per_response(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        from burnish.rl.advantages import leave_one_out

        return leave_one_out(rewards, group_ids)


class BestOfGroup(Advantage):
    name: Literal["best_of_group"] = "best_of_group"
    group: ClassVar[int] = 1
    centered: bool = Field(False, description="subtract the group's mean")

    def formula(self) -> str:
        return f"A_i = {'(r_i − mean_g(r))' if self.centered else 'r_i'} [r_i = max_g(r)]"

    def per_response(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        from burnish.rl.advantages import best_of_group

        return best_of_group(rewards, group_ids, centered=self.centered)


class ReinforcePlusPlus(Advantage):
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    group: ClassVar[int] = 1
    over_time: ClassVar[bool] = True
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")

    def formula(self) -> str:
        return f"A_t = whiten over the batch of R_t,  R_t = r_t + {self.gamma:g} R_(t+1)"

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import reinforce_plus_plus

        mask, ids = batch.is_action, batch.sequence_ids
        return reinforce_plus_plus(rewards, mask, gamma=self.gamma, sequence_ids=ids)


class ReinforcePlusPlusBaseline(Advantage):
    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"

    def formula(self) -> str:
        return "A_(i,t) = whiten over the batch of r_i − mean_g(r)"

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        from burnish.rl.advantages import reinforce_plus_plus_baseline

        mask, ids = batch.is_action, batch.sequence_ids
        return reinforce_plus_plus_baseline(rewards, batch.group_ids, mask, sequence_ids=ids)


class OwnAdvantage(Advantage):
    """A function of a script: rewards [S] and group ids [S] to advantages [S]."""

    name: Literal["own"] = "own"
    group: ClassVar[int] = 1
    function: Callable[[Any, Any], Any] | str = Field(description="the function, or its name")

    def formula(self) -> str:
        return f"A_i = {_name_of(self.function)}(r, groups)"

    def per_response(self, rewards: Tensor, group_ids: Tensor) -> Tensor:
        result: Tensor = _called(self.function)(rewards, group_ids)
        return result


class Loss(Section):
    """What the policy gains by moving further, per token and before its weight."""

    reads_ratio: ClassVar[bool] = True

    def formula(self) -> str:
        raise NotImplementedError

    def per_token(self, logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        """[N]"""
        raise NotImplementedError

    def is_clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor | None:
        """[N] bool: a bound is in force; None if the loss has none."""
        return None


class Reinforce(Loss):
    name: Literal["reinforce"] = "reinforce"
    reads_ratio: ClassVar[bool] = False

    def formula(self) -> str:
        return "L_t = −A_t log π"

    def per_token(self, logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        from burnish.rl.losses import reinforce

        return reinforce(logprobs, advantages)


class Unclipped(Loss):
    name: Literal["unclipped"] = "unclipped"

    def formula(self) -> str:
        return "L_t = −A_t ρ_t"

    def per_token(self, logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        from burnish.rl.losses import unclipped

        return unclipped(ratio, advantages)


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
        from burnish.rl.losses import clipped

        return clipped(ratio, advantages, low=self.low, high=self.high, dual=self.dual)

    def is_clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        from burnish.rl.losses import is_clipped, is_dual_clipped

        found = is_clipped(ratio, advantages, low=self.low, high=self.high)
        if self.dual is not None:
            found |= is_dual_clipped(ratio, advantages, dual=self.dual)
        return found


class Cispo(Loss):
    name: Literal["cispo"] = "cispo"
    cap: float = Field(5.0, gt=0, description="the largest ratio")
    floor: float = Field(0.0, ge=0, description="the smallest ratio")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.floor > self.cap:
            raise ValueError(f"needs floor at or below cap, got {self.floor:g} and {self.cap:g}")
        return self

    def formula(self) -> str:
        return f"L_t = −sg[clip(ρ_t, {self.floor:g}, {self.cap:g})] A_t log π"

    def per_token(self, logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        from burnish.rl.losses import cispo

        return cispo(logprobs, ratio, advantages, cap=self.cap, floor=self.floor)

    def is_clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor:
        return (ratio < self.floor) | (ratio > self.cap)


class OwnLoss(Loss):
    """A function of a script: log π, ratio and advantages, [N] each, to the loss [N]."""

    name: Literal["own"] = "own"
    function: Callable[[Any, Any, Any], Any] | str = Field(description="the function, or its name")

    def formula(self) -> str:
        return f"L_t = {_name_of(self.function)}(log π, ρ_t, A_t)"

    def per_token(self, logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Tensor:
        result: Tensor = _called(self.function)(logprobs, ratio, advantages)
        return result


class Reduction(Section):
    """Which denominator a token has."""

    def formula(self) -> str:
        raise NotImplementedError

    def weights(self, mask: Tensor, sequence_ids: Tensor) -> Tensor:
        """[N] over a whole train batch."""
        raise NotImplementedError


class SequenceMean(Reduction):
    name: Literal["sequence_mean"] = "sequence_mean"

    def formula(self) -> str:
        return "w_(i,t) = 1 / (S |y_i|)"

    def weights(self, mask: Tensor, sequence_ids: Tensor) -> Tensor:
        from burnish.rl.reduce import sequence_mean

        return sequence_mean(mask, sequence_ids=sequence_ids)


class TokenMean(Reduction):
    name: Literal["token_mean"] = "token_mean"

    def formula(self) -> str:
        return "w_(i,t) = 1 / Σ_i |y_i|"

    def weights(self, mask: Tensor, sequence_ids: Tensor) -> Tensor:
        from burnish.rl.reduce import token_mean

        return token_mean(mask, sequence_ids=sequence_ids)


class Constant(Reduction):
    name: Literal["constant"] = "constant"
    length: int = Field(ge=1, description="usually the largest response length")

    def formula(self) -> str:
        return f"w_(i,t) = 1 / (S · {self.length})"

    def weights(self, mask: Tensor, sequence_ids: Tensor) -> Tensor:
        from burnish.rl.reduce import constant

        return constant(mask, length=float(self.length), sequence_ids=sequence_ids)


class NoKL(Section):
    name: Literal["none"] = "none"


class KL(Section):
    """How strongly the policy is pulled back to a reference."""

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
        from burnish.rl import kl

        estimators = {"k1": kl.k1, "k2": kl.k2, "k3": kl.k3}
        return estimators[self.name](logprobs, reference)


class NoImportance(Section):
    name: Literal["none"] = "none"


class Importance(Section):
    """How a gap between sampler and learner is corrected."""

    name: Literal["truncate", "mask"]
    level: Literal["token", "sequence", "geometric"] = "token"
    low: float = Field(0.0, ge=0, allow_inf_nan=False)
    high: float = Field(2.0, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.low <= self.high:
            raise ValueError(f"needs low at or below high, got {self.low:g} and {self.high:g}")
        return self

    def formula(self) -> str:
        ratio = f"v = π_prox / π_behavior per {self.level}"
        if self.name == "truncate":
            return f"{ratio},  v = clip(v, {self.low:g}, {self.high:g})"
        return f"{ratio},  v = v [{self.low:g} ≤ v ≤ {self.high:g}]"

    def weights(self, proximal: Tensor, batch: PackedBatch) -> Tensor:
        """[N], without gradient."""
        from burnish.rl import ratios

        behavior, mask, ids = batch.behavior_logprobs, batch.is_action, batch.sequence_ids
        weights = ratios.importance_ratio(
            proximal, behavior, mask, level=self.level, sequence_ids=ids
        )
        bound = ratios.truncate if self.name == "truncate" else ratios.keep_between
        return bound(weights, low=self.low, high=self.high)


AnyAdvantage = (
    Raw
    | GroupMean
    | GroupZscore
    | LeaveOneOut
    | BestOfGroup
    | ReinforcePlusPlus
    | ReinforcePlusPlusBaseline
    | OwnAdvantage
)
AnyLoss = Reinforce | Unclipped | Clip | Cispo | OwnLoss
AnyReduction = SequenceMean | TokenMean | Constant
AnyKL = NoKL | KL
AnyImportance = NoImportance | Importance

RATIOS = {
    "token": "ρ_t = exp(log π − log π_prox)",
    "sequence": "ρ_t = exp(mean over the response of log π − log π_prox), own gradient per token",
}
PROXIMALS = {
    "behavior": "the sampler's own log-probabilities",
    "recompute": "the learner's own at the start of the batch",
}


class ObjectiveConfig(Section):
    """One piece of each kind. A bare name is short for a table with that name."""

    advantage: Annotated[AnyAdvantage, Field(discriminator="name"), named("group_zscore")] = (
        GroupZscore()
    )
    ratio: Literal["token", "sequence"] = "token"
    loss: Annotated[AnyLoss, Field(discriminator="name"), named("clip")] = Clip()
    reduction: Annotated[AnyReduction, Field(discriminator="name"), named("sequence_mean")] = (
        SequenceMean()
    )
    kl: Annotated[AnyKL, Field(discriminator="name"), named("none")] = NoKL()
    importance: Annotated[AnyImportance, Field(discriminator="name"), named("none")] = (
        NoImportance()
    )
    entropy_coefficient: float = Field(0.0, ge=0, allow_inf_nan=False)
    proximal: Literal["behavior", "recompute"] = "recompute"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.importance, Importance) and self.proximal == "behavior":
            raise ValueError(
                "has importance, which corrects proximal against behavior, and proximal = "
                "'behavior', so that it would always be 1: use proximal = 'recompute' or "
                "importance = 'none'"
            )
        return self

    @property
    def reads_proximal_first(self) -> bool:
        """Whether the proximal policy's log-probabilities are read before the first gradient step.

        An importance correction and a KL in the reward read them then. A loss reads them in the
        step, and at the first step the proximal policy is the policy that is differentiated.
        """
        in_reward = isinstance(self.kl, KL) and self.kl.where == "reward"
        return in_reward or isinstance(self.importance, Importance)

    @property
    def unused(self) -> dict[str, str]:
        """Settings that have no effect with these pieces, and the words for why."""
        if self.loss.reads_ratio:
            return {}
        users = "unclipped, clip or cispo"
        why = f"loss = '{self.loss.name}'; remove it, or use loss = {users}"
        return {"ratio": why} | ({} if self.reads_proximal_first else {"proximal": why})


KINDS: dict[str, tuple[type[Section], ...]] = {
    "advantage": get_args(AnyAdvantage),
    "loss": get_args(AnyLoss),
    "reduction": get_args(AnyReduction),
    "kl": get_args(AnyKL),
    "importance": get_args(AnyImportance),
}


def names(kind: str, setting: str | None = None) -> list[str]:
    """The names of the pieces of a kind that a recipe may give; with a setting, that have it."""
    return [
        name
        for piece in KINDS[kind]
        if setting is None or setting in piece.model_fields
        for name in get_args(piece.model_fields["name"].annotation)
        if name != OWN
    ]


def formula(objective: ObjectiveConfig) -> list[tuple[str, str]]:
    """The objective in lines of (what, formula)."""
    kl, importance = objective.kl, objective.importance
    term = "v_t L_t" if isinstance(importance, Importance) else "L_t"
    if isinstance(kl, KL) and kl.where == "loss":
        term += f" + {kl.coefficient:g} {kl.name}_t"
    if objective.entropy_coefficient:
        term += f" − {objective.entropy_coefficient:g} H_t"
    lines = [("loss", f"Σ w_(i,t) ({term})" if " " in term else f"Σ w_(i,t) {term}")]
    lines.append(("objective", objective.loss.formula()))
    if objective.loss.reads_ratio:
        lines.append(("ratio", RATIOS[objective.ratio]))
        lines.append(("proximal", f"π_prox: {PROXIMALS[objective.proximal]}"))
    lines.append(("advantage", objective.advantage.formula()))
    lines.append(("denominator", objective.reduction.formula()))
    if isinstance(kl, KL):
        penalty = f",  r ← r − {kl.coefficient:g} Σ_t {kl.name}_t" if kl.where == "reward" else ""
        lines.append(("KL", kl.formula() + penalty))
        every = kl.refresh
        reference = "the initial model" if every is None else f"refreshed every {every} steps"
        lines.append(("reference", f"π_ref: {reference}"))
    if isinstance(importance, Importance):
        lines.append(("importance", importance.formula()))
    return lines


def _called(function: Callable[..., Any] | str) -> Callable[..., Any]:
    assert callable(function), "learner.objective.compile refuses a function that is not here"
    return function


def _name_of(function: Callable[..., Any] | str) -> str:
    return function if isinstance(function, str) else getattr(function, "__name__", "own")
