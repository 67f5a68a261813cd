"""A run's two ends, its cost, and the model's answers before and after, from its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from burnish.runs.directory import read_recipe
from burnish.runs.metrics import collect, end_means, iterate_rows
from burnish.runs.responses import first_and_last

PAIRS = 3


def summarise(run: Path) -> dict[str, Any]:
    recipe = read_recipe(run)
    series = collect(iterate_rows(run / "metrics.jsonl"))
    times = collect(iterate_rows(run / "timings.jsonl"))
    versions = series["train/version"]
    sampled = "rollout/responses" in series
    name, better = ("reward", max) if sampled else ("loss", min)
    measured = series.get("rollout/reward" if sampled else "train/loss")
    held_out = series.get(f"validation/{name}")
    summary: dict[str, Any] = {
        "recipe": recipe.get("name"),
        "seed": recipe.get("seed", 0),
        "steps": len(versions),
        "gradient_steps": int(versions[-1][1]),
        "seconds": {
            phase.removeprefix("time/"): sum(seconds for _, seconds in times[phase])
            for phase in sorted(times)
            if phase.startswith("time/")
        },
    }
    if measured:
        ends = end_means([value for _, value in measured])
        summary[f"{name}_first"], summary[f"{name}_last"] = ends
    if sampled:
        summary["responses"] = int(sum(count for _, count in series["rollout/responses"]))
    if held_out:
        step, best = better(held_out, key=lambda point: point[1])
        first, last = held_out[0][1], held_out[-1][1]
        summary["validation"] = {"first": first, "last": last, "best": best, "best_step": step}
    for estimator in ("k1", "k3"):
        if drift := series.get(f"kl/held_out_{estimator}"):
            summary[f"kl_held_out_{estimator}"] = drift[-1][1]
    return summary | {"before_and_after": before_and_after(run)}


def before_and_after(run: Path) -> list[dict[str, Any]]:
    """The same validation prompts at the first and the last evaluation."""
    pairs = first_and_last(iterate_rows(run / "evaluations.jsonl"))
    return [
        {
            "prompt": first["asked"],
            "before": first["response"],
            "reward_before": first["reward"],
            "after": last["response"],
            "reward_after": last["reward"],
        }
        for first, last in pairs
        if first["sample"] == 0
    ][:PAIRS]
