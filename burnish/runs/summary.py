"""A run's two ends, its cost, and the model's answers before and after, from its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from burnish.runs import responses
from burnish.runs.directory import read_recipe
from burnish.runs.metrics import end_means, read_rows

PAIRS = 3


def summarise(run: Path) -> dict[str, Any]:
    recipe = read_recipe(run)
    rows = read_rows(run / "metrics.jsonl")
    steps = [row for row in rows if "train/version" in row]
    sampled = any("rollout/responses" in row for row in steps)
    metric, better = ("rollout/reward", max) if sampled else ("train/loss", min)
    name = metric.rpartition("/")[2]
    held_out = f"validation/{name}"
    measured = [float(row[metric]) for row in steps if metric in row]
    checked = [row for row in rows if held_out in row]
    summary: dict[str, Any] = {
        "recipe": recipe.get("name"),
        "seed": recipe.get("seed", 0),
        "steps": len(steps),
        "gradient_steps": int(steps[-1]["train/version"]),
        "seconds": _seconds(run),
    }
    if measured:
        summary[f"{name}_first"], summary[f"{name}_last"] = end_means(measured)
    if sampled:
        summary["responses"] = int(sum(row["rollout/responses"] for row in steps))
    if checked:
        best = better(checked, key=lambda row: float(row[held_out]))
        summary["validation"] = {
            "first": checked[0][held_out],
            "last": checked[-1][held_out],
            "best": best[held_out],
            "best_step": best["step"],
        }
    for name in ("k1", "k3"):
        drift = [row[f"kl/held_out_{name}"] for row in rows if f"kl/held_out_{name}" in row]
        if drift:
            summary[f"kl_held_out_{name}"] = drift[-1]
    return summary | {"before_and_after": before_and_after(run)}


def before_and_after(run: Path) -> list[dict[str, Any]]:
    """The same validation prompts at the first and the last evaluation."""
    first: dict[str, Any] = {}
    last: dict[str, Any] = {}
    for row in responses.read(run / "evaluations.jsonl"):
        if row["sample"] == 0:
            side = first if row["step"] == 0 else last
            side[row["prompt_id"]] = row
    shared = [name for name in first if name in last]
    return [
        {
            "prompt": first[name]["asked"],
            "before": first[name]["response"],
            "reward_before": first[name]["reward"],
            "after": last[name]["response"],
            "reward_after": last[name]["reward"],
        }
        for name in shared[:PAIRS]
    ]


def read(run: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    return summary


def _seconds(run: Path) -> dict[str, float]:
    rows = read_rows(run / "timings.jsonl")
    names = sorted({key for row in rows for key in row if key.startswith("time/")})
    return {name.removeprefix("time/"): sum(row.get(name, 0.0) for row in rows) for name in names}
