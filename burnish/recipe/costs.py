"""Estimates of a run's memory, disk space and duration, and the largest prompt that fits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from burnish.console.text import counted
from burnish.errors import ConfigError
from burnish.recipe.activations import PackSize, Widths, activation_bytes, largest_pack
from burnish.recipe.critic import CriticConfig
from burnish.recipe.engine import AnyEngine
from burnish.recipe.mesh import MeshConfig
from burnish.recipe.objective.advantages import Advantage, Remax
from burnish.recipe.objective.kl import KL, Absent
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.recipe.recipe import Recipe, RolloutConfig, TrainConfig, ValidationConfig
from burnish.recipe.runtime import LaggedLoop, RayRuntime
from burnish.recipe.tasks import SupervisedTask

if TYPE_CHECKING:
    from burnish.types import Rates

BYTES = {"auto": 4, "fp32": 4, "bf16": 2, "fp16": 2}
"""Bytes per number by precision. A precision that is not resolved yet counts as the widest."""
PAGE = 16
"""Tokens per page, the unit in which the engine's cache is divided."""
FILLED = 0.6
"""Assumed share of the allowed tokens that a response uses, for time estimates."""
PROMPT = 64
"""Assumed length of a prompt if no prompt has been read."""
HELD_OUT = 256
"""Assumed number of held-out prompts if the recipe does not set it."""
WRITTEN = 4
"""Assumed bytes of a JSONL file per token."""
REACHED = {"cpu": (0.65, 0.7), "cuda": (0.3, 0.7)}
"""Share of the measured rates that sampling and learning reach: on a CPU, as measured on two
AVX-512 cores with the recipe demo-small; on a GPU, as on an H200 with `benchmarks/gpu.py`: 256
samples at once reach 0.47 in the shape of Qwen2.5-1.5B and 0.24 in that of SmolLM2-1.7B, and
learning 0.70 in the former shape."""
NARROW = 0.47
"""Share of these shares that a CPU reaches in 16 bits, where products are so fast that other
operations take most of the time: a step of demo-medium took 27 s on two AMX cores."""
OVERHEAD = {"cpu": 1e-4, "cuda": 2e-6}
"""Seconds per token that do not depend on the model's size, when sampling and again when learning:
on a CPU as measured with the recipe sums on two AMX cores; on a GPU chosen so that 135 million
parameters do not take longer than a step of gsm8k took on an H200, 3.3 s."""
LEAST = {"cpu": (0.0, 0.0), "cuda": (6.5e-5, 2e-4)}
"""Least seconds of a layer in a decoding step and in a forward pass, however few tokens they have,
because starting kernels takes time: a decoding step of one token in 28 layers took 1.81 ms on an
H200; forward and backward pass, which count as three, start 128 kernels, of 5 µs as assumed."""
ATTENTION = 0.33
"""Share of the measured rate at which a GPU computes attention, counted as three forward passes per
gradient; from FlashAttention-2's published speed on an H100 (370 TFLOP/s forward, 300 backward)."""
TRANSFER = 50e9
"""Bytes per second between main memory and a GPU in one direction, as assumed for PCIe 5.0 × 16.
Both directions are used at the same time."""
ACTIVATIONS = "activations"
"""Name of the memory that depends on the lengths of responses, so that its estimate stops no
run."""
ENGINE = "the engine's weights"
"""Name of the memory that a run needs once, and not on every rank of a mesh."""
SORTER_BYTES = 1_000_000
"""Upper bound on the size of the sorting model."""


class Size(NamedTuple):
    """Counts that are read from a language model's files and the task's prompts."""

    parameters: int
    cached: int
    """Numbers that the cache of keys and values holds per token."""
    context: int
    longest_prompt: int
    """Tokens of the longest prompt that was read."""
    layers: int = 1
    """Layers of the transformer."""
    outer: int = 0
    """Parameters outside of the layers: embedding, final norm and head."""
    learned: int | None = None
    """Trainable parameters of the model or its adapter; None if all are trainable."""
    copied: int = 0
    """Bytes per weight of the engine's packed copy for matrix products; 0 if it makes none."""
    frozen: int = 0
    """Weights of the teacher and the reward model; 0 if there is none."""
    too_long: int = 0
    """Prompts that were skipped because they are too long."""
    frozen_contexts: tuple[tuple[str, int], ...] = ()
    """Settings of the teacher and the reward model, with the length of their contexts."""
    rewriting_roles: tuple[str, ...] = ()
    """Roles of an environment's messages after which the chat template writes earlier turns
    differently."""
    widths: Widths | None = None
    """Widths of the model's tensors; None on a CPU, for which no activations are estimated."""


