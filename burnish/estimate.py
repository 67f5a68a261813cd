"""About how long a run takes: its operations from the recipe, divided by measured rates.

A forward pass takes two operations for each parameter and token, a backward pass four. Nobody knows
beforehand how long responses are, so the result is good within a factor of two or so.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish import wording
from burnish.pieces import KL
from burnish.schema import PairsTask, Recipe, SorterConfig

if TYPE_CHECKING:
    from burnish.machine import Rates
    from burnish.plan import Size

FILLED = 0.6
"""The share of the allowed tokens that a response is taken to have."""
PROMPT = 64
"""Tokens that a prompt is taken to have if none was looked at."""
BYTES = 4
"""Bytes of a JSONL file for each of its tokens."""
REACHED = {
    "cpu": {"generate": 0.7, "score": 0.75, "learn": 0.7, "evaluate": 0.6},
    "cuda": {"generate": 0.12, "score": 0.25, "learn": 0.25, "evaluate": 0.12},
}
"""The share of the measured rate that each phase reaches: on a CPU what two AVX-512 cores did on
the recipe demo-small, on a GPU what an H200 did on gsm8k, roughly."""


def work(recipe: Recipe, size: Size) -> dict[str, float]:
    """The operations of a language model's run by phase; rows that are not here count as none."""
    forward, train = 2 * size.parameters, recipe.train
    prompt = size.longest_prompt or PROMPT
    backward = 3 if train.recompute else 2
    if isinstance(recipe.task, PairsTask):
        seen = recipe.task.epochs * len(_read(recipe.task.train)) / BYTES
        return {"learn": (1 + backward) * forward * seen}
    response = FILLED * recipe.rollout.max_tokens
    tokens = recipe.rollout.batch * response + recipe.prompts_per_rollout * prompt
    asked = FILLED * (recipe.validation.max_tokens or recipe.rollout.max_tokens)
    held_out = sum(map(_held_out, recipe.tasks)) * (prompt + recipe.validation.samples * asked)
    rollout = train.steps * tokens * forward
    upper = min(1.0, (train.layers or size.layers) / size.layers)
    return {
        "generate": rollout,
        "score": rollout * (1 - upper + upper * _passes(recipe)),
        "learn": rollout * upper * train.epochs * (1 + backward),
        "evaluate": (2 + (train.steps - 1) // recipe.validation.every) * held_out * forward,
    }


def seconds(recipe: Recipe, size: Size, rates: Rates) -> float:
    """About how long a language model's run takes; 0 if it learns rows that are not here."""
    reached = REACHED[rates.device]
    few, many = rates.decode_gflops * 1e9, rates.learn_gflops * 1e9
    speed = {"generate": few, "score": many, "learn": many, "evaluate": few}
    counts = work(recipe, size).items()
    return sum(count / (speed[phase] * reached[phase]) for phase, count in counts)


def spoken(recipe: Recipe, size: Size | None, rates: Rates) -> str:
    """The time as somebody would say it: "about 9 minutes"; ``size`` is None for the sorting model,
    and if the model's files are not here."""
    if isinstance(recipe.model, SorterConfig):
        return "about a minute"
    if size is None:
        return "not known before its model is here"
    duration = seconds(recipe, size, rates)
    return (
        f"about {wording.duration(duration)}" if duration else "not known before its rows are here"
    )


def _passes(recipe: Recipe) -> float:
    """Forward passes over a rollout before it is learned."""
    objective, train = recipe.objective, recipe.train
    scored = recipe.rollout.batch if train.log_kl_responses is None else train.log_kl_responses
    logged = 2 * train.log_kl * min(1, scored / recipe.rollout.batch)
    again = objective.proximal == "recompute" and recipe.gradient_steps_per_rollout > 1
    return isinstance(objective.kl, KL) + logged + again


def _held_out(task: Any) -> int:
    """Prompts that are held out, as far as the recipe or its files tell."""
    told = getattr(task, "validation_prompts", None) or getattr(task, "validation_rows", None)
    if told is not None:
        return int(told)
    return _read(task.validation).count(b"\n") or _read(task.train).count(b"\n") // 10


def _read(file: str | None) -> bytes:
    """A file's contents; empty if it is not here."""
    return Path(file).read_bytes() if file and Path(file).is_file() else b""
