"""What a recipe will compute, said before anything runs."""

from __future__ import annotations

from pathlib import Path

from burnish import pieces
from burnish.config import KeywordsTask, Recipe, SorterConfig, SortTask

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
    lines = []
    if isinstance(task, SortTask):
        size = f"{task.prompts} prompts of {task.length} numbers below {task.numbers}"
        lines += [("task", f"sort: {size}"), ("reward", task.reward)]
    elif isinstance(task, KeywordsTask):
        words = f"{task.least} to {task.most} keywords, all as a {task.match}"
        ended = ", and the response ends by itself" if task.must_end else ""
        lines += [("task", "keywords"), ("reward", f"1 if the response has its {words}{ended}")]
        lines += [("held out", f"{task.validation_prompts} prompts of other words")]
    else:
        lines += [("task", f"files: {task.train}"), ("reward", str(task.reward))]
    count = parameters(recipe)
    size = "" if count is None else f": {count:,} parameters"
    lines += [("model", f"{model.name}{size}"), ("seed", str(recipe.seed))]
    return lines


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
    train = recipe.train
    lines = []
    saved = 0
    count = parameters(recipe)
    if count is None:
        lines.append(("memory", f"16 bytes per parameter to learn; {recipe.engine.kv_mb} MB cache"))
    else:
        copies = ADAM_COPIES + 1 + (recipe.objective.kl != "none") + 2 * train.log_kl
        lines.append(("memory", f"{_bytes(copies * 4 * count)} for weights, optimizer and copies"))
        saved = (recipe.checkpoint.keep + 1) * 3 * 4 * count
    rows = train.steps * (2_500 + recipe.rollout.batch * 110 + recipe.log.rollouts * 3_000)
    kept = recipe.checkpoint
    disk = f"at most {_bytes(rows + saved + 200_000)}"
    if count is None:
        disk = f"at most {_bytes(rows + 200_000)}, and 12 bytes per parameter and checkpoint"
    lines.append(("disk", f"{disk}: the last {kept.keep} checkpoints and the best"))
    lines.append(("saved", f"every {kept.every} steps; validated every {recipe.validation.every}"))
    return [*lines, ("written to", str(out))]


def parameters(recipe: Recipe) -> int | None:
    """None: the model's own files tell, and a plan does not load them."""
    model, task = recipe.model, recipe.task
    if isinstance(model, SorterConfig):
        assert isinstance(task, SortTask)
        return task.numbers * model.width + 2 * task.length * model.width**2
    return None


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