class Room(NamedTuple):
    """The largest number of tokens that a prompt may have."""

    tokens: int
    why: str
    """The setting or the context that limits it, as text."""


class Need(NamedTuple):
    """Memory or disk space that a run needs."""

    resource: str
    """"memory" of the device, "cache" (memory that fills as responses grow), "main memory" of a
    machine whose device is a GPU, or "disk"."""
    what: str
    size: int
    """Bytes."""


def prompt_room(
    size: Size,
    engine: AnyEngine,
    rollout: RolloutConfig,
    validation: ValidationConfig,
    micro_tokens: int | None,
) -> Room:
    """Return the largest number of tokens that a prompt may have, and the setting that limits it.

    A prompt leaves room for one token of the response in the model's context, and for the longest
    response in the engine's cache, in a forward pass of ``micro_tokens`` tokens (None: no limit),
    and in the context of a frozen model that reads it. Raise a ConfigError if no prompt fits.
    """
    response = max(rollout.max_tokens, validation.max_tokens or 0)
    pages = engine.kv_mb * 2**20 // (PAGE * size.cached * BYTES[engine.precision])
    # The last token is never read.
    held = {f"engine.kv_mb = {engine.kv_mb}": (pages * PAGE + 1, response)}
    if micro_tokens is not None:
        held[f"train.micro_tokens = {micro_tokens}"] = micro_tokens, response
    for name, context in size.frozen_contexts:  # a teacher reads no held-out responses
        longest = rollout.max_tokens if name.startswith("teacher") else response
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


def needs(recipe: Recipe, size: Size) -> list[Need]:
    """Return the memory of learner and engine for a language model, item by item, and the disk
    space of a run's checkpoints. Items of 0 bytes are left out.

    On a mesh, the learner's memory is the memory of one rank. Activations of a learner on one GPU
    are included, for responses of the maximum length; those of a mesh or a CPU are not.
    """
    train, engine, count = recipe.train, recipe.engine, size.parameters
    samples = not recipe.is_supervised
    learned = count if size.learned is None else size.learned
    has_lora = train.learn.name == "lora"
    low, wide, cache = BYTES[train.precision], BYTES[engine.precision], engine.kv_mb * 2**20
    kl = recipe.objective.kl
    moves = isinstance(kl, KL) and kl.moves
    # The reference, the initial model and the previous policy. A reference that never changes is
    # the initial model.
    copies = isinstance(kl, KL) + train.log_kl * (2 - (isinstance(kl, KL) and not moves))
    if has_lora:  # the initial model is the model without its adapter, not a copy
        copies = moves + train.log_kl
    still = count if has_lora else count - learned
    has_body = recipe.critic is not None and not recipe.critic.shared
    tokens = f"{cache // (size.cached * wide):,} tokens (engine.kv_mb = {engine.kv_mb})"
    kept = recipe.checkpoint.keep + 2  # the best checkpoint, and the one being written
    saves = math.ceil(train.steps / recipe.checkpoint.every) if samples else kept
    each = _checkpoint_bytes(size, train, kl, recipe.critic)
    files = counted(min(kept, saves), "checkpoint")
    kinds = {"the teacher": recipe.teacher, "the reward model": recipe.reward_model}
    others = [kind for kind, section in kinds.items() if section is not None]
    moments = "main memory" if train.offload else "memory"
    fixed = 8 if train.offload else 16  # bytes per trainable weight in the device's memory
    found = [
        Need("memory", "fp32 masters", 4 * learned),
        Need("memory", "gradients", 4 * learned),
        Need(moments, "Adam's moments", 8 * learned),
        Need("memory", f"{train.precision} weights", low * (still + learned * (low < 4))),
        Need("memory", f"frozen copies ({copies})", copies * low * learned),
        Need("memory", "the reference's average", 4 * learned * (kl.ema is not None and low < 4)),
        # The critic shares the master weights that are not trained.
        Need("memory", "the critic", has_body * (fixed * learned + (low < 4) * low * count)),
        Need(moments, "the critic's moments", has_body * train.offload * 8 * learned),
        Need("memory", f"{' and '.join(others)} in {train.precision}", low * size.frozen),
    ]
    if recipe.on_mesh:
        found = _per_rank(recipe.mesh, train.precision, size, found)
    found += [
        Need("memory", ACTIVATIONS, _activations(recipe, size)),
        Need("memory", ENGINE, samples * (wide + size.copied) * count),
        Need("cache", tokens, samples * cache),
        Need("disk", f"{files} of {format_bytes(each)}", min(kept, saves) * each),
    ]
    return [need for need in found if need.size]


