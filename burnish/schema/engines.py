"""The section of a recipe that names its sampler, and the settings that a sampler must offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from burnish.sections import Section

if TYPE_CHECKING:
    from burnish.schema.recipe import Recipe

Precision = Literal["auto", "fp32", "bf16", "fp16"]
"""auto: bf16 where the processor or GPU multiplies it, else fp32."""


class EngineConfig(Section):
    """The sampler; the learner's precision is ``train.precision``."""

    name: Literal["native"] = Field("native", description="who samples")
    python: str | None = Field(None, description="of the engine's own environment; None: this one")
    url: str | None = Field(None, pattern=r"^tcp://.+:\d+$", description="of an engine that serves")
    deadline: float = Field(600.0, gt=0, description="seconds in which another process answers")
    precision: Precision = Field("auto", description="auto: as train.precision")
    kv_mb: int = Field(1024, ge=1, description="memory for keys and values")
    max_running: int = Field(128, ge=1, description="samples that decode at once")

    @property
    def is_apart(self) -> bool:
        """Whether the engine is in a process of its own."""
        return self.name != "native" or self.python is not None or self.url is not None

    @property
    def useless(self) -> list[str]:
        """Settings that this engine does not read."""
        unread = [] if self.is_apart else ["engine.deadline"]
        return unread + (["engine.kv_mb", "engine.max_running"] if self.url else [])


def check(recipe: Recipe) -> None:
    """Raises where the engine can't sample as the recipe says."""
    engine = recipe.engine
    if engine.python is not None and engine.url is not None:
        raise ValueError(
            f"engine.python = '{engine.python}' starts an engine and engine.url = '{engine.url}' "
            "names one that runs; remove one"
        )


def describe(recipe: Recipe) -> list[tuple[str, list[tuple[str, str]]]]:
    """A section of a plan; empty for the native engine in this process."""
    engine = recipe.engine
    if not engine.is_apart:
        return []
    where = f"a process of its own, {engine.python or 'by this Python'}"
    if engine.url is not None:
        where = f"served at {engine.url}"
    return [("engine", [("engine", f"{engine.name}, {where}")])]
