"""The rules that join two or more sections of a recipe.

``find_contradictions`` returns a message for each rule that a recipe breaks, and
``unread_settings`` lists the settings that have no effect because of another setting. A rule within
one section is a validator of that section.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from burnish.console.text import counted
from burnish.errors import ConfigError
from burnish.recipe.base import Section, nearest
from burnish.recipe.critic import CriticConfig
from burnish.recipe.engine import AnyEngine, SglangConfig
from burnish.recipe.frozen import RewardModelConfig, TeacherConfig
from burnish.recipe.length import LengthPiece
from burnish.recipe.models import AnyModel
from burnish.recipe.objective.advantages import Advantage, Gae, Remax, Teacher, Vine
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.recipe.recipe import Recipe, RolloutConfig, TrainConfig, ValidationConfig
from burnish.recipe.runtime import (
    AnyLoop,
    AnyRuntime,
    BufferConfig,
    FreeLoop,
    LocalRuntime,
    RayRuntime,
    TorchrunRuntime,
)
from burnish.recipe.selection import SelectionConfig
from burnish.recipe.tasks import AgentsTask, AnyTask, EnvironmentTask, SortTask, VerifiersTask

ROWS = ["task.train", "task.validation", "task.columns"]
"""Settings of tasks with rows of data that a task with its own tasks does not read."""
LANGUAGE = [
    *("device", "engine", "train.learn", "train.recompute", "train.offload"),
    "validation.max_tokens",
    *("rollout.max_tokens", "rollout.min_tokens", "rollout.stop"),
    *("rollout.top_p", "rollout.top_k", "rollout.min_p", "rollout.repetition_penalty"),
    "rollout.truncated",
    *("rollout.overlong", "rollout.think", "length"),
]
"""Settings that only a language model reads."""
SAMPLED = [
    *("rollout", "selection", "engine", "objective", "critic", "length", "log.rollouts"),
    "log.samples",
    *("loop", "buffer", "runtime", "teacher", "reward_model"),
    *("train.steps", "train.epochs", "train.log_kl", "train.mismatch_mean", "train.mismatch_max"),
    *("validation.samples", "validation.temperature", "validation.max_tokens"),
]
"""Settings that a supervised run does not read, because it samples nothing."""
DECAY = ["train.decay_steps", "train.final_share"]
"""Settings of a learning rate that falls."""
SUPERVISED_METRICS = {
    "pairs": ("validation/loss",),
    "preferences": ("validation/loss", "validation/accuracy", "validation/margin"),
}
"""Metrics of the validations of supervised tasks, by the task's name."""
SAMPLED_METRICS = (
    *("reward", "accuracy", "accuracy_low", "accuracy_high", "length", "length_correct"),
    *("ended", "truncated", "aborted", "grades_scored", "grades_unparsed", "grades_timeout"),
    *("grades_error", "responses"),
)
"""Metrics of the validations of every run that samples, after "validation/"."""
OPEN_METRICS = ("validation/reward/", "validation/part_", "validation/judge/")
"""Beginnings of metrics that depend on the task and on the reward."""
FILLING = ["selection.max_asked", "selection.on_bound"]
"""Settings that are read only if further prompts replace dead groups."""
HISTORY = ["selection.leave_at", "selection.target", "selection.floor"]
"""Settings that are read only if prompts are sampled more than once, so that they have a solve
rate."""
SERVED = ["engine.kv_mb", "engine.max_running", "engine.sleep"]
"""Settings of `burnish engine serve`, which a client of the engine does not read."""


def find_contradictions(recipe: Recipe) -> list[str]:
    """Return a message for each rule about several sections that the recipe breaks; an empty list
    if the recipe is valid."""
    problems = []
    for check in rule_checks(recipe):
        try:
            check()
        except ConfigError as error:
            problems.append(str(error))
    return list(dict.fromkeys(problems))


