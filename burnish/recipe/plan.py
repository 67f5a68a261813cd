"""The plan of a run: its task, formulas, batches, memory, disk and time, before anything runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from burnish import strategy
from burnish.errors import ConfigError
from burnish.pieces.advantages import STEP, Remax, Vine
from burnish.pieces.objective import formula
from burnish.pieces.terms import KL
from burnish.schema import critic, engines, length, mesh, selection
from burnish.schema.models import SorterConfig
from burnish.schema.recipe import Recipe
from burnish.schema.tasks import JudgedTask, PreferencesTask, Written
from burnish.wording import counted, duration

if TYPE_CHECKING:
    from burnish.machine import Rates

BYTES = {"auto": 4, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes of a number by its precision; a precision that is not chosen yet counts as the widest."""
PAGE = 16
"""Tokens of a page of the engine's cache."""
FILLED = 0.6
"""The share of the allowed tokens that a response is taken to have, if a time is estimated."""
PROMPT = 64
"""Tokens that a prompt is taken to have if none was looked at."""
HELD_OUT = 256
"""Prompts that are taken to be held out if the recipe does not tell their number."""
WRITTEN = 4
"""Bytes of a JSONL file for each of its tokens."""
REACHED = {"cpu": (0.65, 0.7), "cuda": (0.12, 0.25)}
"""The share of the measured rates that sampling and learning reach: on a CPU as two AVX-512 cores
did on the recipe demo-small, on a GPU as an H200 did on gsm8k, roughly."""
ENGINE = "the engine's weights"
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
    outer: int = 0
    """Parameters outside of the layers: embedding, final norm and head."""
    learned: int | None = None
    """Parameters that learn, in the model or in its adapter; None if it is all of them."""
    copied: int = 0
    """Bytes of a weight in the engine's own copy for matrix products; 0 if it makes none."""
    frozen: int = 0
    """Weights of the teacher and of the reward model; 0 if there is none."""
    too_long: int = 0
    """Prompts that were skipped because they are too long."""
    frozen_contexts: tuple[tuple[str, int], ...] = ()
    """Settings of the teacher and of the reward model, and the tokens of their contexts."""


class Room(NamedTuple):
    """The room of a prompt: the tokens that the longest may have."""

    tokens: int
    why: str
    """The setting or the context that bounds it, in words."""


def room(recipe: Recipe, size: Size) -> Room:
    """A prompt leaves room for a token of the response in the model's context, and for all of the
    response in the engine's cache, in a pack of ``train.micro_tokens``, and in the context of a
    frozen model that reads it."""
    engine, micro = recipe.engine, recipe.train.micro_tokens
    response = max(recipe.rollout.max_tokens, recipe.validation.max_tokens or 0)
    pages = engine.kv_mb * 2**20 // (PAGE * size.cached * BYTES[engine.precision])
    # The last token is never read.
    held = {f"engine.kv_mb = {engine.kv_mb}": (pages * PAGE + 1, response)}
    if micro is not None:
        held[f"train.micro_tokens = {micro}"] = micro, response
    for name, context in size.frozen_contexts:  # a teacher reads no held-out responses
        longest = recipe.rollout.max_tokens if name.startswith("teacher") else response
        held[f"{name}'s context of {context:,} tokens"] = context, longest
    bounds = [Room(size.context - 1, f"the model's context of {size.context:,} tokens")]
    for setting, (tokens, response) in held.items():
        if tokens <= min(response, size.context - 1):
            raise ConfigError(
                f"{setting} holds sequences of {tokens} tokens, and max_tokens = {response} leaves "
                "no room for a prompt; use more, or a smaller max_tokens"
            )
        if tokens < size.context:
            bounds.append(Room(tokens - response, f"{setting} beside max_tokens = {response}"))
    return min(bounds)


