"""burnish: post-train language models with reinforcement learning."""

from typing import Any

__version__ = "0.1.0"
__all__ = ["train"]


def __getattr__(name: str) -> Any:
    """``burnish.train`` without loading anything before it is asked for."""
    if name in __all__:
        from burnish import api

        return getattr(api, name)
    raise AttributeError(f"module 'burnish' has no attribute {name!r}")
