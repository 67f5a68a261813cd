"""The pieces of an objective: advantage × ratio × loss × reduction × KL × importance.

A piece is one section here: its name, its settings, its formula, and the function in ``rl/`` that
computes it. ``learner/objective.py`` puts the pieces of a recipe together.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from burnish.sections import Section, named

if TYPE_CHECKING:
    from torch import Tensor

    from burnish.types import PackedBatch

Function = Any
"""A function of a script, or its name alone if the recipe was read from a run."""


def rl(module: str, name: str) -> Callable[..., Tensor]:
    """The function ``name`` of a module in ``rl/``. It is imported when a piece is computed, so
    that ``burnish plan`` prints an objective, and refuses a wrong one, without loading torch."""
    function: Callable[..., Tensor] = getattr(import_module(f"burnish.rl.{module}"), name)
    return function


class Piece(Section):
    name: str
    written: ClassVar[str]
    """The formula, with settings in braces."""

    @property
    def settings(self) -> dict[str, Any]:
        return {key: value for key, value in self if key != "name"}

    def formula(self) -> str:
        return self.written.format(**self.settings)


class Advantage(Piece):
    """How much better than expected a response or a token was.

    It has the name of its function in ``rl.advantages``, and its settings are keywords there.
    """

    group: ClassVar[int] = 2
    """The smallest group that it takes."""
    over_time: ClassVar[bool] = False
    """Whether it takes a reward per token, [N], and not one per response, [S]."""

    @property
    def estimator(self) -> Callable[..., Tensor]:
        return partial(rl("advantages", self.name), **self.settings)

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        """The advantage of every action, [N]; 0 in other slots."""
        per_response = self.estimator(rewards, batch.group_ids)
        return rl("sequences", "to_tokens")(per_response, batch.is_action, batch.sequence_ids)


class Raw(Advantage):
    name: Literal["raw"] = "raw"
    written: ClassVar[str] = "A_i = r_i"
    group: ClassVar[int] = 1


class GroupMean(Advantage):
    name: Literal["group_mean"] = "group_mean"
    written: ClassVar[str] = "A_i = r_i − mean_g(r)"


class GroupZscore(Advantage):
    name: Literal["group_zscore"] = "group_zscore"
    written: ClassVar[str] = "A_i = (r_i − mean_g(r)) / (std_g(r) + {eps:g})"
    eps: float = Field(1e-6, gt=0, description="added to the std")


class LeaveOneOut(Advantage):
    name: Literal["leave_one_out"] = "leave_one_out"
    written: ClassVar[str] = "A_i = r_i − mean of the other r of the group"


class BestOfGroup(Advantage):
    name: Literal["best_of_group"] = "best_of_group"
    group: ClassVar[int] = 1
    centered: bool = Field(False, description="subtract the group's mean")

    def formula(self) -> str:
        return f"A_i = {'(r_i − mean_g(r))' if self.centered else 'r_i'} [r_i = max_g(r)]"


class ReinforcePlusPlus(Advantage):
    name: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    written: ClassVar[str] = "A_t = whiten over the batch of R_t,  R_t = r_t + {gamma:g} R_(t+1)"
    group: ClassVar[int] = 1
    over_time: ClassVar[bool] = True
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        return self.estimator(rewards, batch.is_action, sequence_ids=batch.sequence_ids)


class ReinforcePlusPlusBaseline(Advantage):
    name: Literal["reinforce_plus_plus_baseline"] = "reinforce_plus_plus_baseline"
    written: ClassVar[str] = "A_(i,t) = whiten over the batch of r_i − mean_g(r)"

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        groups, mask, ids = batch.group_ids, batch.is_action, batch.sequence_ids
        return self.estimator(rewards, groups, mask, sequence_ids=ids)


class Gae(Advantage):
    """Generalised advantage estimation over the values of a source.

    The source is a function of a script from a packed batch to values [N], ``values[t]`` before
    token t. A critic will be a source with a name.
    """

    name: Literal["gae"] = "gae"
    group: ClassVar[int] = 1
    over_time: ClassVar[bool] = True
    values: Function = Field(description="the source of the values, a function from Python")
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(1.0, ge=0, le=1, description="1: returns minus values; 0: one step ahead")

    def formula(self) -> str:
        delta = f"δ_t = r_t + {self.gamma:g} V_(t+1) − V_t,  V = {name_of(self.values)}(batch)"
        return f"A_t = δ_t + {self.gamma * self.lam:g} A_(t+1),  {delta}"

    def per_token(self, rewards: Tensor, batch: PackedBatch) -> Tensor:
        mask, ids = batch.is_action, batch.sequence_ids
        gae, values = rl("advantages", "gae"), self.values(batch)
        return gae(rewards, values, mask, gamma=self.gamma, lam=self.lam, sequence_ids=ids)[0]


class OwnAdvantage(Advantage):
    """A function of a script: rewards [S] and group ids [S] to advantages [S]."""

    name: Literal["own"] = "own"
    group: ClassVar[int] = 1
    function: Function = Field(description="the function, or its name")

    def formula(self) -> str:
        return f"A_i = {name_of(self.function)}(r, groups)"

    @property
    def estimator(self) -> Callable[..., Tensor]:
        return partial(self.function)


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
    length: int = Field(ge=1, description="usually the largest response length")


class Absent(Section):
    """The recipe has no piece of this kind."""

    name: Literal["none"] = "none"


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
        ratio = f"v = π_prox / π_behavior per {self.level}"
        if self.name == "truncate":
            return f"{ratio},  v = clip(v, {self.low:g}, {self.high:g})"
        return f"{ratio},  v = v [{self.low:g} ≤ v ≤ {self.high:g}]"

    def weights(self, proximal: Tensor, batch: PackedBatch) -> Tensor:
        """[N], without gradient."""
        behavior, mask, ids = batch.behavior_logprobs, batch.is_action, batch.sequence_ids
        ratio = rl("ratios", "importance_ratio")
        weights = ratio(proximal, behavior, mask, level=self.level, sequence_ids=ids)
        bound = rl("ratios", "truncate" if self.name == "truncate" else "keep_between")
        return bound(weights, low=self.low, high=self.high)


PerResponse = Raw | GroupMean | GroupZscore | LeaveOneOut | BestOfGroup | OwnAdvantage
AnyAdvantage = PerResponse | ReinforcePlusPlus | ReinforcePlusPlusBaseline | Gae
AnyLoss = Reinforce | Unclipped | Clip | Cispo | OwnLoss
AnyReduction = SequenceMean | TokenMean | Constant
KINDS = ("advantage", "loss", "reduction", "kl", "importance")
"""Settings of an objective that choose a piece by its name."""
RATIOS = {
    "token": "ρ_t = exp(log π − log π_prox)",
    "sequence": "ρ_t = exp(mean over the response of log π − log π_prox), own gradient per token",
}
PROXIMALS = {
    "behavior": "the sampler's own log-probabilities",
    "recompute": "the learner's own at the start of the batch",
}
BY_NAME = Field(discriminator="name")


class ObjectiveConfig(Section):
    """One piece of each kind. A bare name is short for a table with that name."""

    advantage: Annotated[AnyAdvantage, BY_NAME, named("group_zscore")] = GroupZscore()
    ratio: Literal["token", "sequence"] = "token"
    loss: Annotated[AnyLoss, BY_NAME, named("clip")] = Clip()
    reduction: Annotated[AnyReduction, BY_NAME, named("sequence_mean")] = SequenceMean()
    kl: Annotated[Absent | KL, BY_NAME, named("none")] = Absent()
    importance: Annotated[Absent | Importance, BY_NAME, named("none")] = Absent()
    entropy_coefficient: float = Field(0.0, ge=0, allow_inf_nan=False)
    proximal: Literal["behavior", "recompute"] = "recompute"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if isinstance(self.importance, Importance) and self.proximal == "behavior":
            raise ValueError(
                "has importance, which corrects proximal against behavior, and proximal = "
                "'behavior': it would always be 1; use proximal = 'recompute'"
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


def formula(objective: ObjectiveConfig) -> list[tuple[str, str]]:
    """The objective as lines of (name, formula)."""
    kl, importance = objective.kl, objective.importance
    term = "v_t L_t" if isinstance(importance, Importance) else "L_t"
    if isinstance(kl, KL) and kl.where == "loss":
        term += f" + {kl.coefficient:g} {kl.name}_t"
    if objective.entropy_coefficient:
        term += f" − {objective.entropy_coefficient:g} H_t"
    lines = [
        ("loss", f"Σ w_(i,t) ({term})" if " " in term else f"Σ w_(i,t) {term}"),
        ("objective", objective.loss.formula()),
        ("advantage", objective.advantage.formula()),
        ("denominator", objective.reduction.formula()),
    ]
    if "ratio" in objective.loss.reads:
        lines.append(("ratio", RATIOS[objective.ratio]))
        lines.append(("proximal", f"π_prox: {PROXIMALS[objective.proximal]}"))
    if isinstance(kl, KL):
        penalty = f",  r ← r − {kl.coefficient:g} Σ_t {kl.name}_t" if kl.where == "reward" else ""
        lines.append(("KL", kl.formula() + penalty))
        reference = f"refreshed every {kl.refresh} steps" if kl.refresh else "the initial model"
        lines.append(("reference", f"π_ref: {reference}"))
    if isinstance(importance, Importance):
        lines.append(("importance", importance.formula()))
    return lines


def name_of(function: Function) -> str:
    """The name of a script's function, or of an object that is called like one."""
    if isinstance(function, str):
        return function
    return str(getattr(function, "__name__", type(function).__name__))
