"""burnish: post-train language models with reinforcement learning."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from burnish.api import evaluate, export, generate, resume, sft, train
    from burnish.graders.rewards import batched
    from burnish.runs.run import Run

__version__ = "0.1.0"
__all__ = ["Run", "batched", "evaluate", "export", "generate", "resume", "sft", "train"]


def __getattr__(name: str) -> Any:
    """Import a public name on first access, so that ``import burnish`` stays fast."""
    if name == "batched":  # a file with a reward imports it, in workers that load nothing else
        from burnish.graders.rewards import batched

        return batched
    if name in __all__:
        from burnish import api

        return getattr(api, name)
    raise AttributeError(f"module 'burnish' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
