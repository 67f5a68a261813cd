"""The critic's section of a recipe: a model that predicts the remaining reward."""

from __future__ import annotations

from pydantic import Field

from burnish.recipe.base import Section


class CriticConfig(Section):
    """Settings of the critic, which predicts the remaining reward before each token.

    It uses the policy's precision, trainable layers, learning-rate schedule, weight decay and ε.
    """

    shared: bool = Field(
        False, description="whether it reads the policy's hidden states; false: a separate body"
    )
    learning_rate: float = Field(
        1e-5,
        gt=0,
        allow_inf_nan=False,
        description="the critic's learning rate; with a shared body, only that of the value head",
    )
    clip: float = Field(
        0.2, gt=0, description="largest change of a value per rollout; inf: unbounded"
    )
    coefficient: float = Field(
        0.1,
        gt=0,
        allow_inf_nan=False,
        description="weight of the value loss in the loss of a shared body",
    )
    warmup_rollouts: int = Field(
        0, ge=0, description="number of first rollouts in which only the critic is trained"
    )
