"""The plan of a run: its task, formulas, batches, memory, disk and time, before anything runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from burnish import estimate, pieces
from burnish.config import (
    FilesTask,
    GymTask,
    KeywordsTask,
    MathTask,
    MixtureTask,
    PairsTask,
    Recipe,
    SorterConfig,
    SortTask,
)
from burnish.errors import ConfigError
from burnish.pieces import KL
from burnish.wording import counted

if TYPE_CHECKING:
    from burnish.machine import Rates

BYTES = {"auto": 4, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number; of one whose precision is not chosen yet, the most it can have."""
CACHE = "cache"
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
    response in the engine's cache and in a pack of ``train.micro_tokens``.

    A setting that would leave no prompt any room is left to ``check_lengths``.
    """
    bounds = [Room(size.context - 1, f"the model's context of {size.context:,} tokens")]
    for name, response in _responses(recipe).items():
        for what, tokens in _held(recipe, size, name).items():
            if response < tokens < size.context:
                bounds.append(Room(tokens - response, f"{what} beside {name} = {response}"))
    return min(bounds)


def _responses(recipe: Recipe) -> dict[str, int]:
    """The tokens that a response may have, by setting, the most first."""
    found = {"rollout.max_tokens": recipe.rollout.max_tokens}
    if recipe.validation.max_tokens is not None:
        found["validation.max_tokens"] = recipe.validation.max_tokens
    return dict(sorted(found.items(), key=lambda item: -item[1]))


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
    time = _time(recipe, size, rates)
    if isinstance(recipe.task, PairsTask):
        loss = ("loss", "−Σ log π(answer token) / number of answer tokens, over a batch")
        rate = f"AdamW, learning rate {recipe.train.learning_rate:g}, {recipe.train.schedule}"
        steps = f"{recipe.task.epochs:g} × the rows, {recipe.train.batch} at a time ({rate})"
        return [
            ("task", _task(recipe, size)),
            ("batches", [loss, ("gradient steps", steps)]),
            ("resources", [*_memory(recipe, size), *time, ("written to", str(out))]),
        ]
    return [
        ("task", _task(recipe, size)),
        ("objective", pieces.formula(recipe.objective)),
        ("batches", _batches(recipe)),
        (
            "resources",
            [
                *_precision(recipe),
                *_memory(recipe, size),
                *_disk(recipe, size),
                *time,
                ("written to", str(out)),
            ],
        ),
    ]


def _precision(recipe: Recipe) -> Lines:
    """The precision of a language model; the sorting model has one alone, so nothing is said."""
    if isinstance(recipe.model, SorterConfig):
        return []
    learned, sampled = recipe.train.precision, recipe.engine.precision
    both = learned if learned == sampled else f"{learned} to learn, {sampled} to sample"
    return [("precision", both)]


def check_lengths(recipe: Recipe, size: Size) -> int:
    """The longest sequence that is learned. The engine's cache and a pack of ``train.micro_tokens``
    must hold each sequence."""
    for name, response in _responses(recipe).items():
        longest = min(size.context, size.longest_prompt + response)
        for what, tokens in _held(recipe, size, name).items():
            if tokens < longest:
                least = f"at least {longest}" if "micro" in what else "more"
                raise ConfigError(
                    f"{what} is below the longest sequence, {longest} tokens (a prompt of "
                    f"{size.longest_prompt} and {name} = {response}); use {least}"
                )
    return min(size.context, size.longest_prompt + recipe.rollout.max_tokens)


def _task(recipe: Recipe, size: Size | None) -> Lines:
    task, model = recipe.task, recipe.model
    lines: Lines = []
    if isinstance(task, MixtureTask):
        total = sum(task.weights.values())
        for label, part in task.tasks.items():
            lines += [("part", f"{label}, {task.weights[label] / total:.0%} of the groups")]
            lines += _asked(part)
    elif isinstance(task, PairsTask):
        lines.append(("task", f"pairs: {task.train}"))
    else:
        lines += _asked(task)
    if recipe.stop:
        lines.append(("stops at", ", ".join(map(repr, recipe.stop))))
    count = _parameters(recipe, size)
    known = "" if count is None else f": {count:,} parameters"
    lines += [("model", f"{model.name}{known}"), ("seed", str(recipe.seed))]
    if size is not None and not recipe.is_supervised:
        longest = check_lengths(recipe, size)
        told = f"{longest} tokens: a prompt of {size.longest_prompt} and its response"
        lines.append(("longest sequence", f"{told} (the model's context: {size.context:,})"))
        if size.too_long:
            told = f"{size.too_long:,} of {counted(size.looked_at, 'prompt')} that were looked at"
            why = room(recipe, size)
            left = f"have more than {why.tokens:,} tokens ({why.why})"
            lines.append(("too long", f"{told} {left}; they are skipped"))
    return lines


def _asked(task: SortTask | KeywordsTask | FilesTask | MathTask | GymTask) -> Lines:
    """Lines about a task's prompts, its reward and its held-out prompts."""
    if isinstance(task, SortTask):
        prompts = f"{task.prompts} prompts of {task.length} numbers below {task.numbers}"
        return [("task", f"sort: {prompts}"), ("reward", task.reward)]
    if isinstance(task, KeywordsTask):
        count = f"{task.least} to {task.most}" if task.least < task.most else f"{task.least}"
        words = f"{count} keywords as {'whole words' if task.match == 'word' else 'substrings'}"
        ended = ", and the response ends by itself" if task.must_end else ""
        held_out = f"{task.validation_prompts} prompts of other words"
        verb = "uses, outside lists and at most twice," if task.reward == "use" else "has"
        reward = f"1 if the response {verb} its {words}{ended}"
        return [("task", "keywords"), ("reward", reward), ("held out", held_out)]
    if isinstance(task, FilesTask):
        return [("task", f"files: {task.train}"), ("reward", str(task.reward))]
    asked = ("prompt", f"{task.prompt!r}, its answer read as {task.answer_format}")
    if isinstance(task, GymTask):
        given = ", ".join(f"{key} = {value}" for key, value in task.settings.items())
        made = f"gym: {task.generator}{given and f' ({given})'}"
        held_out = f"{task.validation_prompts} other questions"
        return [("task", made), asked, ("reward", "its own scorer's"), ("held out", held_out)]
    rows = "a tenth" if task.validation is None else "all rows"
    held_out = f"{task.validation_rows or rows} of {task.validation or task.train}"
    exact = ("reward", "1 if the answer is the row's, exactly")
    lines = [("task", f"math: {task.train}"), asked, exact, ("held out", held_out)]
    if task.hints:
        share = f"{task.hints:.0%} of the training prompts"
        lines.append(("hints", f"{share} go on with the beginning of the row's worked answer"))
    return lines


