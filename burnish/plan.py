"""The plan of a run: its task, formulas, batches, memory, disk and time, before anything runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish import estimate, pieces
from burnish.errors import ConfigError
from burnish.pieces import KL
from burnish.schema import MixtureTask, PairsTask, Recipe, SorterConfig
from burnish.wording import counted

if TYPE_CHECKING:
    from burnish.machine import Rates

BYTES = {"auto": 4, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number; of one whose precision is not chosen yet, the most it can have."""
PAGE = 16
"""Tokens of a page of the engine's cache."""
Lines = list[tuple[str, str]]
Section = tuple[str, Lines]


class Size(NamedTuple):
    """Counts that a language model's files and the task's prompts give."""

    parameters: int
    cached: int
    """Numbers that the cache holds for a token."""
    context: int
    longest_prompt: int
    """Tokens of the longest prompt that was looked at."""
    layers: int = 1
    """Layers of the transformer."""
    layer: int = 0
    """Weights of one layer; 0 if not known."""
    copied: int = 0
    """Bytes of a weight in the engine's own copy for matrix products; 0 if it makes none."""
    looked_at: int = 0
    """Prompts that were looked at, including those that are too long."""
    too_long: int = 0
    """Prompts that were skipped or cut."""


class Room(NamedTuple):
    """The longest prompt that a run has room for."""

    tokens: int
    why: str
    """The setting or the context that bounds it, in words."""


def room(recipe: Recipe, size: Size) -> Room:
    """A prompt leaves room for a token of the response in the model's context, and for all of the
    response in the engine's cache and in a pack of ``train.micro_tokens``."""
    bounds = [Room(size.context - 1, f"the model's context of {size.context:,} tokens")]
    responses = {"rollout.max_tokens": recipe.rollout.max_tokens}
    if recipe.validation.max_tokens is not None:
        responses["validation.max_tokens"] = recipe.validation.max_tokens
    for name, response in responses.items():
        for what, tokens in _held(recipe, size, name).items():
            if tokens <= min(response, size.context - 1):
                raise ConfigError(
                    f"{what} holds sequences of {tokens} tokens, and {name} = {response} leaves no "
                    "room for a prompt; use more"
                )
            if tokens < size.context:
                bounds.append(Room(tokens - response, f"{what} beside {name} = {response}"))
    return min(bounds)


def _held(recipe: Recipe, size: Size, name: str) -> dict[str, int]:
    """The tokens that a sequence may have, by the setting that bounds it; ``name`` is the setting
    of its response. Held-out sequences are packed where the learner scores them for its KL."""
    engine, micro = recipe.engine, recipe.train.micro_tokens
    pages = engine.kv_mb * 2**20 // (PAGE * size.cached * BYTES[engine.precision])
    found = {f"engine.kv_mb = {engine.kv_mb}": pages * PAGE + 1}  # the last is never read
    if micro is not None and (recipe.train.log_kl or name == "rollout.max_tokens"):
        found[f"train.micro_tokens = {micro}"] = micro
    return found


def plan(
    recipe: Recipe, out: Path, size: Size | None = None, rates: Rates | None = None
) -> list[Section]:
    """Sections of (what, how much).

    ``size`` is None for the sorter, and if the model's files are not here; ``rates`` is None if the
    machine was not measured, and then no time is told.
    """
    resources: Lines = []
    if size is not None:
        resources = [("precision", _precision(recipe)), *_room(recipe, size)]
    elif not isinstance(recipe.model, SorterConfig):
        resources = [("memory", "known once the model is here; `burnish train` downloads it")]
    every = f"saved every {counted(recipe.checkpoint.every, 'step')}, validated every"
    resources.append(("cadence", f"{every} {counted(recipe.validation.every, 'step')}"))
    if rates is not None:
        resources.append(("time", estimate.spoken(recipe, size, rates)))
    loss = [("loss", "−Σ log π(answer token) / number of answer tokens, over a batch")]
    return [
        ("task", _task(recipe, size)),
        ("objective", loss if recipe.is_supervised else pieces.formula(recipe.objective)),
        ("batches", _batches(recipe)),
        ("resources", [*resources, ("written to", str(out))]),
    ]


def _precision(recipe: Recipe) -> str:
    learned, sampled = recipe.train.precision, recipe.engine.precision
    return learned if learned == sampled else f"{learned} to learn, {sampled} to sample"


def _task(recipe: Recipe, size: Size | None) -> Lines:
    task = recipe.task
    lines = [("task", _settings(task))]
    if isinstance(task, MixtureTask):
        total = sum(task.weights.values())
        lines = [
            ("part", f"{label}, {task.weights[label] / total:.0%} of the groups: {_settings(part)}")
            for label, part in task.tasks.items()
        ]
    if recipe.stop:
        lines.append(("stops at", ", ".join(map(repr, recipe.stop))))
    known = "" if size is None else f": {size.parameters:,} parameters"
    lines += [("model", f"{recipe.model.name}{known}"), ("seed", str(recipe.seed))]
    if size is not None and not recipe.is_supervised:
        longest = min(size.context, size.longest_prompt + recipe.rollout.max_tokens)
        told = f"{longest} tokens, with a prompt of {size.longest_prompt}"
        lines.append(("longest sequence", f"{told} (the model's context: {size.context:,})"))
        if size.too_long:
            told = f"{size.too_long:,} of {counted(size.looked_at, 'prompt')} that were looked at"
            why = room(recipe, size)
            left = f"have more than {why.tokens:,} tokens ({why.why})"
            lines.append(("too long", f"{told} {left}; they are skipped"))
    return lines


