"""The sections of a recipe's models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from burnish.sections import Section


class SorterConfig(Section):
    """The non-autoregressive sorting model."""

    name: Literal["sorter"] = "sorter"
    width: int = Field(10, ge=1, description="embedding dimension")


class ScratchConfig(Section):
    """A transformer of one's own, with random weights from the seed."""

    name: Literal["scratch"] = "scratch"
    tokenizer: str = Field("smollm2-135m", description="a model's, or bytes: a token for each")
    layers: int = Field(4, ge=1)
    width: int = Field(512, ge=1, description="d_model")
    heads: int = Field(16, ge=1)
    d_ff: int = Field(1344, ge=1)
    context: int = Field(256, ge=2)
    fp32_head: bool = Field(False, description="logits in float32 whatever the precision")


class LanguageConfig(Section):
    """A pretrained language model."""

    name: str = Field("smollm2-135m", description="a name, a directory, or hf:ORG/NAME")
    fp32_head: bool = Field(False, description="logits in float32 whatever the precision")
    adapter: str | None = Field(None, description="a directory in PEFT's layout; None: none")


def _model_kind(model: Any) -> str:
    name = model.get("name", "sorter") if isinstance(model, Mapping) else getattr(model, "name", "")
    return name if name in ("sorter", "scratch") else "language"


AnyModel = Annotated[
    Annotated[SorterConfig, Tag("sorter")]
    | Annotated[ScratchConfig, Tag("scratch")]
    | Annotated[LanguageConfig, Tag("language")],
    Discriminator(_model_kind),
]
