"""The sections that say which weights learn."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from burnish.sections import Section, named

Module = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear layers of a transformer's layer by Hugging Face's names."""
MODULES: tuple[Module, ...] = Module.__args__  # type: ignore[attr-defined]


class AllLearn(Section):
    name: Literal["all"] = "all"

    def describe(self) -> str:
        return "all weights"


class LayersLearn(Section):
    """The last layers and the final norm."""

    name: Literal["layers"] = "layers"
    last: int = Field(ge=1, description="so many layers learn")

    def describe(self) -> str:
        return f"last {self.last} layers"


class LoraLearns(Section):
    """A change of low rank that is added to each linear layer; the model itself stays."""

    name: Literal["lora"] = "lora"
    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0, allow_inf_nan=False, description="the change × alpha / rank")
    modules: list[Module] = Field([*MODULES], min_length=1, description="linear layers")
    last: int | None = Field(None, ge=1, description="only in the last so many layers; None: all")

    def describe(self) -> str:
        where = "all layers" if self.last is None else f"the last {self.last} layers"
        which = "all linear layers" if set(self.modules) == {*MODULES} else ", ".join(self.modules)
        return f"LoRA of rank {self.rank}, alpha {self.alpha:g}, on {which} of {where}"


AnyLearning = Annotated[
    Annotated[AllLearn | LayersLearn | LoraLearns, Field(discriminator="name")], named("all")
]
