"""An objective: one piece of each kind, advantage × ratio × loss × reduction × KL × importance."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from burnish.pieces.advantages import AnyAdvantage, GroupZscore
from burnish.pieces.losses import AnyLoss, AnyReduction, Clip, SequenceMean
from burnish.pieces.terms import KL, Absent, Importance
from burnish.sections import Section, named

KINDS = ("advantage", "loss", "reduction", "kl", "importance")
"""Settings of an objective that choose a piece by its name."""
RATIOS = {
    "token": "ρ_t = exp(log π − log π_prox)",
    "sequence": "ρ_t = exp(mean over the response of log π − log π_prox),  ∇ρ_t = ρ_t ∇ log π",
}
PROXIMALS = {
    "behavior": "the sampler, by its own log-probabilities",
    "recompute": "the learner before the rollout's first gradient step",
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
        if self.kl.where == "reward" and not self.advantage.takes_penalty:
            raise ValueError(
                f"has kl.where = 'reward', which advantage = '{self.advantage.name}' has no place "
                "for; use kl.where = 'loss'"
            )
        return self

    @property
    def judges_groups(self) -> bool:
        """Whether it is known from a group alone that the group teaches nothing. A KL in the reward
        makes equal rewards unequal."""
        return self.advantage.judges_groups and self.kl.where != "reward"

    @property
    def reads_proximal_first(self) -> bool:
        """Whether the proximal policy's log-probabilities are read before the first gradient step.

        An importance correction, a KL in the reward and a teacher read them then. A loss reads them
        in the step, and at the first step the proximal policy is the policy itself.
        """
        in_advantage = self.kl.where == "reward" or "proximal" in self.advantage.reads
        return in_advantage or isinstance(self.importance, Importance)


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
    elif objective.loss.compares:
        lines.append(("ratio", RATIOS["token"]))
    if objective.loss.compares or "proximal" in objective.advantage.reads:
        lines.append(("proximal", f"π_prox: {PROXIMALS[objective.proximal]}"))
    if isinstance(kl, KL):
        over = ("r_t", "") if objective.advantage.over_time else ("r_i", "Σ_t ")
        penalty = f",  {over[0]} ← {over[0]} − {kl.coefficient:g} {over[1]}{kl.name}_t"
        lines.append(("KL", kl.formula() + penalty * (kl.where == "reward")))
        reference = f"refreshed every {kl.refresh} steps" if kl.refresh else "the initial model"
        lines.append(("reference", f"π_ref: {reference}"))
    if isinstance(importance, Importance):
        lines.append(("importance", importance.formula()))
    return lines