def _batches(recipe: Recipe) -> Lines:
    rollout, train = recipe.rollout, recipe.train
    batches = recipe.train_batches
    micro = ""
    if train.micro_sequences is not None:
        parts = math.ceil(train.batch / train.micro_sequences)
        micro = f", each in {parts} micro-batch{'es' * (parts > 1)}"
    rate = f"learning rate {train.learning_rate:g}"
    if recipe.decay_steps is not None:
        last = (train.final_rate or 0) * train.learning_rate
        rate += f", {train.schedule} to {last:g} at gradient step {recipe.decay_steps:,}"
    return [
        (
            "rollout",
            f"{rollout.batch} responses = {counted(recipe.prompts_per_rollout, 'prompt')} × "
            f"{counted(rollout.group_size, 'sample')}, temperature {rollout.temperature:g}",
        ),
        (
            "gradient steps",
            f"{recipe.gradient_steps_per_rollout} per rollout = {batches} train "
            f"batch{'es' * (batches > 1)} of {train.batch} responses × {train.epochs} "
            f"epoch{'s' * (train.epochs > 1)}{micro}",
        ),
        (
            "in all",
            f"{counted(train.steps, 'step')}: {train.steps * rollout.batch:,} responses sampled, "
            f"{counted(recipe.gradient_steps, 'gradient step')} (AdamW, {rate})",
        ),
        *([] if train.layers is None else [("learning", f"the last {train.layers} layers")]),
        ("denominator", f"over a train batch: S = {train.batch} responses"),
    ]


def memory_parts(recipe: Recipe, size: Size | None) -> dict[str, dict[str, int]]:
    """Bytes that are held all the time, by learner and engine; empty if the model is not here."""
    count, train, engine = _parameters(recipe, size), recipe.train, recipe.engine
    if count is None:
        return {}
    low, learned = BYTES[train.precision], _learned(recipe, size, count)
    learner = {"fp32 masters": 4 * count, "gradients": 4 * learned, "Adam's moments": 8 * learned}
    if low != 4:
        learner[f"{train.precision} weights"] = low * count
    copies = _copies(recipe)
    if copies:
        learner[f"{copies} frozen cop{'ies' if copies > 1 else 'y'}"] = copies * low * learned
    if recipe.is_supervised:
        return {"learner": learner}
    if size is None:
        return {"learner": learner, "engine": {"weights": 4 * count}}
    wide, cache = BYTES[engine.precision], engine.kv_mb * 2**20
    weights = {f"{engine.precision} weights": (wide + size.copied) * count}
    tokens = cache // (size.cached * wide)
    return {"learner": learner, "engine": weights | {f"{CACHE} of {tokens:,} tokens": cache}}