def plan(
    recipe: Recipe, out: Path, size: Size | None = None, rates: Rates | None = None
) -> list[Section]:
    """Sections of (name, description).

    ``size`` is None for the sorter, and if the model's files are not here; ``rates`` is None if the
    machine was not measured, and then no time is told.
    """
    resources: Lines = []
    if size is not None:
        learned, sampled = recipe.train.precision, recipe.engine.precision
        head = ", logits in fp32" * getattr(recipe.model, "fp32_head", False)
        resources = [("precision", f"{learned} to learn, {sampled} to sample{head}")]
        if size.learned is not None:
            resources.append(("learns", f"{size.learned:,} parameters of {size.parameters:,}"))
        found = needs(recipe, size)
        resources += _resources(found)
        if recipe.on_mesh:
            own = sum(n.size for n in found if n.resource == "memory" and n.what != ENGINE)
            told = f"{spell(own)} of it on each rank; the rest is the engine's"
            resources.append(("per rank", told))
    elif not isinstance(recipe.model, SorterConfig):
        resources = [("memory", "known once the model is here; `burnish train` downloads it")]
    if rates is not None:
        resources.append(("time", spoken(recipe, size, rates)))
    objective = [*formula(recipe.objective), *length.describe(recipe)]
    if recipe.is_supervised:
        objective = [("loss", "−Σ log π(answer token) / number of answer tokens, over a batch")]
    if isinstance(recipe.task, PreferencesTask):
        objective = [("loss", "−mean over pairs of log σ(r(chosen) − r(rejected))")]
    return [
        ("task", _task(recipe, size)),
        ("objective", objective),
        *critic.describe(recipe),
        ("batches", _batches(recipe)),
        *selection.describe(recipe),
        *engines.describe(recipe),
        *strategy.describe(recipe),
        *mesh.describe(recipe),
        ("resources", [*resources, ("written to", str(out))]),
    ]


def _task(recipe: Recipe, size: Size | None) -> Lines:
    task = recipe.task
    given = task.model_dump(exclude_unset=True, exclude={"name", "rubric", "judge", "evolve"})
    settings = [f"{key} = {value!r}" for key, value in given.items()]
    known = "" if size is None else f": {size.parameters:,} parameters"
    lines = [("task", ", ".join([task.name, *settings])), ("model", f"{recipe.model.name}{known}")]
    if recipe.teacher is not None:
        lines.append(("teacher", f"{recipe.teacher.model}, frozen"))
    if recipe.reward_model is not None:
        learned, weight = recipe.reward_model.name, recipe.reward_model.task
        own = f" + {weight:g} × the task's reward" if weight else ""
        lines.append(("reward", f"r = {learned}(prompt, response){own}"))
    if recipe.stop:
        lines.append(("stops at", ", ".join(map(repr, recipe.stop))))
    if size is not None and size.longest_prompt:
        told = f"{size.longest_prompt:,} tokens (the model's context: {size.context:,})"
        lines.append(("longest prompt", told))
    if size is not None and size.too_long:
        bound = room(recipe, size)
        told = f"have more than {bound.tokens:,} tokens ({bound.why}); they are skipped"
        lines.append(("too long", f"{counted(size.too_long, 'prompt')} {told}"))
    return [*lines, *_judges(recipe)]


def _judges(recipe: Recipe) -> Lines:
    """The rubric and the judge of each judged task, and the calls that are to be expected."""
    weights, lines = getattr(recipe.task, "weights", {"": 1.0}), list[tuple[str, str]]()
    for name, part in recipe.parts.items():
        if not isinstance(part, JudgedTask):
            continue
        judge, evolve, of = part.judge, part.evolve, f" of {name}" if name else ""
        criteria = [f"{weight:+g} {text!r}" for text, weight in part.rubric or ()]
        lines.append((f"rubric{of}", ", ".join(criteria) or "each row's own"))
        piece, calls = recipe.objective.advantage, recipe.rollout.batch
        calls += recipe.prompts_per_rollout if isinstance(piece, Remax) else 0  # greedy responses
        calls *= weights[name] / sum(weights.values())
        further = "continuation and held-out" if isinstance(piece, Vine) else "held-out"
        told = f"{calls:.0f} calls per step and one per {further} response, or up to {judge.tries} "
        lines.append((f"judge{of}", f"{judge.model} at {judge.url}: {told}times as many"))
        if evolve is not None:
            told = f"at most {evolve.most} more criteria, kept while std_g > {evolve.min_std:g}"
            lines.append((f"evolving{of}", f"{told}; a call every {counted(evolve.every, 'step')}"))
    return lines