def _activations(recipe: Recipe, size: Size) -> int:
    """Return the bytes that the learner's gradient step needs beside weights, gradients and
    moments; 0 if they are not known: on a CPU, on a mesh, and for a supervised run without
    micro_tokens, because the lengths of its rows are not known."""
    train = recipe.train
    if size.widths is None or recipe.on_mesh:
        return 0
    pack = largest_pack(train, recipe.rollout, size.longest_prompt or PROMPT)
    if recipe.is_supervised:
        if train.micro_tokens is None:
            return 0
        tokens = train.micro_tokens
        pack = PackSize(tokens, actions=tokens, contexts=tokens, is_whole=False)
    learned = size.parameters if size.learned is None else size.learned
    layers = min(size.layers, getattr(train.learn, "last", None) or size.layers)
    low = BYTES[train.precision]
    return activation_bytes(size.widths, pack, layers, 4 * learned, train, low)


def shared_memory(recipe: Recipe, size: Size | None) -> int:
    """Return the largest number of bytes of shared memory that a run on Ray uses: the weights of
    all versions that are in use at once, and the learner's state while it is saved or loaded.

    ``size`` is None for the sorting model.
    """
    if size is None:
        return SORTER_BYTES
    train, loop, runtime = recipe.train, recipe.loop, recipe.runtime
    merges = train.learn.name == "lora"  # the engine receives all weights, with the adapter merged
    learned = size.parameters if merges or size.learned is None else size.learned
    if isinstance(loop, LaggedLoop):
        versions = 2 + loop.lag
    else:
        assert isinstance(runtime, RayRuntime), "the free loop needs actors"
        versions = 2 + runtime.generators
    # The ranks of a mesh save their shards separately.
    state = 0
    if recipe.mesh.ranks == 1:
        state = _checkpoint_bytes(size, train, recipe.objective.kl, recipe.critic)
    return versions * BYTES[train.precision] * learned + state


def _checkpoint_bytes(
    size: Size, train: TrainConfig, kl: Absent | KL, critic: CriticConfig | None
) -> int:
    """Return the size of a checkpoint in bytes: master weights and moments of the policy and of a
    separate critic, the previous policy and a refreshed reference in compute precision, and a
    reference that is a moving average in fp32."""
    learned = size.parameters if size.learned is None else size.learned
    has_body = critic is not None and not critic.shared
    copies = train.log_kl + (kl.refresh is not None)
    each = 12 + 12 * has_body + copies * BYTES[train.precision] + 4 * (kl.ema is not None)
    return each * learned


def _per_rank(mesh: MeshConfig, precision: str, size: Size, found: list[Need]) -> list[Need]:
    """Return the memory that one rank of a mesh needs, given the needs ``found`` of a learner
    without a mesh: a share of each, but gathered weights and gradients instead of the weights in
    compute precision.

    The gathered weights are all weights, or those of two layers and outside of the layers,
    depending on ``mesh.gather``. Gradients are always gathered for two layers and outside of the
    layers.
    """
    low = BYTES[precision]
    few = 2 * (size.parameters - size.outer) / size.layers + size.outer
    weights = size.parameters if mesh.gather == "step" else few
    gathered = low * (weights + few) / mesh.tensor
    shared = [
        need._replace(size=math.ceil(need.size / (mesh.shard * mesh.tensor)))
        for need in found
        if need.what != f"{precision} weights"
    ]
    return [*shared, Need("memory", "gathered weights and gradients", math.ceil(gathered))]


