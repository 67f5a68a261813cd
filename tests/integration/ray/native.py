"""A run whose engine takes a step per token: actors die while samples are in flight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

REWARD = """
def mixed(response, row):
    return float(sum(map(ord, response)) % 2)
"""
STOPS = list("abcdefghijklmnopqrstuvwxyz")
"""A random model ends a response after ten tokens on average, and some after a hundred."""


def settings(folder: Path, *, groups: int = 4, steps: int = 6) -> dict[str, Any]:
    """Settings of the recipe "keywords" for a tiny transformer that reads bytes. ``folder`` gets
    its prompts and its reward."""
    (folder / "reward.py").write_text(REWARD)
    rows = [json.dumps({"prompt": f"Say {number}."}) + "\n" for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(rows))
    task = {"name": "files", "chat": False, "validation_rows": 2}
    size = {"layers": 2, "width": 32, "heads": 4, "d_ff": 48, "context": 128}
    sizes = {"batch": 2 * groups, "group_size": 2, "max_tokens": 96, "stop": STOPS}
    return {
        "device": "cpu",
        "task": task
        | {"train": str(folder / "rows.jsonl"), "reward": f"{folder / 'reward.py'}:mixed"},
        "model": {"name": "scratch", "tokenizer": "bytes", **size},
        "engine": {"kv_mb": 16},
        "rollout": sizes,
        "train": {"learning_rate": 1e-3, "batch": 2 * groups, "steps": steps},
        "objective": {"proximal": "behavior", "kl": "none"},
    }
