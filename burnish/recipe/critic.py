"""The critic's section of a recipe: a model of the reward that is still to come."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from burnish.schema.models import SorterConfig
from burnish.sections import Section

if TYPE_CHECKING:
    from burnish.schema.recipe import Recipe


class CriticConfig(Section):
    """It has the policy's precision, its layers that learn, and its schedule of rates."""

    shared: bool = Field(False, description="reads the policy's hidden states; false: own body")
    learning_rate: float = Field(1e-5, gt=0, allow_inf_nan=False)
    """If the body is shared, the learning rate of the value head alone."""
    clip: float = Field(0.2, gt=0, description="a value's largest step per rollout; inf: no bound")
    coefficient: float = Field(0.1, gt=0, allow_inf_nan=False)
    """Weight of the value loss in the loss of a shared body."""
    warmup_rollouts: int = Field(0, ge=0, description="first rollouts: only the critic learns")


def check(recipe: Recipe) -> None:
    """Raises where the objective needs a critic that can't work."""
    critic = recipe.critic
    if not recipe.objective.advantage.reads_critic:
        return
    if isinstance(recipe.model, SorterConfig):
        raise ValueError(
            "objective.advantage.values = 'critic' needs a language model, and the sorting model "
            "has no critic; use another advantage, or a function from Python as the values"
        )
    if critic is None:
        raise ValueError(
            "objective.advantage.values = 'critic' needs a section [critic] with a setting or "
            "more; set critic.learning_rate = 1e-5"
        )
    if critic.warmup_rollouts >= recipe.train.steps:
        raise ValueError(
            f"critic.warmup_rollouts = {critic.warmup_rollouts} leaves none of the "
            f"{recipe.train.steps} rollouts of train.steps to the policy; use fewer"
        )


def describe(recipe: Recipe) -> list[tuple[str, list[tuple[str, str]]]]:
    """A section of a plan; empty without a critic."""
    critic = recipe.critic
    if critic is None:
        return []
    own = "a body of its own, which starts as a copy of the policy's"
    body = "the policy's body" if critic.shared else own
    rate = f"{critic.learning_rate:g}" + " for the head" * critic.shared
    lines = [
        ("values", f"V_t = w · h + b on {body}; truncated responses are not bootstrapped"),
        ("value loss", f"½ max((V − R)², (clip(V, V_old ± {critic.clip:g}) − R)²),  R = A + V_old"),
        ("learning", f"AdamW, learning rate {rate}, {recipe.train.schedule}"),
    ]
    if critic.shared:
        lines.append(("coefficient", f"loss + {critic.coefficient:g} · value loss"))
    if critic.warmup_rollouts:
        lines.append(("warm-up", f"the critic learns alone for {critic.warmup_rollouts} rollouts"))
    return [("critic", lines)]
