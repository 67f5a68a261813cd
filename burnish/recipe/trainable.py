"""The sections that select the weights to train."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from burnish.recipe.base import BY_NAME, Section, named

Module = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear modules of a transformer layer, by their names in Hugging Face's layout."""
MODULES: tuple[Module, ...] = Module.__args__  # type: ignore[attr-defined]


class AllLearn(Section):
    """All weights are trained."""

    name: Literal["all"] = "all"


class LayersLearn(Section):
    """The last layers and the final norm are trained."""

    name: Literal["layers"] = "layers"
    last: int = Field(ge=1, description="number of layers, counted from the last")


class LoraLearns(Section):
    """A low-rank adapter of each selected module is trained; the model's weights are frozen."""

    name: Literal["lora"] = "lora"
    rank: int = Field(16, ge=1, description="rank of each adapter")
    alpha: float = Field(
        32.0,
        gt=0,
        allow_inf_nan=False,
        description="the adapter's output is scaled by alpha / rank",
    )
    modules: list[Module] = Field([*MODULES], min_length=1, description="modules with an adapter")
    last: int | None = Field(
        None, ge=1, description="adapters only in this many last layers; None: in all layers"
    )


AnyLearning = Annotated[AllLearn | LayersLearn | LoraLearns, BY_NAME, named("all")]
