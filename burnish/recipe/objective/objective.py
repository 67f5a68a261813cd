"""An objective: one piece of each kind, advantage × ratio × loss × reduction × KL × importance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from burnish.errors import ConfigError
from burnish.recipe.base import BY_NAME, Section, named
from burnish.recipe.objective.advantages import CRITIC, AnyAdvantage, GroupZscore
from burnish.recipe.objective.entropy import EntropyTarget
from burnish.recipe.objective.kl import KL, Absent, AnyImportance, Importance
from burnish.recipe.objective.losses import AnyLoss, AnyReduction, Clip, SequenceMean
from burnish.recipe.objective.piece import Function, arxiv

KINDS = ("advantage", "loss", "reduction", "kl", "importance")
"""Settings of an objective that select a piece by name."""
RATIOS = {
    "token": "ρ_t = exp(log π − log π_prox)",
    "sequence": "ρ_t = exp(mean over the response of log π − log π_prox),  ∇ρ_t = ρ_t ∇ log π",
}
"""The formula of each ratio."""
RATIO_PAPERS = {
    "token": f"PPO, {arxiv('1707.06347')}",
    "sequence": f"GSPO, {arxiv('2507.18071')}",
}


class ObjectiveConfig(Section):
    """The settings of an objective: one piece of each kind.

    A bare name is the short form of a table with that name.
    """

    advantage: Annotated[AnyAdvantage, BY_NAME, named("group_zscore")] = Field(
        GroupZscore(), description="how much better than expected a response or a token was"
    )
    ratio: Literal["token", "sequence"] = Field(
        "token", description="ratio of policy to proximal policy, per token or per response (GSPO)"
    )
    loss: Annotated[AnyLoss, BY_NAME, named("clip")] = Field(
        Clip(), description="loss of a token, from its ratio and its advantage"
    )
    reduction: Annotated[AnyReduction, BY_NAME, named("sequence_mean")] = Field(
        SequenceMean(), description="weight of each token in the loss of a train batch"
    )
    kl: Annotated[Absent | KL, BY_NAME, named("none")] = Field(
        Absent(), description="penalty that keeps the policy close to a reference"
    )
    importance: AnyImportance = Field(
        Absent(), description="correction of the difference between sampler and learner"
    )
    entropy_coefficient: float = Field(
        0.0,
        ge=0,
        allow_inf_nan=False,
        description="weight of the entropy in the loss; with a target, the first weight",
    )
    entropy: EntropyTarget | None = Field(
        None, description="target of the mean entropy; None: the coefficient is constant"
    )
    proximal: Literal["behavior", "recompute"] = Field(
        "recompute",
        description="log-probabilities of the proximal policy in the first gradient step on a "
        "rollout; behavior: the sampler's; recompute: the learner's",
    )

    @model_validator(mode="after")
    def _check_pieces(self) -> Self:
        if self.corrections and self.proximal == "behavior":
            raise ValueError(
                "has an importance correction of proximal against behavior, and proximal = "
                "'behavior': it would always be 1; use objective.proximal = 'recompute'"
            )
        first, control = self.entropy_coefficient, self.entropy
        if control is not None and not control.low <= first <= control.high:
            raise ValueError(
                f"has entropy_coefficient = {first:g}, the first coefficient, outside of "
                f"entropy.low = {control.low:g} and entropy.high = {control.high:g}; use "
                f"entropy_coefficient = {min(max(first, control.low), control.high):g}"
            )
        name = "objective.kl.name = 'k3' and " if self.kl.name == "k1" else ""
        if self.kl.where == "reward" and not self.advantage.takes_penalty:
            raise ValueError(
                f"has kl.where = 'reward', which advantage = '{self.advantage.name}' does not "
                f"support; use {name}objective.kl.where = 'loss'"
            )
        return self

    @property
    def functions(self) -> dict[str, Function]:
        """The functions from a script by their settings, such as "objective.loss.function"; a
        recipe that was read from a run has only their names."""
        return {
            f"objective.{kind}.{key}": value
            for kind, piece in (("advantage", self.advantage), ("loss", self.loss))
            for key, value in piece.settings.items()
            if key == "function" or (key == "values" and value != CRITIC)
        }

    @property
    def has_entropy_term(self) -> bool:
        """Whether the loss contains the entropy, in every step or in some."""
        return self.entropy is not None or self.entropy_coefficient > 0

    @property
    def corrections(self) -> tuple[Importance, ...]:
        """The importance corrections, whose weights are multiplied; an empty tuple if the objective
        has none."""
        if isinstance(self.importance, Absent):
            return ()
        return (self.importance,) if isinstance(self.importance, Importance) else self.importance

    @property
    def judges_groups(self) -> bool:
        """Whether a group's own rewards decide if it is dead. They do not if the advantage depends
        on more than the group, or if a KL in the reward makes equal rewards unequal."""
        return self.advantage.judges_groups and self.kl.where != "reward"

    @property
    def reads_proximal_first(self) -> bool:
        """Whether the proximal policy's log-probabilities are read before the first gradient step.

        An importance correction, a KL in the reward and a teacher read them. A loss reads them
        during the step, and in the first step the proximal policy is the policy itself.
        """
        in_advantage = self.kl.where == "reward" or "proximal" in self.advantage.reads
        return in_advantage or bool(self.corrections)


def check_functions(objective: ObjectiveConfig) -> None:
    """Raise a ConfigError if the objective has only the name of a script's function: a recipe that
    was read from a file, or from a run, has no functions."""
    for setting, value in objective.functions.items():
        if isinstance(value, str):
            call = f"burnish.train(…, {as_argument({setting: value})})"
            raise ConfigError(
                f"{setting} = '{value}' is only the name of a function; pass the function itself "
                f"from Python, as in {call}"
            )


def as_argument(functions: Mapping[str, str]) -> str:
    """Return functions of an objective, named by their settings, as the argument of a call in
    Python, such as ``objective={"loss": masked_clip}``."""
    pieces = []
    for setting, name in functions.items():
        _, kind, key = setting.split(".")
        gae = f'{{"name": "gae", "values": {name}}}'
        pieces.append(f'"{kind}": {name if key == "function" else gae}')
    return f"objective={{{', '.join(pieces)}}}"