def rule_checks(recipe: Recipe) -> Iterator[Callable[[], None]]:
    """Yield the checks that apply to the recipe; each raises a ConfigError if its rule is broken.

    If the model does not suit the task, only rules that do not depend on the model are checked.
    """
    advantage, engine = recipe.objective.advantage, recipe.engine
    task, model, device = recipe.task, recipe.model, recipe.device
    rollout, selection, length = recipe.rollout, recipe.selection, recipe.length
    loop, runtime, train = recipe.loop, recipe.runtime, recipe.train
    yield partial(check_task_rules, task, model, train)
    yield partial(check_target_rules, recipe.validation, task, recipe.target_metric)
    if not recipe.is_supervised:
        if not isinstance(task, EnvironmentTask | AgentsTask):
            yield partial(check_sampled_metric, recipe.validation)
        yield partial(check_patience, recipe.validation, train.steps)
        yield partial(check_buffer_rules, loop, recipe.buffer)
    if isinstance(task, SortTask) == model.is_language:
        return
    if isinstance(task, AgentsTask) and isinstance(advantage, Vine | Remax):
        # The own rules of these advantages have other remedies.
        yield partial(check_agent_rules, task.name, advantage.name, rollout.group_size)
        return
    if isinstance(task, EnvironmentTask):
        yield partial(check_step_rules, advantage)
    if isinstance(task, EnvironmentTask | AgentsTask):
        yield partial(check_turn_rules, task, rollout)
    if recipe.on_mesh:
        yield partial(check_mesh_rules, runtime, model, task, train, device)
    ranks = recipe.mesh.data_ranks if recipe.on_mesh else 1
    if recipe.is_supervised:
        yield partial(check_batch_rules, None, 1, train.batch, ranks)
        return
    yield partial(check_batch_rules, rollout.batch, rollout.group_size, train.batch, ranks)
    group_size, tasks = rollout.group_size, recipe.tasks
    # With wrong sizes, those that the remedies suggest count, so that all remedies fit together.
    fitting = fitting_batches(rollout.batch, group_size, train.batch, ranks)
    train_batch = fitting[0].get("train.batch", train.batch) if fitting else train.batch
    largest = max(sizes.get("rollout.batch", rollout.batch) for sizes in fitting or [{}])
    yield partial(check_group_rules, group_size, train_batch, advantage)
    yield partial(check_turn_credit, advantage, task, group_size)
    yield partial(check_selection_rules, selection, recipe.objective, length, group_size, tasks)
    yield partial(check_advantage_rules, advantage, model, rollout, selection, length, loop)
    yield partial(check_kl_rules, recipe.objective.kl.name, recipe.objective.kl.where)
    if not isinstance(advantage, Remax | Vine):  # their own rule replaces the free loop
        yield partial(check_loop_rules, loop, runtime)
    groups = largest // group_size
    if not isinstance(advantage, Remax | Vine):
        yield partial(check_window_rules, loop, groups)
    yield partial(check_buffer_size, loop, recipe.buffer, groups)
    if recipe.is_stale:
        yield partial(check_stale_rules, recipe.objective)
    if advantage.reads_critic:
        yield partial(check_critic_rules, recipe.critic, model, train.steps)
    validation = recipe.validation
    yield partial(check_length_rules, length, rollout, validation, advantage, train.batch)
    yield partial(check_reward_rules, advantage, model, tasks, recipe.teacher, recipe.reward_model)
    is_stale = recipe.is_stale
    yield partial(check_engine_rules, engine, rollout, model, loop, runtime, is_stale=is_stale)


def check_task_rules(task: Section, model: AnyModel, train: TrainConfig) -> None:
    """Raise a ConfigError unless the sorting task has the sorting model, every other task has a
    language model, and the two responses of a preference pair fit into one micro-batch."""
    name = getattr(task, "name", "")
    if isinstance(task, SortTask) == model.is_language:
        raise ConfigError(
            f"task.name = '{name}' does not go with model.name = '{model.name}': the sorting task "
            "needs 'sorter', the others a language model; use model.name = "
            f"'{'smollm2-135m' if name != 'sort' else 'sorter'}'"
        )
    if name == "preferences" and train.micro_sequences == 1:
        raise ConfigError(
            "train.micro_sequences = 1 would separate the two responses of a pair, which are "
            "compared in one forward pass; use train.micro_sequences = 2 or more"
        )


def check_agent_rules(task: str, advantage: str, group_size: int) -> None:
    """Raise a ConfigError: an advantage that samples further responses, to prompts or from inside
    of responses, does not work with agents, which begin their conversations themselves."""
    raise ConfigError(
        f"objective.advantage = '{advantage}' samples further responses, and the agents of "
        f"task.name = '{task}' begin their conversations themselves; use objective.advantage = "
        f"'{_replacement(group_size)}'"
    )


def _replacement(group_size: int) -> str:
    """Return an advantage that works with every task and this group size."""
    return "group_mean" if group_size > 1 else "raw"


