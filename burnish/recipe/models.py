"""The sections of a recipe's models, and the capabilities that each kind of model declares.

Other modules read the capabilities and don't test which model a recipe has.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from burnish.recipe.base import Section


class SorterConfig(Section):
    """The small sorting model, which outputs all numbers of a response at once."""

    is_language: ClassVar[bool] = False
    """Whether it is an autoregressive transformer with a tokenizer, which samples text token by
    token. Only such a model has a context, a cache, adapters, a critic and a mesh."""
    is_pretrained: ClassVar[bool] = False
    """Whether its weights come from files; if not, they are initialised from the seed."""
    files: ClassVar[str] = ""
    """Name of the model whose files are read; "" if there are none."""
    adapter: ClassVar[None] = None
    fp32_head: ClassVar[bool] = False
    fixed_precision: ClassVar[str | None] = "fp32"
    """The only precision that it is trained in; None if the recipe selects the precision."""

    name: Literal["sorter"] = "sorter"
    width: int = Field(10, ge=1, description="embedding dimension")


class ScratchConfig(Section):
    """A new transformer language model, whose weights are initialised from the seed."""

    is_language: ClassVar[bool] = True
    is_pretrained: ClassVar[bool] = False
    adapter: ClassVar[None] = None
    fixed_precision: ClassVar[str | None] = None

    name: Literal["scratch"] = "scratch"
    tokenizer: str = Field(
        "smollm2-135m", description="the model whose tokenizer is used; bytes: one token per byte"
    )
    layers: int = Field(4, ge=1, description="number of transformer layers")
    width: int = Field(512, ge=1, description="dimension of the hidden states (d_model)")
    heads: int = Field(16, ge=1, description="number of attention heads")
    d_ff: int = Field(1344, ge=1, description="dimension of the MLP's hidden layer")
    context: int = Field(256, ge=2, description="maximum tokens of prompt and response together")
    qk_norm: bool = Field(False, description="whether queries and keys are normalised, as in Qwen3")
    init_std: float = Field(
        0.02,
        gt=0,
        allow_inf_nan=False,
        description="standard deviation of the initial weights; small models may need more",
    )
    fp32_head: bool = Field(False, description="logits in float32, whatever the precision")

    @property
    def files(self) -> str:
        """Name of the model whose files are read: the tokenizer's."""
        return self.tokenizer


class LanguageConfig(Section):
    """A pretrained language model."""

    is_language: ClassVar[bool] = True
    is_pretrained: ClassVar[bool] = True
    fixed_precision: ClassVar[str | None] = None

    name: str = Field(
        "smollm2-135m", description="the model: a name, a directory, a run, or hf:ORG/NAME"
    )
    fp32_head: bool = Field(False, description="logits in float32, whatever the precision")
    adapter: str | None = Field(
        None, description="a directory in PEFT's layout; None: no adapter is loaded"
    )

    @property
    def files(self) -> str:
        """Name of the model whose files are read: the model's own."""
        return self.name


def _model_kind(model: Any) -> str:
    name = model.get("name", "sorter") if isinstance(model, Mapping) else getattr(model, "name", "")
    return name if name in ("sorter", "scratch") else "language"


AnyModel = Annotated[
    Annotated[SorterConfig, Tag("sorter")]
    | Annotated[ScratchConfig, Tag("scratch")]
    | Annotated[LanguageConfig, Tag("language")],
    Discriminator(_model_kind),
]