def _batches(recipe: Recipe) -> Lines:
    rollout, train = recipe.rollout, recipe.train
    rate = f"AdamW, learning rate {train.learning_rate:g}, {train.schedule}"
    if isinstance(recipe.task, Written):
        steps = f"{recipe.task.epochs:g} × the rows, {train.batch} at a time"
        return [("gradient steps", f"{steps} ({rate})")]
    if recipe.decay_steps is not None:
        rate += f" to 0 at gradient step {recipe.decay_steps:,}"
    prompts = counted(recipe.prompts_per_rollout, "prompt")
    samples = f"{counted(rollout.group_size, 'sample')}, temperature {rollout.temperature:g}"
    batches = f"{recipe.train_batches} train batch{'es' * (recipe.train_batches > 1)}"
    steps = f"{batches} of {train.batch} responses × {counted(train.epochs, 'epoch')}"
    if recipe.gradient_steps_per_rollout == 1 and recipe.objective.loss.compares:
        steps += "" if recipe.is_stale else "; the policy has not moved then: ρ = 1, no bound acts"
    every = f"{counted(train.steps, 'step')}: {train.steps * rollout.batch:,} responses sampled"
    gradient_steps = counted(recipe.gradient_steps, "gradient step")
    lines = [
        ("rollout", f"{rollout.batch} responses = {prompts} × {samples}"),
        *_continuations(recipe),
        ("gradient steps", f"{recipe.gradient_steps_per_rollout} per rollout = {steps}"),
        ("in all", f"{every}, {gradient_steps} ({rate})"),
    ]
    bounds = {"on average": train.mismatch_mean, "on a token": train.mismatch_max}
    if told := [f"{bound:g} {how}" for how, bound in bounds.items() if bound is not None]:
        lines.append(
            ("alarm", f"halts if sampler and learner differ by more than {', '.join(told)}")
        )
    is_whole = train.learn.name == "all"
    return lines if is_whole else [*lines, ("learning", train.learn.describe())]


def _continuations(recipe: Recipe) -> Lines:
    """The cost of samples that value others, if the recipe has any."""
    piece, most = recipe.objective.advantage, recipe.rollout.max_tokens
    if isinstance(piece, Remax):
        told = "more per rollout, one per prompt, to be compared with and not learned from"
        return [("greedy responses", f"{recipe.prompts_per_rollout} {told}")]
    if not isinstance(piece, Vine):
        return []
    told = f"at most {_continued(recipe, most):,} more tokens are sampled per rollout"
    known = "" if isinstance(piece.steps, int) else f" and a step {STEP} or more"
    return [("continuations", f"{told}, if a response has up to {most} tokens{known}")]


def _continued(recipe: Recipe, length: int) -> int:
    """Tokens that are sampled in a rollout beside its responses, if each has ``length`` of them."""
    if isinstance(recipe.objective.advantage, Remax):
        return recipe.prompts_per_rollout * length
    return recipe.rollout.batch * recipe.objective.advantage.continued(length)


class Need(NamedTuple):
    """Memory or disk that a run takes."""

    resource: str
    """memory, cache (memory that fills as responses grow), or disk."""
    what: str
    size: int
    """Bytes."""


def needs(recipe: Recipe, size: Size) -> list[Need]:
    """The parts that learner and engine hold for a language model, and the files of a run."""
    train, engine, count = recipe.train, recipe.engine, size.parameters
    samples = not recipe.is_supervised
    learned = count if size.learned is None else size.learned
    has_lora = train.learn.name == "lora"
    low, wide, cache = BYTES[train.precision], BYTES[engine.precision], engine.kv_mb * 2**20
    kl, refreshes = recipe.objective.kl, recipe.objective.kl.refresh is not None
    # The reference, the initial model and the previous policy. The initial model is the reference
    # if there is one that is never refreshed.
    copies = isinstance(kl, KL) + train.log_kl * (2 - (isinstance(kl, KL) and not refreshes))
    if has_lora:  # the model without its adapter is no copy
        copies = refreshes + train.log_kl
    still = count if has_lora else count - learned
    has_body = recipe.critic is not None and not recipe.critic.shared
    tokens = f"{cache // (size.cached * wide):,} tokens (engine.kv_mb = {engine.kv_mb})"
    kept = recipe.checkpoint.keep + 2  # the best, and the one that is being written
    saves = math.ceil(train.steps / recipe.checkpoint.every) if samples else kept
    each = checkpoint(recipe, size)
    files = counted(min(kept, saves), "checkpoint")
    kinds = {"the teacher": recipe.teacher, "the reward model": recipe.reward_model}
    others = [kind for kind, section in kinds.items() if section is not None]
    found = [
        Need("memory", "fp32 masters", 4 * learned),
        Need("memory", "gradients", 4 * learned),
        Need("memory", "Adam's moments", 8 * learned),
        Need("memory", f"{train.precision} weights", low * (still + learned * (low < 4))),
        Need("memory", f"frozen copies ({copies})", copies * low * learned),
        # It shares the masters of weights that do not learn.
        Need("memory", "the critic", has_body * (16 * learned + (low < 4) * low * count)),
        Need("memory", f"{' and '.join(others)} in {train.precision}", low * size.frozen),
    ]
    if recipe.on_mesh:
        found = _per_rank(recipe, size, found)
    found += [
        Need("memory", ENGINE, samples * (wide + size.copied) * count),
        Need("cache", tokens, samples * cache),
        Need("disk", f"{files} of {spell(each)}", min(kept, saves) * each),
    ]
    return [need for need in found if need.size]