def check_step_rules(advantage: Advantage) -> None:
    """Raise a ConfigError if VinePPO would divide the turns of episodes into steps."""
    if isinstance(advantage, Vine) and not advantage.reads_turns:
        raise ConfigError(
            f"objective.advantage.steps = '{advantage.steps}' divides single responses, and "
            "task.name = 'environment' continues episodes from turns; use "
            "objective.advantage.steps = 'turns'"
        )


def check_turn_rules(task: EnvironmentTask | AgentsTask, rollout: RolloutConfig) -> None:
    """Raise a ConfigError unless the minimum length and the think budget of a turn are below its
    maximum length."""
    most = task.turn_tokens
    if most is None:
        return
    if rollout.min_tokens > most:
        raise ConfigError(
            f"rollout.min_tokens = {rollout.min_tokens} is above task.turn_tokens = {most}, the "
            f"maximum length of a turn; use rollout.min_tokens = {most} or less"
        )
    if rollout.think is not None and rollout.think.tokens >= most:
        remedy = f"use rollout.think.tokens = {most - 1} or less, or raise task.turn_tokens"
        raise ConfigError(
            f"rollout.think.tokens = {rollout.think.tokens} leaves no room for an answer within "
            f"task.turn_tokens = {most}; {remedy if most > 1 else 'raise task.turn_tokens'}"
        )


def check_turn_credit(advantage: Advantage, task: AnyTask, group_size: int) -> None:
    """Raise a ConfigError if an advantage of turns is combined with a task without turns."""
    if not advantage.reads_turns or isinstance(task, EnvironmentTask):
        return
    setting = f"objective.advantage = '{advantage.name}'"
    remedy = f"objective.advantage = '{_replacement(group_size)}'"
    if isinstance(advantage, Gae):
        over = "objective.advantage.over"
        setting, remedy = f"{over} = 'turns'", f"{over} = 'tokens'"
    if isinstance(advantage, Vine):
        steps = "objective.advantage.steps"
        setting, remedy = f"{steps} = 'turns'", f"{steps} = 'lines'"
    raise ConfigError(
        f"{setting} needs the turns of an environment, which task.name = '{task.name}' does not "
        f"have; use {remedy}"
    )


def check_target_rules(validation: ValidationConfig, task: Section, target: str | None) -> None:
    """Raise a ConfigError if a run that ends early has no metric to end by, or if a supervised run
    does not have the metric."""
    if validation.patience is not None and target is None:
        raise ConfigError(
            f"validation.patience = {validation.patience} needs a metric, and a run without a "
            "reward has none by default; set validation.metric, such as 'validation/length'"
        )
    known = SUPERVISED_METRICS.get(getattr(task, "name", ""))
    if known is not None and target is not None and target not in known:
        raise ConfigError(
            f"validation.metric = '{target}' is not a metric of a supervised run; use "
            f"{' or '.join(map(repr, known))}"
        )


def check_sampled_metric(validation: ValidationConfig) -> None:
    """Raise a ConfigError if no validation of a run that samples has ``validation.metric``.

    Metrics of a mixture's tasks, of a reward's parts and of judges are known only in the run.
    """
    ks = {2**i for i in range(1, validation.samples.bit_length())} | {validation.samples}
    found = [f"{name}_at_{k}" for k in sorted(ks - {1}) for name in ("pass", "majority")]
    known = [f"validation/{name}" for name in (*SAMPLED_METRICS, *found)]
    metric = validation.metric
    if metric is None or metric in known or metric.startswith(OPEN_METRICS):
        return
    raise ConfigError(
        f"validation.metric = '{metric}' is not a metric of a run's validations"
        f"{nearest(metric, known)}; use one of {', '.join(known)}, or, if the run has it, "
        f"{', '.join(f'{name}…' for name in OPEN_METRICS)}"
    )


def check_patience(validation: ValidationConfig, steps: int) -> None:
    """Raise a ConfigError if a run of ``steps`` steps is over before ``validation.patience``
    validations after the first one could end it."""
    patience, every = validation.patience, validation.every
    if patience is None or patience * every < steps:
        return
    remedies = [f"train.steps = {patience * every + 1} or more"]
    if most := (steps - 1) // patience:
        remedies.insert(0, f"validation.every = {most} or less")
    if most := (steps - 1) // every:
        remedies.insert(0, f"validation.patience = {most}{' or less' * (most > 1)}")
    raise ConfigError(
        f"validation.patience = {patience} has no effect: with validation.every = {every}, a run "
        f"of {counted(steps, 'step')} is over before {counted(patience, 'validation')} without an "
        f"improvement could end it; use {', or '.join(remedies)}, or remove validation.patience"
    )


