"""The environment of rows with prompts, for a task whose recipe names tools and no environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Prompts:
    """Begins with the row's "prompt", and ends with the first message that calls no tool."""

    deterministic = True

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        return row["prompt"]

    def step(self, message: Mapping[str, Any]) -> dict[str, Any]:
        return {"done": True}