def checkpoint(recipe: Recipe, size: Size) -> int:
    """Bytes of a learner's state: masters and moments of the policy and of a critic, and the
    previous policy and the reference in compute precision."""
    train, learned = recipe.train, size.parameters if size.learned is None else size.learned
    has_body = recipe.critic is not None and not recipe.critic.shared
    copies = train.log_kl + (recipe.objective.kl.refresh is not None)
    return (12 + 12 * has_body + copies * BYTES[train.precision]) * learned


def _per_rank(recipe: Recipe, size: Size, found: list[Need]) -> list[Need]:
    """A rank's share of the learner's memory. Gathered are all weights, or one layer, the next one
    and the weights outside of the layers; gradients are those of the latter in any case."""
    mesh, low = recipe.mesh, BYTES[recipe.train.precision]
    few = 2 * (size.parameters - size.outer) / size.layers + size.outer
    weights = size.parameters if mesh.gather == "step" else few
    gathered = low * (weights + few) / mesh.tensor
    shared = [
        need._replace(size=math.ceil(need.size / (mesh.shard * mesh.tensor)))
        for need in found
        if need.what != f"{recipe.train.precision} weights"
    ]
    return [*shared, Need("memory", "gathered weights and gradients", math.ceil(gathered))]


def _resources(found: list[Need]) -> Lines:
    """A line each about memory, cache and disk. Nobody knows the activations before a pack runs."""
    lines = []
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


def spoken(recipe: Recipe, size: Size | None, rates: Rates) -> str:
    """The time as somebody would say it: "about 9 minutes"; ``size`` is None for the sorting model,
    and if the model's files are not here."""
    if isinstance(recipe.model, SorterConfig):
        return "about a minute"
    told = 0.0 if size is None else seconds(recipe, size, rates)
    return f"about {duration(told)}" if told else "not known before its model and rows are here"


def seconds(recipe: Recipe, size: Size, rates: Rates) -> float:
    """About how long a language model's run takes; 0 if it learns rows that are not here.

    A forward pass takes two operations for each parameter and token, a backward pass four, or two
    if only an adapter learns, since the model's own weights have no gradient. Nobody knows
    beforehand how long responses are, so the result is good within a factor of two or so.
    """
    train, validation = recipe.train, recipe.validation
    to_sample, to_learn = REACHED[rates.device]
    sampled_per_second = rates.decode_gflops * 1e9 * to_sample / (2 * size.parameters)
    learned_per_second = rates.learn_gflops * 1e9 * to_learn / (2 * size.parameters)
    if isinstance(recipe.task, Written):
        file = Path(recipe.task.train or "")
        written = file.stat().st_size / WRITTEN if file.is_file() else 0
        return 3 * recipe.task.epochs * written / learned_per_second
    prompt, response = size.longest_prompt or PROMPT, FILLED * recipe.rollout.max_tokens
    rollout = recipe.rollout.batch * response + recipe.prompts_per_rollout * prompt
    rows = [getattr(task, "validation_prompts", None) for task in recipe.tasks.values()]
    asked = FILLED * (validation.max_tokens or recipe.rollout.max_tokens)
    held_out = sum(n or HELD_OUT for n in rows) * (prompt + validation.samples * asked)
    evaluations = 2 + (train.steps - 1) // validation.every
    upper = min(1.0, (getattr(train.learn, "last", None) or size.layers) / size.layers)
    gradient = 2 if train.learn.name == "lora" else 3
    bodies = 1 if recipe.critic is None or recipe.critic.shared else 2
    passes = 1 - upper + upper * (_scored(recipe) + gradient * bodies * train.epochs)
    passes += size.frozen / size.parameters
    sampled = train.steps * (rollout + _continued(recipe, round(response))) + evaluations * held_out
    return sampled / sampled_per_second + train.steps * rollout * passes / learned_per_second


def _scored(recipe: Recipe) -> float:
    """Forward passes over a rollout before it is learned."""
    objective, train, batch = recipe.objective, recipe.train, recipe.rollout.batch
    logged = 2 * train.log_kl * min(batch, train.log_kl_responses or batch) / batch
    is_read = recipe.gradient_steps_per_rollout > 1 or objective.reads_proximal_first
    again = objective.proximal == "recompute" and is_read
    return isinstance(objective.kl, KL) + logged + again + (recipe.critic is not None)