def _settings(task: Any) -> str:
    """A task's name and the settings that its recipe gives."""
    given = task.model_dump(exclude_unset=True, exclude={"name"})
    told = ", ".join(f"{key} = {value!r}" for key, value in given.items())
    return f"{task.name}: {told}" if told else task.name


def _batches(recipe: Recipe) -> Lines:
    rollout, train = recipe.rollout, recipe.train
    rate = f"AdamW, learning rate {train.learning_rate:g}"
    if isinstance(recipe.task, PairsTask):
        steps = f"{recipe.task.epochs:g} × the rows, {train.batch} at a time"
        return [("gradient steps", f"{steps} ({rate}, {train.schedule})")]
    batches = recipe.train_batches
    if recipe.decay_steps is not None:
        rate += f", {train.schedule} to 0 at gradient step {recipe.decay_steps:,}"
    lines = [
        (
            "rollout",
            f"{rollout.batch} responses = {counted(recipe.prompts_per_rollout, 'prompt')} × "
            f"{counted(rollout.group_size, 'sample')}, temperature {rollout.temperature:g}",
        ),
        (
            "gradient steps",
            f"{recipe.gradient_steps_per_rollout} per rollout = {batches} train "
            f"batch{'es' * (batches > 1)} of {train.batch} responses × "
            f"{counted(train.epochs, 'epoch')}",
        ),
        (
            "in all",
            f"{counted(train.steps, 'step')}: {train.steps * rollout.batch:,} responses sampled, "
            f"{counted(recipe.gradient_steps, 'gradient step')} ({rate})",
        ),
    ]
    return lines if train.layers is None else [*lines, ("learning", f"last {train.layers} layers")]


class Need(NamedTuple):
    """Room that a run takes all the time."""

    resource: str
    """memory, cache (memory that fills as responses grow), or disk"""
    what: str
    size: int
    """Bytes."""


def needs(recipe: Recipe, size: Size) -> list[Need]:
    """The parts that learner and engine hold for a language model, and the files of a run."""
    train, engine, count = recipe.train, recipe.engine, size.parameters
    learned = count
    if train.layers is not None and size.layer:
        learned = min(count, train.layers * size.layer)
    low, copies, refreshes = BYTES[train.precision], *_frozen(recipe)
    found = [
        Need("memory", "fp32 masters", 4 * count),
        Need("memory", "gradients", 4 * learned),
        Need("memory", "Adam's moments", 8 * learned),
    ]
    if low != 4:
        found.append(Need("memory", f"{train.precision} weights", low * count))
    if copies:
        found.append(Need("memory", f"frozen copies ({copies})", copies * low * learned))
    files = recipe.checkpoint.keep + 2  # the best, and the one that is being written
    if not recipe.is_supervised:
        files = min(files, math.ceil(train.steps / recipe.checkpoint.every))
        wide, cache = BYTES[engine.precision], engine.kv_mb * 2**20
        tokens = f"{cache // (size.cached * wide):,} tokens (engine.kv_mb = {engine.kv_mb})"
        found.append(Need("memory", "the engine's weights", (wide + size.copied) * count))
        found.append(Need("cache", tokens, cache))
    each = 4 * count + (8 + (train.log_kl + refreshes) * low) * learned
    rows = train.steps * (2_500 + recipe.rollout.batch * 110 + recipe.log.rollouts * 3_000)
    kept = f"{counted(files, 'checkpoint')} of {spell(each)}"
    return [*found, Need("disk", kept, files * each), Need("disk", "rows", rows + 200_000)]


def _frozen(recipe: Recipe) -> tuple[int, bool]:
    """Frozen policies that the learner holds, and whether the reference is refreshed now and then;
    until then the initial model may serve as the reference."""
    kl, logs = recipe.objective.kl, recipe.train.log_kl
    if not isinstance(kl, KL):
        return 2 * logs, False
    refreshes = kl.refresh is not None
    return 1 + logs + (logs and refreshes), refreshes


def _room(recipe: Recipe, size: Size) -> Lines:
    """Lines about memory, cache and disk. Activations of a pack are not known before it is run."""
    found, lines = needs(recipe, size), []
    for resource in dict.fromkeys(need.resource for need in found):
        parts = [need for need in found if need.resource == resource]
        told = ", ".join(f"{need.what} {spell(need.size)}" for need in parts)
        lines.append((resource, f"{spell(sum(need.size for need in parts))}: {told}"))
    return lines


def spell(count: float) -> str:
    """Bytes in a unit that suits them."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