def check_mesh_rules(
    runtime: AnyRuntime, model: AnyModel, task: AnyTask, train: TrainConfig, device: str
) -> None:
    """Raise a ConfigError unless the mesh trains all weights of a language model, which is not a
    reward model, and each rank can have its own device and process group."""
    no_mesh = "remove [mesh]" if runtime.name == "ray" else "remove [mesh] and [runtime]"
    if isinstance(runtime, RayRuntime) and runtime.transport in ("gloo", "nccl"):
        raise ConfigError(
            f"runtime.transport = '{runtime.transport}' can't be combined with a mesh, whose ranks "
            "form their own process group; use runtime.transport = 'auto'"
        )
    if not model.is_language:
        raise ConfigError(f"a mesh needs a language model, got the sorting model; {no_mesh}")
    if train.learn.name != "all":
        raise ConfigError(
            f"a mesh trains all weights, got train.learn = '{train.learn.name}'; use train.learn = "
            f"'all', or {no_mesh}"
        )
    if train.offload:
        raise ConfigError(
            "train.offload = true can't be combined with a mesh; use mesh.offload = true, or more "
            "shards"
        )
    if task.name == "preferences":
        raise ConfigError(f"a mesh can't train a reward model; {no_mesh}")
    if device.startswith("cuda:"):
        raise ConfigError(
            f"device = '{device}' would put all ranks on one GPU; use device = 'cuda', with which "
            "every rank of a mesh takes a different GPU"
        )


def check_batch_rules(rollout_batch: int | None, group: int, batch: int, ranks: int) -> None:
    """Raise a ConfigError unless a rollout consists of whole train batches, and a train batch of
    whole groups and of equal shares for the ranks of a mesh.

    ``rollout_batch`` and ``batch`` are rollout.batch and train.batch, and ``group`` is the group
    size, all in responses. ``rollout_batch`` is None for supervised runs. The error suggests sizes
    that fit together.
    """
    if rollout_batch is not None and rollout_batch % batch:
        rule = f"rollout.batch = {rollout_batch} must be a multiple of train.batch = {batch}"
    elif batch % group:
        rule = f"train.batch = {batch} must be a multiple of rollout.group_size = {group}"
    elif batch % ranks:
        rule = f"train.batch = {batch} must be a multiple of mesh.replicate × mesh.shard = {ranks}"
    else:
        return
    remedies = [
        " and ".join(f"{name} = {size}" for name, size in sizes.items())
        for sizes in fitting_batches(rollout_batch, group, batch, ranks)
    ]
    raise ConfigError(f"{rule}; use {', or '.join(remedies)}")