def disk_bytes(recipe: Recipe, size: Size | None) -> tuple[int, int, int | None]:
    """Bytes of the rows that a run writes at most, how many checkpoints there are at once, and the
    bytes of each; None if the model is not here."""
    steps, log = recipe.train.steps, recipe.log
    rows = steps * (2_500 + recipe.rollout.batch * 110 + log.rollouts * 3_000) + 200_000
    saves = math.ceil(steps / recipe.checkpoint.every)
    count = _parameters(recipe, size)
    files = min(saves, recipe.checkpoint.keep + 2)  # the best, and the one that is being written
    if count is None:
        return rows, files, None
    frozen = recipe.train.log_kl + _refreshes(recipe)
    learned = _learned(recipe, size, count)
    return rows, files, 4 * count + (8 + frozen * BYTES[recipe.train.precision]) * learned


def _memory(recipe: Recipe, size: Size | None) -> Lines:
    """Lines about memory: parts held all the time, and the size of a pack's activations."""
    parts, train = memory_parts(recipe, size), recipe.train
    if not parts:
        return [("memory", "known once the model is here; `burnish train` downloads it")]
    lines = [(who, _sum(held)) for who, held in parts.items()]
    if size is None or recipe.is_supervised:
        return lines
    longest = check_lengths(recipe, size)
    pack = f"packs of {train.micro_tokens} tokens" if train.micro_tokens else None
    if pack is None:
        at_once = min(train.micro_sequences or train.batch, train.batch)
        prompts = math.ceil(at_once / recipe.rollout.group_size) * size.longest_prompt
        tokens = prompts + at_once * (longest - size.longest_prompt)
        pack = f"packs of up to {tokens:,} tokens; train.micro_tokens bounds them"
    return [*lines, ("beside that", f"activations of a forward and backward pass, {pack}")]


def _disk(recipe: Recipe, size: Size | None) -> Lines:
    kept, steps = recipe.checkpoint, recipe.train.steps
    rows, files, each = disk_bytes(recipe, size)
    if each is None:
        room = f"{spell(rows)}, and {counted(files, 'checkpoint')} of 4 to 16 bytes a parameter"
    else:
        room = f"{spell(rows + files * each)}: {counted(files, 'checkpoint')} of {spell(each)}"
    saves = math.ceil(steps / kept.every)
    cadence = f"every {counted(kept.every, 'step')}, {counted(saves, 'time')}"
    if saves > 1:
        cadence += f"; the last {kept.keep} and the best are kept"
    validated = f"before the first step and every {recipe.validation.every}"
    return [("disk", f"at most {room}"), ("saved", cadence), ("validated", validated)]


def _time(recipe: Recipe, size: Size | None, rates: Rates | None) -> Lines:
    if rates is None:
        return []
    duration = estimate.seconds(recipe, size, rates)
    return [] if not duration else [("time", f"{estimate.spoken(duration)} on this machine")]


def _copies(recipe: Recipe) -> int:
    """Frozen policies that the learner holds; the initial model may serve as the reference."""
    logs = recipe.train.log_kl
    if not isinstance(recipe.objective.kl, KL):
        return 2 * logs
    return 1 + logs + (logs and _refreshes(recipe))


def _refreshes(recipe: Recipe) -> bool:
    """Whether the policy becomes the reference now and then."""
    kl = recipe.objective.kl
    return isinstance(kl, KL) and kl.refresh is not None


def _parameters(recipe: Recipe, size: Size | None) -> int | None:
    model, task = recipe.model, recipe.task
    if isinstance(model, SorterConfig):
        assert isinstance(task, SortTask)
        return task.numbers * model.width + 2 * task.length * model.width**2
    return None if size is None else size.parameters


def _learned(recipe: Recipe, size: Size | None, count: int) -> int:
    """The number of weights that learn: all, or the weights of the last layers."""
    if recipe.train.layers is None or size is None or not size.layer:
        return count
    return min(count, recipe.train.layers * size.layer)


def _sum(parts: dict[str, int]) -> str:
    told = ", ".join(f"{what} {spell(count)}" for what, count in parts.items())
    return f"{spell(sum(parts.values()))}: {told}"


def spell(count: float) -> str:
    """Bytes in a unit that suits them."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"
