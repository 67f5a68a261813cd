"""What a recipe will compute, said before anything runs."""

from __future__ import annotations

from pathlib import Path

from burnish import pieces
from burnish.config import Recipe, SortTask

ADAM_COPIES = 4
"""Weights, gradients and Adam's two moments, float32 each."""


def plan(recipe: Recipe, out: Path) -> list[tuple[str, list[tuple[str, str]]]]:
    """Sections of (what, how much)."""
    return [
        ("task", _task(recipe)),
        ("objective", pieces.formula(recipe.objective)),
        ("batches", _batches(recipe)),
        ("resources", _resources(recipe, out)),
    ]


def _task(recipe: Recipe) -> list[tuple[str, str]]:
    task, model = recipe.task, recipe.model
    if not isinstance(task, SortTask):
        return [("task", task.name), ("seed", str(recipe.seed))]
    return [
        (
            "task",
            f"{task.name}: {task.prompts} prompts of {task.length} numbers below {task.numbers}",
        ),
        ("reward", task.reward.replace("_", " + ", 1) if "incl" in task.reward else task.reward),
        ("model", f"{model.name}, width {model.width}: {parameters(recipe):,} parameters"),
        ("seed", str(recipe.seed)),
    ]


def _batches(recipe: Recipe) -> list[tuple[str, str]]:
    rollout, train = recipe.rollout, recipe.train
    per_rollout = recipe.gradient_steps_per_rollout
    batches = rollout.batch // train.batch
    return [
        (
            "rollout",
            f"{rollout.batch} responses = {recipe.prompts_per_rollout} prompts × "
            f"{rollout.group_size} samples, temperature {rollout.temperature:g}",
        ),
        (
            "gradient steps",
            f"{per_rollout} per rollout = {batches} train batch{'es' * (batches > 1)} of "
            f"{train.batch} responses × {train.epochs} epoch{'s' * (train.epochs > 1)}",
        ),
        (
            "in all",
            f"{train.steps} steps: {train.steps * rollout.batch:,} responses sampled, "
            f"{train.steps * per_rollout:,} gradient steps (AdamW, "
            f"learning rate {train.learning_rate:g})",
        ),
        ("denominator", f"over a train batch: S = {train.batch} responses"),
    ]


def _resources(recipe: Recipe, out: Path) -> list[tuple[str, str]]:
    if not isinstance(recipe.task, SortTask):
        return [("written to", str(out))]
    copies = ADAM_COPIES + 1 + (recipe.objective.kl != "none")  # the generator's, the reference's
    memory = copies * 4 * parameters(recipe)
    rows = recipe.train.steps * 1_000  # a row of metrics and one of timings
    log = recipe.train.steps * recipe.rollout.batch * 110  # at most a line per response
    return [
        ("memory", f"{_bytes(memory)} for weights, gradients and optimizer state"),
        ("disk", f"at most {_bytes(rows + log + 100_000)}"),
        ("written to", str(out)),
    ]


def parameters(recipe: Recipe) -> int:
    width, task = recipe.model.width, recipe.task
    assert isinstance(task, SortTask), "only the sorting model's size follows from its recipe"
    return task.numbers * width + 2 * task.length * width * width


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
