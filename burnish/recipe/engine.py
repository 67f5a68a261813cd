"""The section of a recipe that names its sampler, and the settings that a sampler must offer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from burnish.sections import Section

if TYPE_CHECKING:
    from burnish.schema.recipe import Recipe

Precision = Literal["auto", "fp32", "bf16", "fp16"]
"""auto: bf16 where the processor or GPU multiplies it, else fp32."""

WAYS = {
    "disk": "through files in /dev/shm, on the machine of the run",
    "tensor": "from the learner's own memory, on the machine of the run",
    "distributed": "broadcast by a process group, to any machine",
}
"""How weights reach SGLang, as a plan says it."""


class EngineConfig(Section):
    """The sampler; the learner's precision is ``train.precision``."""

    name: Literal["native", "hf", "vllm", "sglang"] = Field("native", description="who samples")
    python: str | None = Field(None, description="of the engine's own environment; None: this one")
    url: str | None = Field(
        None,
        pattern=r"^(tcp://[^/@]+:\d+|http://[^/@]+:\d+(/[^?#@]*)?|https://[^/@]+(/[^?#@]*)?)$",
        description="of an engine that serves",
    )
    key: str | None = Field(None, pattern=r"^[A-Z_][A-Z0-9_]*$")
    """The environment variable that holds the API key of an SGLang server; None if it has none."""
    deadline: float = Field(600.0, gt=0, description="seconds in which another process answers")
    precision: Precision = Field("auto", description="auto: as train.precision")
    kv_mb: int = Field(1024, ge=1, description="memory for keys and values")
    max_running: int = Field(128, ge=1, description="samples that decode at once")
    sleep: bool = Field(False, description="vLLM or SGLang leaves the GPU to the learner's work")
    weights: Literal["disk", "tensor", "distributed"] = Field(
        "disk", description="how they reach SGLang"
    )

    @property
    def is_apart(self) -> bool:
        """Whether the engine is in a process of its own."""
        return self.name != "native" or self.python is not None or self.url is not None

    @property
    def repeats(self) -> bool:
        """Whether a group that is sampled again draws the same."""
        return self.name != "vllm"

    @property
    def useless(self) -> list[str]:
        """Settings that this engine does not read."""
        unread = [] if self.is_apart else ["engine.deadline"]
        sleeps = self.name == "sglang" or (self.name == "vllm" and self.url is None)
        unread += [] if sleeps else ["engine.sleep"]
        unread += ["engine.weights", "engine.key"] * (self.name != "sglang")
        unread += ["engine.kv_mb"] * (self.name in ("hf", "sglang"))
        if self.name == "sglang":
            return unread
        return unread + (["engine.kv_mb", "engine.max_running"] if self.url else [])


def check(recipe: Recipe) -> None:
    """Raises where the engine can't sample as the recipe says."""
    engine = recipe.engine
    if engine.python is not None and engine.url is not None:
        raise ValueError(
            f"engine.python = '{engine.python}' starts an engine and engine.url = '{engine.url}' "
            "names one that runs; remove one"
        )
    is_http, is_sglang = (engine.url or "").startswith("http"), engine.name == "sglang"
    if is_http != is_sglang:
        raise ValueError(
            f"engine.name = '{engine.name}' has engine.url = {engine.url!r}; SGLang, and no other "
            "engine, is named by the url of its HTTP server, such as http://127.0.0.1:30000; what "
            "`burnish engine serve` serves is at tcp://HOST:PORT, through an SSH tunnel if it must "
            "be encrypted"
        )
    if is_sglang and recipe.runtime.name == "ray":
        raise ValueError(
            "engine.name = 'sglang' serves one sampler, and runtime.name = 'ray' may have several; "
            "use runtime.name = 'local'"
        )
    if is_sglang and (recipe.rollout.min_tokens or recipe.rollout.think):
        raise ValueError(
            "engine.name = 'sglang' gives no log-probabilities before the mask of "
            "rollout.min_tokens, and none of the phrase of rollout.think; remove them, or use the "
            "native engine"
        )
    if engine.name in ("hf", "sglang") and getattr(recipe.model, "fp32_head", False):
        raise ValueError(
            f"model.fp32_head needs the native engine; remove it or engine.name = '{engine.name}'"
        )
    if engine.sleep and (recipe.is_stale or recipe.runtime.name == "ray"):
        raise ValueError(
            "engine.sleep = true needs a loop that samples and learns in turns; remove it, or use "
            "loop.lag = 0 without a buffer, and runtime.name = 'local' or 'torchrun'"
        )
    if engine.repeats:
        return
    rollout, think = recipe.rollout, recipe.rollout.think
    masks = {"min_tokens": rollout.min_tokens, "top_p": rollout.top_p < 1, "top_k": rollout.top_k}
    asked = [f"rollout.{name}" for name, value in (masks | {"think": think}).items() if value]
    asked += ["model.fp32_head"] * bool(getattr(recipe.model, "fp32_head", False))
    if asked:
        raise ValueError(
            f"{asked[0]} needs the native engine, and engine.name = '{engine.name}' does not offer "
            "it; remove one of the two"
        )
    if recipe.runtime.name == "ray" and recipe.loop.name == "lagged":
        raise ValueError(
            f"engine.name = '{engine.name}' can't draw a lost rollout again, as loop.name = "
            "'lagged' does on Ray; use loop.name = 'free', or runtime.name = 'local'"
        )


def describe(recipe: Recipe) -> list[tuple[str, list[tuple[str, str]]]]:
    """A section of a plan; empty for the native engine in this process."""
    engine = recipe.engine
    if not engine.is_apart:
        return []
    where = f"a process of its own by {engine.python or 'this Python'}"
    if engine.url is not None:
        where = f"served at {engine.url}"
    lines = [("engine", f"{engine.name}, {where}")]
    if engine.name == "sglang":
        lines.append(("weights", WAYS[engine.weights]))
    if engine.sleep:
        lines.append(("sleep", "caches, and weights with a copy in main memory, leave the GPU"))
    if not engine.repeats:
        told = "the engine's own: a run that is resumed or run again draws other samples"
        lines.append(("draws", told))
    return [("engine", lines)]