def fitting_batches(
    rollout_batch: int | None, group: int, batch: int, ranks: int
) -> list[dict[str, int]]:
    """Return the remedies for batch sizes that do not fit together, each as new sizes by setting;
    an empty list if they fit. Arguments as in `check_batch_rules`."""
    unit = math.lcm(group, ranks)
    if not (batch % unit or (rollout_batch or batch) % batch):
        return []
    enough = -(-batch // unit) * unit
    if rollout_batch is None:
        return [{"train.batch": enough}]
    fits = [n for n in range(unit, rollout_batch + 1, unit) if rollout_batch % n == 0]
    found = [{"train.batch": min(fits, key=lambda n: abs(n - batch))}] if fits else []
    if batch == enough or not fits:
        changed = {} if batch == enough else {"train.batch": enough}
        found.append(changed | {"rollout.batch": -(-rollout_batch // enough) * enough})
    return found


def check_group_rules(group: int, train_batch: int, advantage: Advantage) -> None:
    """Raise a ConfigError unless a group has enough responses for the advantage."""
    least = advantage.smallest_group
    if group >= least:
        return
    k = advantage.settings.get("k")
    remedies = [f"rollout.group_size = {n}" for n in _group_sizes(train_batch, least)]
    if k is not None and group >= advantage.group:
        remedies.insert(0, f"objective.advantage.k = {k - least + group}")
    elif k is None or not remedies:
        remedies.append("objective.advantage = 'raw'")
    raise ConfigError(
        f"rollout.group_size must be at least {least} for objective.advantage = "
        f"'{advantage.name}', got {group}; use {', or '.join(remedies)}"
    )


def _group_sizes(train_batch: int, least: int) -> list[int]:
    """Return the smallest group size of at least ``least`` that divides a train batch, in a list;
    [] if there is none."""
    return [n for n in range(least, train_batch + 1) if train_batch % n == 0][:1]


def check_advantage_rules(
    advantage: Advantage,
    model: AnyModel,
    rollout: RolloutConfig,
    selection: SelectionConfig,
    length: LengthPiece,
    loop: AnyLoop,
) -> None:
    """Raise a ConfigError if other settings contradict the advantage "remax" or "vine".

    Greedy baselines and continuations are sampled for whole rounds of responses, with the same
    weights as the responses.
    """
    is_free, dead = isinstance(loop, FreeLoop), selection.dead_groups
    if isinstance(advantage, Remax) and (is_free or dead == "active"):
        free = f"loop.name = 'lagged', got '{loop.name}'" if is_free else ""
        active = "selection.dead_groups = 'dynamic', got 'active'" if dead == "active" else ""
        raise ConfigError(
            "objective.advantage = 'remax' samples greedy responses for whole rounds; use "
            + ", and ".join(filter(None, (free, active)))
        )
    if not isinstance(advantage, Vine):
        return
    broken = {
        "needs responses that can be continued, and the sorting model outputs all numbers at once; "
        "use another advantage": not model.is_language,
        "needs loop.name = 'lagged', got 'free': continuations are sampled with the weights of "
        "their response": is_free,
        "continues whole rounds; use selection.dead_groups = 'dynamic'": dead == "active",
        f"values steps by the task's reward only; use [length] name = 'none', got "
        f"'{length.name}'": length.name != "none",
        "counts all responses of a group; use rollout.overlong = 'mask', got 'drop'": (
            rollout.overlong == "drop"
        ),
    }
    for rule, is_broken in broken.items():
        if is_broken:
            raise ConfigError(f"objective.advantage = 'vine' {rule}")


def check_kl_rules(name: str, where: str | None) -> None:
    """Raise a ConfigError if a KL in the loss has an estimator whose gradient has mean 0."""
    if (name, where) == ("k1", "loss"):
        raise ConfigError(
            "objective.kl = 'k1' has a gradient of mean 0 in the loss, and is meant for the "
            "reward; use objective.kl.name = 'k3'"
        )


def check_loop_rules(loop: AnyLoop, runtime: AnyRuntime) -> None:
    """Raise a ConfigError if the free loop has no Ray actors."""
    if isinstance(loop, FreeLoop) and not isinstance(runtime, RayRuntime):
        raise ConfigError("loop.name = 'free' needs actors; use runtime.name = 'ray'")


def check_window_rules(loop: AnyLoop, groups: int) -> None:
    """Raise a ConfigError if the free loop's window is smaller than the ``groups`` groups of a
    rollout."""
    if isinstance(loop, FreeLoop) and loop.window is not None and loop.window < groups:
        raise ConfigError(
            f"loop.window = {loop.window} is smaller than the {groups} groups of a rollout; "
            f"use loop.window = {groups} or more"
        )


def check_buffer_rules(loop: AnyLoop, buffer: BufferConfig | None) -> None:
    """Raise a ConfigError if the free loop has a buffer."""
    if isinstance(loop, FreeLoop) and buffer is not None:
        raise ConfigError(
            "[buffer] works only with loop.name = 'lagged', got 'free'; remove [buffer]"
        )


def check_buffer_size(loop: AnyLoop, buffer: BufferConfig | None, groups: int) -> None:
    """Raise a ConfigError if a buffer is smaller than the ``groups`` groups of a rollout."""
    if buffer is not None and buffer.capacity < groups and loop.name == "lagged":
        raise ConfigError(
            f"buffer.capacity = {buffer.capacity} is smaller than the {groups} groups of a batch; "
            f"use buffer.capacity = {groups} or more"
        )


def check_stale_rules(objective: ObjectiveConfig) -> None:
    """Raise a ConfigError unless the objective, which learns from tokens of older versions, has a
    ratio to the policy that sampled them."""
    by_behavior = objective.loss.compares and objective.proximal == "behavior"
    has_ratio = by_behavior or any(piece.weighs for piece in objective.corrections)
    if not has_ratio:
        ratio = "objective.proximal = 'behavior'"
        if not objective.loss.compares:
            ratio = f"objective.loss = 'clip' and {ratio}"
        raise ConfigError(
            "the loop or buffer produces tokens of older versions, which need a ratio to the "
            "policy that sampled them; use objective.proximal = 'recompute' and "
            f"objective.importance = 'truncate', or {ratio}"
        )


def check_critic_rules(critic: CriticConfig | None, model: AnyModel, steps: int) -> None:
    """Raise a ConfigError unless a recipe whose advantage reads a critic has a critic, a language
    model, and rollouts after the critic's warm-up."""
    if not model.is_language:
        raise ConfigError(
            "objective.advantage.values = 'critic' needs a language model, and the sorting model "
            "has no critic; use another advantage, or a function from Python as the values"
        )
    if critic is None:
        raise ConfigError(
            "objective.advantage.values = 'critic' needs a section [critic] with at least one "
            "setting; set critic.learning_rate = 1e-5"
        )
    if critic.warmup_rollouts >= steps:
        raise ConfigError(
            f"critic.warmup_rollouts = {critic.warmup_rollouts} leaves none of the {steps} "
            f"rollouts of train.steps to the policy; use critic.warmup_rollouts = {steps - 1} or "
            "less"
        )


def check_length_rules(
    length: LengthPiece,
    rollout: RolloutConfig,
    validation: ValidationConfig,
    advantage: Advantage,
    train_batch: int,
) -> None:
    """Raise a ConfigError unless thinking budgets and length penalties fit into the length limit,
    and the advantage reads the penalty and supports it."""
    think, most, name = rollout.think, rollout.max_tokens, length.name
    if think is not None:
        lowest = min(most, validation.max_tokens or most)
        if think.tokens >= lowest:
            remedy = f"use rollout.think.tokens = {lowest - 1} or less, or raise max_tokens"
            raise ConfigError(
                f"rollout.think.tokens = {think.tokens} leaves no room for an answer within "
                f"max_tokens = {lowest}; {remedy if lowest > 1 else 'raise max_tokens'}"
            )
    for setting in ("buffer", "tokens"):
        value = getattr(length, setting, 0)
        if value > most:
            raise ConfigError(
                f"length.{setting} = {value} is above rollout.max_tokens = {most}, which no "
                f"response exceeds; use length.{setting} = {most} or less"
            )
    is_read = advantage.reads_rewards or "length" in advantage.graded
    if name != "none" and not is_read:
        remedy = "use length.name = 'none'"
        if advantage.name == "gdpo":
            remedy = f"{remedy}, or objective.advantage.parts.length = 1"
        raise ConfigError(
            f"length.name = '{name}' has no effect with objective.advantage = "
            f"'{advantage.name}', which does not read it; {remedy}"
        )
    if length.makes_negative and not advantage.takes_negative:
        raise ConfigError(
            f"length.name = '{name}' makes rewards negative, and objective.advantage = "
            f"'{advantage.name}' needs rewards of at least 0; use length.name = 'none', 'at_most' "
            "or 'among_correct', or another advantage"
        )
    if "length" in advantage.graded and name == "none":
        raise ConfigError(
            "objective.advantage.parts.length reads a length penalty, and length.name = 'none' "
            "adds none; choose one, or remove the part"
        )
    if name == "solve_rate" and rollout.group_size < 2:
        sizes = [f"rollout.group_size = {n}" for n in _group_sizes(train_batch, 2)]
        sizes.append("length.name = 'none'")
        raise ConfigError(
            "length.name = 'solve_rate' reads the share of correct answers in a group, and "
            f"rollout.group_size = {rollout.group_size} gives no meaningful share; use "
            f"{', or '.join(sizes)}"
        )


def check_reward_rules(
    advantage: Advantage,
    model: AnyModel,
    tasks: Mapping[str, Any],
    teacher: TeacherConfig | None,
    reward_model: RewardModelConfig | None,
) -> None:
    """Raise a ConfigError if the policy has nothing to learn from (a task's reward, a reward model
    or a teacher), or if its teacher or reward model can't be used."""
    is_taught = isinstance(advantage, Teacher)
    if is_taught and teacher is None:
        raise ConfigError("objective.advantage = 'teacher' needs a teacher; set teacher.model")
    if (is_taught or reward_model) and not model.is_language:
        raise ConfigError(
            "the sorting model supports neither a teacher nor a reward model; use a language model"
        )
    if not is_taught and reward_model is None and _unrewarded(tasks):
        raise ConfigError(
            "task.reward = 'none' leaves nothing to learn from; set reward_model.name, or "
            "teacher.model together with objective.advantage = 'teacher'"
        )


def check_selection_rules(
    selection: SelectionConfig,
    objective: ObjectiveConfig,
    length: LengthPiece,
    group_size: int,
    tasks: Mapping[str, Any],
) -> None:
    """Raise a ConfigError if dead groups can't be recognised, or if a setting reads which responses
    are correct and a task has no reward."""
    dead, by, advantage = selection.dead_groups, selection.dead_by, objective.advantage
    if dead != "keep" and by == "correct" and group_size < 2:
        raise ConfigError(
            "selection.dead_by = 'correct' needs rollout.group_size of at least 2, got 1: none or "
            "all responses of such a group are correct; use selection.dead_groups = 'keep'"
        )
    if dead != "keep" and by == "advantage" and not objective.judges_groups:
        cause = f"objective.advantage = '{advantage.name}'"
        if advantage.judges_groups:
            cause = "objective.kl.where = 'reward'"
        remedy = "selection.dead_groups = 'keep'"
        if group_size > 1 and not _unrewarded(tasks):
            remedy = f"{remedy}, or selection.dead_by = 'correct'"
        raise ConfigError(
            f"selection.dead_groups = '{dead}' has no effect with {cause}, which can learn from "
            f"a group whose rewards are all equal; use {remedy}"
        )
    readers = {
        "selection.dead_by = 'correct'": by == "correct",
        "selection.leave_at": selection.leave_at is not None,
        "selection.target": selection.target is not None,
        f"length.name = '{length.name}'": length.reads_correct,
    }
    reader = next((name for name, reads in readers.items() if reads), None)
    if reader is not None and (path := _unrewarded(tasks)):
        raise ConfigError(
            f"{reader} reads which responses are correct, and {path}.reward = 'none' does not "
            "provide it; remove the setting, or give the task a reward"
        )


def _unrewarded(tasks: Mapping[str, Any]) -> str | None:
    """Return the section of the first task without a reward; None if all tasks have one."""
    return next((path for path, t in tasks.items() if getattr(t, "reward", None) == "none"), None)


def check_engine_rules(
    engine: AnyEngine,
    rollout: RolloutConfig,
    model: AnyModel,
    loop: AnyLoop,
    runtime: AnyRuntime,
    *,
    is_stale: bool,
) -> None:
    """Raise a ConfigError unless the engine supports the sampling settings, the model, the loop and
    the runtime."""
    is_sglang, on_ray = isinstance(engine, SglangConfig), isinstance(runtime, RayRuntime)
    if model.is_language and rollout.reshaping and not rollout.truncated:
        raise ConfigError(
            f"rollout has {' and '.join(rollout.reshaping)}, so tokens are drawn with other "
            "probabilities than the learner computes; remove this, or set rollout.truncated = true "
            "if this is intended"
        )
    if is_sglang and on_ray:
        lagged = "" if loop.name == "lagged" else " and loop.name = 'lagged'"
        raise ConfigError(
            "engine.name = 'sglang' serves one sampler, and runtime.name = 'ray' may have several; "
            f"use runtime.name = 'local'{lagged}"
        )
    if is_sglang and (rollout.min_tokens or rollout.think or rollout.repetition_penalty != 1):
        raise ConfigError(
            "engine.name = 'sglang' returns no log-probabilities before the mask of "
            "rollout.min_tokens and before rollout.repetition_penalty, and none for the phrase of "
            "rollout.think; remove these settings, or use the native engine"
        )
    if engine.name in ("hf", "sglang") and model.fp32_head:
        raise ConfigError(
            f"model.fp32_head needs the native engine; remove it or engine.name = '{engine.name}'"
        )
    if engine.sleep and (is_stale or on_ray):
        raise ConfigError(
            "engine.sleep = true needs a loop that samples and learns in turns; remove it, or use "
            "loop.lag = 0 without a buffer, and runtime.name = 'local' or 'torchrun'"
        )
    if engine.repeats:
        return
    used = {
        "rollout.min_tokens": rollout.min_tokens,
        "rollout.top_p": rollout.top_p < 1,
        "rollout.top_k": rollout.top_k,
        "rollout.min_p": rollout.min_p,
        "rollout.repetition_penalty": rollout.repetition_penalty != 1,
        "rollout.think": rollout.think,
        "model.fp32_head": model.fp32_head,
    }
    unsupported = next((setting for setting, value in used.items() if value), None)
    if unsupported is not None:
        raise ConfigError(
            f"{unsupported} needs the native engine, and engine.name = '{engine.name}' does not "
            "support it; remove one of the two"
        )
    if on_ray and loop.name == "lagged":
        raise ConfigError(
            f"engine.name = '{engine.name}' can't reproduce a lost rollout, as loop.name = "
            "'lagged' requires on Ray; use loop.name = 'free', or runtime.name = 'local'"
        )


def unread_settings(recipe: Recipe) -> dict[str, list[str]]:
    """Return the settings and sections that have no effect, in lists by the name of the setting
    that makes them ineffective. A section in a list stands for all its settings."""
    objective, train, chosen = recipe.objective, recipe.train, recipe.selection
    advantage, loss, critic = objective.advantage, objective.loss, recipe.critic
    is_gae, is_taught = isinstance(advantage, Gae), isinstance(advantage, Teacher)
    is_compared = loss.compares or objective.reads_proximal_first
    is_unscaled = not advantage.is_scaled and objective.kl.where != "reward"
    on_torchrun = isinstance(recipe.runtime, TorchrunRuntime)
    engine, is_unvalidated = recipe.engine, not recipe.is_validated
    is_served = engine.url is not None and not isinstance(engine, SglangConfig)
    endless = [
        f"{path}.train_prompts"
        for path, task in recipe.tasks.items()
        if getattr(task, "train_prompts", 1) is None
    ]
    task = recipe.task if isinstance(recipe.task, EnvironmentTask) else None
    tools = None if task is None else task.tools
    by_turn = task is not None and task.turn_temperatures is not None
    episodic = EnvironmentTask | AgentsTask
    rules: list[tuple[str, bool, list[str]]] = [
        ("task.turn_temperatures", by_turn, ["rollout.temperature"]),
        ("task.tools", tools == [], ["task.tool_format", "task.tool_seconds"]),
        ("task.tools", tools is not None and "python" not in tools, ["task.sandbox"]),
        ("log.trackers", not recipe.log.follows, ["log.project", "log.group", "log.samples"]),
        ("validation.metric", recipe.validation.metric is None, ["validation.goal"]),
        ("validation.patience", recipe.validation.patience is None, ["validation.min_delta"]),
        ("train.schedule", train.schedule == "constant", DECAY),
        ("train.log_kl", not train.log_kl, ["train.log_kl_responses"]),
        ("objective.advantage.values", is_gae and not advantage.reads_critic, ["critic"]),
        ("critic.shared", critic is not None and not critic.shared, ["critic.coefficient"]),
        ("selection.dead_groups", not chosen.fills, FILLING),
        ("selection.target", chosen.target is None, ["selection.floor"]),
        *((cause, True, HISTORY) for cause in endless),
        *((f"{path}.validation_rows", is_unvalidated, ["validation"]) for path in recipe.tasks),
        (
            "task.name",
            recipe.is_supervised,
            [name for name in SAMPLED if name != "runtime" or not on_torchrun],
        ),
        ("engine.name", not engine.is_apart, ["engine.deadline"]),
        ("engine.url", is_served, SERVED),
        ("runtime.name", isinstance(recipe.runtime, LocalRuntime), ["mesh"]),
        ("model.name", not recipe.model.is_language, LANGUAGE),
        ("task.name", not isinstance(recipe.task, episodic), ["rollout.history"]),
        ("task.name", isinstance(recipe.task, AgentsTask), ["task.system"]),
        ("task.name", isinstance(recipe.task, VerifiersTask), ROWS),
        ("objective.loss.name", "ratio" not in loss.reads, ["objective.ratio"]),
        ("objective.loss.name", not is_compared, ["objective.proximal"]),
        ("objective.advantage.name", is_unscaled, ["task.scales"]),
        ("objective.advantage.name", not is_taught, ["teacher"]),
        ("objective.advantage.name", not is_gae, ["critic"]),
    ]
    found: dict[str, list[str]] = {}
    for cause, holds, settings in rules:
        if holds:
            found.setdefault(cause, []).extend(settings)
    return found