def format_bytes(count: float) -> str:
    """Format a number of bytes with a decimal unit, such as "1.5 GB"."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def estimate_seconds(recipe: Recipe, size: Size, rates: Rates) -> float:
    """Estimate the duration of a language model's run in seconds; 0 if it is supervised and its
    rows are not in a single file on this machine.

    A forward pass takes two operations per parameter and token, a backward pass four, or two if
    only an adapter is trained, because the frozen weights have no gradient. Recomputation takes one
    more forward pass. The length of responses is not known beforehand, so the estimate is right
    within a factor of about two.
    """
    train, validation, objective = recipe.train, recipe.validation, recipe.objective
    to_sample, _ = reached(rates)
    sampled_per_second = rates.decode_gflops * 1e9 * to_sample / (2 * size.parameters)
    overhead = OVERHEAD[rates.device]
    if isinstance(recipe.task, SupervisedTask):
        file = Path(recipe.task.train or "")
        written = file.stat().st_size / WRITTEN if file.is_file() else 0
        return recipe.task.epochs * written * gradient_seconds(size, 0, train, rates)
    prompt, response = size.longest_prompt or PROMPT, FILLED * recipe.rollout.max_tokens
    rollout = recipe.rollout.batch * response + recipe.rollout.prompts * prompt
    extra = extra_tokens(objective.advantage, recipe.rollout, round(response))
    rows = [getattr(task, "validation_prompts", None) for task in recipe.tasks.values()]
    held_out_response = FILLED * (validation.max_tokens or recipe.rollout.max_tokens)
    held_out = sum(n or HELD_OUT for n in rows) * (prompt + validation.samples * held_out_response)
    held_out *= recipe.is_validated
    evaluations = 2 + (train.steps - 1) // validation.every
    upper = min(1.0, (getattr(train.learn, "last", None) or size.layers) / size.layers)
    gradient = gradient_passes(train)
    bodies = 1 if recipe.critic is None or recipe.critic.shared else 2
    scoring = _scoring_passes(objective, train, recipe.rollout.batch) + (recipe.critic is not None)
    passes = 1 - upper + upper * (scoring + gradient * bodies * train.epochs)
    passes += size.frozen / size.parameters
    sampled = train.steps * (rollout + extra) + evaluations * held_out
    learned = train.steps * rollout
    per_step, per_pass = (size.layers * least for least in LEAST[rates.device])
    waves = _waves(recipe.rollout.batch, recipe.engine)
    decoding = train.steps * waves * recipe.rollout.max_tokens
    parts = recipe.train_batches * math.ceil(
        rollout / recipe.train_batches / (train.micro_tokens or rollout)
    )
    forward = forward_seconds(size, prompt + response / 2, rates)
    seconds = max(sampled / sampled_per_second, decoding * per_step)
    seconds += passes * max(learned * forward, train.steps * parts * per_pass)
    seconds += recipe.gradient_steps * bodies * offload_seconds(size, train)
    return seconds + (sampled + learned) * overhead


def _waves(responses: int, engine: AnyEngine) -> int:
    """Return how many times the engine is filled to sample this number of responses."""
    return math.ceil(responses / getattr(engine, "max_running", responses))


def forward_seconds(size: Size, context: float, rates: Rates) -> float:
    """Return the seconds of a forward pass over many tokens, per token: two operations per
    parameter and, on a GPU, 4 · context · (width of all query heads) per layer for attention, where
    ``context`` is the mean number of earlier tokens that a token reads. On a GPU, an embedding that
    is not also the head counts no operations."""
    _, to_learn = reached(rates)
    rate, widths = rates.learn_gflops * 1e9, size.widths
    if widths is None:
        return 2 * size.parameters / (rate * to_learn)
    looked_up = 0 if widths.is_tied else widths.vocabulary * widths.model
    attention = 4 * context * widths.queries * size.layers
    return 2 * (size.parameters - looked_up) / (rate * to_learn) + attention / (rate * ATTENTION)


def reached(rates: Rates) -> tuple[float, float]:
    """Return the shares of the measured rates that sampling and learning reach."""
    to_sample, to_learn = REACHED[rates.device]
    narrow = NARROW if rates.device == "cpu" and BYTES[rates.precision] < 4 else 1.0
    return narrow * to_sample, narrow * to_learn


def gradient_seconds(size: Size, context: float, train: TrainConfig, rates: Rates) -> float:
    """Return the seconds of forward and backward passes, per token; ``context`` as in
    `forward_seconds`."""
    passes = gradient_passes(train) * forward_seconds(size, context, rates)
    return passes + OVERHEAD[rates.device]


def gradient_passes(train: TrainConfig) -> int:
    """Return the duration of forward and backward passes, in forward passes."""
    return (2 if train.learn.name == "lora" else 3) + train.recompute


def offload_seconds(size: Size, train: TrainConfig) -> float:
    """Return the seconds in which a gradient step moves AdamW's moments, 8 bytes per trainable
    weight, to the GPU and back at the same time; 0 without ``train.offload``."""
    learned = size.parameters if size.learned is None else size.learned
    return train.offload * 8 * learned / TRANSFER


def extra_tokens(advantage: Advantage, rollout: RolloutConfig, length: int) -> int:
    """Return the number of tokens sampled per rollout in addition to its responses: for greedy
    baselines, or for continuations that value steps. It is 0 for other advantages.

    Each response is assumed to have ``length`` tokens.
    """
    if isinstance(advantage, Remax):
        return rollout.prompts * length
    return rollout.batch * advantage.continued(length)


def _scoring_passes(objective: ObjectiveConfig, train: TrainConfig, batch: int) -> float:
    """Return the number of forward passes over a rollout of ``batch`` responses before its first
    gradient step, by the policy and its frozen copies. A pass over a part counts as a fraction."""
    logged = 2 * train.log_kl * min(batch, train.log_kl_responses or batch) / batch
    has_later_steps = train.batch < batch or train.epochs > 1
    is_read = has_later_steps or objective.reads_proximal_first
    again = objective.proximal == "recompute" and is_read
    return isinstance(objective.kl, KL) + logged + again
