"""burnish: post-train language models with reinforcement learning."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from burnish.api import evaluate, export, generate, resume, sft, train
    from burnish.runs.run import Run

__version__ = "0.1.0"
__all__ = ["Run", "evaluate", "export", "generate", "resume", "sft", "train"]


def __getattr__(name: str) -> Any:
    """The public names, without loading anything before one is asked for."""
    if name in __all__:
        from burnish import api

        return getattr(api, name)
    raise AttributeError(f"module 'burnish' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
