"""The text of a run's plan: task, formulas, batches, memory, disk and time, before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.console.text import counted, duration
from burnish.recipe.costs import (
    ENGINE,
    Need,
    Room,
    Size,
    estimate_seconds,
    extra_tokens,
    format_bytes,
    needs,
    prompt_room,
)
from burnish.recipe.critic import CriticConfig
from burnish.recipe.engine import AnyEngine, SglangConfig
from burnish.recipe.frozen import RewardModelConfig, TeacherConfig
from burnish.recipe.length import AnyPenalty
from burnish.recipe.mesh import MeshConfig
from burnish.recipe.models import AnyModel
from burnish.recipe.objective.advantages import STEP, Advantage, Remax, Vine
from burnish.recipe.objective.kl import KL, Importance
from burnish.recipe.objective.objective import RATIOS, ObjectiveConfig
from burnish.recipe.recipe import Recipe, RolloutConfig, TrainConfig, ValidationConfig
from burnish.recipe.runtime import AnyLoop, AnyRuntime, BufferConfig, FreeLoop, RayRuntime
from burnish.recipe.selection import SelectionConfig
from burnish.recipe.tasks import (
    AgentsTask,
    AnyTask,
    EnvironmentTask,
    JudgedTask,
    PreferencesTask,
    SupervisedTask,
)
from burnish.recipe.trainable import MODULES, AllLearn, AnyLearning, LayersLearn

if TYPE_CHECKING:
    from burnish.types import Rates

Lines = list[tuple[str, str]]
"""Lines of a section: pairs of a name and a description."""
PlanSection = tuple[str, Lines]
"""A title and its lines."""
PROXIMALS = {
    "behavior": "the sampler, by its own log-probabilities",
    "recompute": "the learner before the rollout's first gradient step",
}
WEIGHT_TRANSFERS = {
    "disk": "through files in /dev/shm, on the machine of the run",
    "tensor": "from the learner's own memory, on the machine of the run",
    "distributed": "broadcast by a process group, to any machine",
}
"""Descriptions of the ways in which SGLang receives weights, by setting."""


def make_plan(
    recipe: Recipe, out: Path, size: Size | None = None, rates: Rates | None = None
) -> list[PlanSection]:
    """Describe what a recipe will do, before it runs; return the titled sections of the plan.

    ``out`` is the run's directory. ``size`` is None for the sorting model, and if the model's files
    are not on this machine. ``rates`` is None if the machine was not measured; the plan then
    contains no time.
    """
    rollout, train, versions = recipe.rollout, recipe.train, recipe.gradient_steps_per_rollout
    objective = objective_lines(recipe.objective) + _length_lines(recipe.length, rollout)
    if recipe.is_supervised:
        objective = [("loss", "−Σ log π(answer token) / number of answer tokens, over a batch")]
    if isinstance(recipe.task, PreferencesTask):
        objective = [("loss", "−mean over pairs of log σ(r(chosen) − r(rejected))")]
    resources: Lines = []
    if size is not None:
        resources = _weight_lines(size, train, recipe.engine.precision, recipe.model)
        resources += _need_lines(needs(recipe, size), on_mesh=recipe.on_mesh)
    elif recipe.model.is_language:
        resources = [("memory", "known once the model is here")]
    if rates is not None:
        resources.append(("time", format_estimate(recipe, size, rates)))
    lag = _lag_lines(recipe.loop, recipe.buffer, rollout.prompts, versions)
    sections = [
        ("task", _task_lines(recipe, size)),
        ("objective", objective),
        ("critic", _critic_lines(recipe.critic, train)),
        ("batches", _batch_lines(recipe)),
        ("selection", _selection_lines(recipe.selection, rollout, recipe.loop)),
        (
            "validation",
            _validation_lines(recipe.validation, recipe.target_metric, recipe.is_validated),
        ),
        ("engine", _engine_lines(recipe.engine)),
        ("strategy", lag + _actor_lines(recipe.runtime, recipe.mesh.ranks)),
        ("mesh", _mesh_lines(recipe.mesh, train.batch) if recipe.on_mesh else []),
        ("resources", [*resources, ("written to", str(out))]),
    ]
    return [(title, lines) for title, lines in sections if lines]


def format_estimate(recipe: Recipe, size: Size | None, rates: Rates) -> str:
    """Format the estimated time, such as "about 9 minutes", or say that it is not known.

    ``size`` is None for the sorting model, and if the model's files are not on this machine.
    """
    if not recipe.model.is_language:
        return "about a minute"
    seconds = 0.0 if size is None else estimate_seconds(recipe, size, rates)
    return (
        f"about {duration(seconds)}" if seconds else "not known before its model and rows are here"
    )


def _task_lines(recipe: Recipe, size: Size | None) -> Lines:
    rollout, room = recipe.rollout, None
    lines = _model_lines(recipe.task, recipe.model, recipe.teacher, recipe.reward_model, size)
    if recipe.stop:
        lines.append(("stops at", ", ".join(map(repr, recipe.stop))))
    if size is not None:
        if size.too_long:
            micro_tokens = recipe.train.micro_tokens
            room = prompt_room(size, recipe.engine, rollout, recipe.validation, micro_tokens)
        lines += _prompt_lines(size, room)
        lines += _history_lines(size.rewriting_roles, rollout.history)
    if isinstance(recipe.task, EnvironmentTask):
        lines += _environment_lines(recipe.task, rollout)
    if isinstance(recipe.task, AgentsTask):
        lines += _agent_lines(recipe.task, rollout)
    weights = getattr(recipe.task, "weights", {"": 1.0})
    return lines + _judge_lines(recipe.parts, weights, recipe.objective.advantage, rollout)


def _model_lines(
    task: AnyTask,
    model: AnyModel,
    teacher: TeacherConfig | None,
    reward_model: RewardModelConfig | None,
    size: Size | None,
) -> Lines:
    apart = {"name", "rubric", "judge", "evolve", "rewards"}
    given = task.model_dump(exclude_unset=True, exclude=apart)
    settings = [f"{key} = {value!r}" for key, value in given.items()]
    known = "" if size is None else f": {size.parameters:,} parameters"
    lines = [("task", ", ".join([task.name, *settings])), ("model", f"{model.name}{known}")]
    if rewards := getattr(task, "rewards", None):
        terms = [f"{one.weight:g} × {one.reward or one.name}" for one in rewards]
        lines.append(("reward", f"r = {' + '.join(terms)}"))
    if teacher is not None:
        lines.append(("teacher", f"{teacher.model}, frozen"))
    if reward_model is not None:
        learned, weight = reward_model.name, reward_model.task
        own = f" + {weight:g} × the task's reward" if weight else ""
        lines.append(("reward", f"r = {learned}(prompt, response){own}"))
    return lines


def _environment_lines(task: EnvironmentTask, rollout: RolloutConfig) -> Lines:
    """Return lines on multi-turn episodes: their limits, their reward and the tokens in the
    loss."""
    own = "" if task.turn_tokens is None else f", each of at most {task.turn_tokens:,} tokens"
    cut = task.observation_tokens
    observed = "" if cut is None else f"; each of its messages is cut at {cut:,} tokens"
    episode = f"at most {counted(task.turns, 'turn')}{own}; {rollout.max_tokens:,} tokens in all"
    without = "a truncated episode earns 0, and another one is an error"
    graded = without if task.reward is None else f"{task.reward} grades the last turn"
    limits = f"{task.wall_seconds:g} s, {task.cpu_seconds:g} s of CPU time, {task.memory_mb:,} MB"
    most = min(task.live, rollout.batch)
    pace = "all take a turn, then all environments step"
    if task.pace == "free":
        pace = "each at its own pace: a resumed or repeated run differs in the last bits, or more"
    return [
        ("episode", f"{episode}, with the environment's messages{observed}"),
        ("learned", "the policy's tokens; the environment's have no loss and count in no mean"),
        ("reward", f"r_i = Σ over the turns of the environment's rewards; without any, {graded}"),
        ("environments", f"{most:,} processes at a time; a call may take {limits}"),
        ("order", pace),
    ]


def _agent_lines(task: AgentsTask, rollout: RolloutConfig) -> Lines:
    """Return lines on the episodes of agents: their limits, their reward and their order."""
    own = "" if task.turn_tokens is None else f" of at most {task.turn_tokens:,} tokens"
    episode = f"at most {counted(task.turns, 'answered request')}{own}"
    limits = f"{task.wall_seconds:g} s of its own, {task.cpu_seconds:g} s of CPU time"
    limits = f"{limits}, {task.memory_mb:,} MB"
    order = (
        "requests wait until every episode has one; parallel requests of one episode arrive in any "
        "order, so a run that has them does not repeat bit for bit"
    )
    if task.pace == "free":
        order = "requests are answered as they arrive: a repeated run differs"
    return [
        ("episode", f"{episode}; {rollout.max_tokens:,} tokens of responses in all"),
        ("learned", "every answer, in the context in which it was sampled"),
        ("reward", "r_i = the agent's result; an agent that fails is an error, never 0"),
        ("agents", f"{min(task.live, rollout.batch):,} processes at a time; one may take {limits}"),
        ("order", order),
    ]


def _prompt_lines(size: Size, room: Room | None) -> Lines:
    """Return lines on the longest prompt, and on the prompts that are skipped as too long.

    ``room`` is None if no prompt is too long.
    """
    lines = list[tuple[str, str]]()
    if size.longest_prompt:
        text = f"{size.longest_prompt:,} tokens (the model's context: {size.context:,})"
        lines.append(("longest prompt", text))
    if room is not None:
        text = f"have more than {room.tokens:,} tokens ({room.why}); they are skipped"
        lines.append(("too long", f"{counted(size.too_long, 'prompt')} {text}"))
    return lines


def _history_lines(roles: Sequence[str], history: str) -> Lines:
    """Return a line on a chat template that rewrites earlier turns after messages of ``roles``."""
    if not roles:
        return []
    rewrites = f"the template rewrites earlier turns after {' and '.join(roles)} messages"
    chosen = "they stay as they were sampled (rollout.history = 'append')"
    if history == "template":
        chosen = "each such turn begins a new sequence (rollout.history = 'template')"
    return [("history", f"{rewrites}; {chosen}")]


def _judge_lines(
    tasks: Mapping[str, Any],
    weights: Mapping[str, float],
    advantage: Advantage,
    rollout: RolloutConfig,
) -> Lines:
    """Return lines on the rubric, the judge and the expected number of calls of each judged
    task."""
    lines = list[tuple[str, str]]()
    for name, part in tasks.items():
        if not isinstance(part, JudgedTask | EnvironmentTask) or part.judge is None:
            continue
        judge, evolve, of = part.judge, part.evolve, f" of {name}" if name else ""
        criteria = [f"{weight:+g} {text!r}" for text, weight in part.rubric or ()]
        lines.append((f"rubric{of}", ", ".join(criteria) or "each row's own"))
        responses = rollout.batch
        responses += rollout.prompts if isinstance(advantage, Remax) else 0  # greedy responses
        calls = responses * weights[name] / sum(weights.values())
        further = "continuation and held-out" if isinstance(advantage, Vine) else "held-out"
        text = f"{calls:.0f} calls per step and one per {further} response, or up to {judge.tries} "
        lines.append((f"judge{of}", f"{judge.model} at {judge.url}: {text}times as many"))
        if evolve is not None:
            text = f"at most {evolve.most} more criteria, kept while std_g > {evolve.min_std:g}"
            lines.append((f"evolving{of}", f"{text}; a call every {counted(evolve.every, 'step')}"))
    return lines


def objective_lines(objective: ObjectiveConfig) -> Lines:
    """Return the formulas of an objective, one line per piece."""
    kl = objective.kl
    term = "v_t L_t" if objective.corrections else "L_t"
    if isinstance(kl, KL) and kl.where == "loss":
        term += f" + {kl.coefficient:g} {kl.name}_t"
    if objective.has_entropy_term:
        term += f" − {'η' if objective.entropy else f'{objective.entropy_coefficient:g}'} H_t"
    lines = [
        ("loss", f"Σ w_(i,t) ({term})" if " " in term else f"Σ w_(i,t) {term}"),
        ("objective", objective.loss.formula()),
        ("advantage", objective.advantage.formula()),
        ("denominator", objective.reduction.formula()),
    ]
    if "ratio" in objective.loss.reads:
        lines.append(("ratio", RATIOS[objective.ratio]))
    elif objective.loss.compares:
        lines.append(("ratio", RATIOS["token"]))
    if objective.loss.compares or "proximal" in objective.advantage.reads:
        lines.append(("proximal", f"π_prox: {PROXIMALS[objective.proximal]}"))
    if isinstance(kl, KL):
        over = ("r_t", "") if objective.advantage.over_time else ("r_i", "Σ_t ")
        penalty = f",  {over[0]} ← {over[0]} − {kl.coefficient:g} {over[1]}{kl.name}_t"
        lines.append(("KL", kl.formula() + penalty * (kl.where == "reward")))
        reference = f"refreshed every {kl.refresh} steps" if kl.refresh else "the initial model"
        if kl.ema is not None:
            change = f"θ_ref ← {kl.ema:g} θ_ref + {1 - kl.ema:g} θ after each gradient step"
            reference = f"a moving average of the policy, {change}"
        lines.append(("reference", f"π_ref: {reference}"))
    if objective.entropy is not None:
        first = f",  first c = {objective.entropy_coefficient:g}"
        lines.append(("entropy", objective.entropy.formula()))
        lines.append(("coefficient", objective.entropy.change() + first))
    return lines + _importance_lines(objective.corrections)


def _importance_lines(pieces: Sequence[Importance]) -> Lines:
    formulas = [piece.formula() for piece in pieces]
    if len(formulas) < 2:
        return [("importance", formula) for formula in formulas]
    names = [f"v{n}_t" for n in range(1, len(formulas) + 1)]
    own = [
        (f"importance {n}", formula.replace("v_t", name, 1))
        for n, (formula, name) in enumerate(zip(formulas, names, strict=True), 1)
    ]
    return [("importance", f"v_t = {' '.join(names)}"), *own]


def _validation_lines(
    validation: ValidationConfig, metric: str | None, is_validated: bool
) -> Lines:
    """Return a line on a run without validation, or on when the run ends early; no lines if it is
    validated and never ends early."""
    if not is_validated:
        return [("held out", "nothing, so `burnish export` takes the last checkpoint")]
    if validation.patience is None:
        return []
    times = counted(validation.patience, "validation")
    by = f" by more than {validation.min_delta:g}" if validation.min_delta else ""
    text = f"when {metric} has not improved{by} in {times}, one every {validation.every} steps"
    return [("ends early", text)]


def _length_lines(length: AnyPenalty, rollout: RolloutConfig) -> Lines:
    lines, think = list[tuple[str, str]](), rollout.think
    if length.name != "none":
        lines.append(("length", f"r_i ← r_i − {length.formula()}"))
    if rollout.overlong != "keep":
        more = " and their group's statistics" * (rollout.overlong == "drop")
        cut = f"responses cut at {rollout.max_tokens} tokens"
        lines.append(("overlong", f"{cut} are excluded from the loss{more}"))
    if think is not None:
        text = f"after {think.tokens} tokens without {think.end!r}, {think.phrase!r} is inserted"
        lines.append(("thinking", text))
    return lines


def _critic_lines(critic: CriticConfig | None, train: TrainConfig) -> Lines:
    if critic is None:
        return []
    own = "a separate body, initialised as a copy of the policy's"
    body = "the policy's body" if critic.shared else own
    rate = f"{critic.learning_rate:g}" + " for the head" * critic.shared
    lines = [
        ("values", f"V_t = w · h + b on {body}; truncated responses are not bootstrapped"),
        ("value loss", f"½ max((V − R)², (clip(V, V_old ± {critic.clip:g}) − R)²),  R = A + V_old"),
        ("learning", f"{_format_adamw(train)}, learning rate {rate}, the policy's schedule"),
    ]
    if critic.shared:
        lines.append(("coefficient", f"loss + {critic.coefficient:g} · value loss"))
    if critic.warmup_rollouts:
        lines.append(("warm-up", f"the critic learns alone for {critic.warmup_rollouts} rollouts"))
    return lines


def _batch_lines(recipe: Recipe) -> Lines:
    rollout, train = recipe.rollout, recipe.train
    rate = f"{_format_adamw(train)}, learning rate {train.learning_rate:g}, "
    if train.warmup_steps:
        rate += f"reached at gradient step {train.warmup_steps:,}, then "
    rate += train.schedule
    lowest = f"{train.final_share:.3g} of it" if train.final_share else "0"
    if isinstance(recipe.task, SupervisedTask):
        steps = f"{recipe.task.epochs:g} × the rows, {train.batch} at a time"
        rate += f" to {lowest}" * bool(train.final_share)
        return [("gradient steps", f"{steps} ({rate})")]
    if recipe.decay_steps is not None:
        rate += f" to {lowest} after gradient step {recipe.steps_to_lowest:,}"
    if recipe.idle_steps:
        rate += f"; the last {counted(recipe.idle_steps, 'gradient step')} change nothing"
    prompts = counted(rollout.prompts, "prompt")
    heat = f"temperature {rollout.temperature:g}"
    if isinstance(recipe.task, EnvironmentTask) and recipe.task.turn_temperatures:
        heat = f"temperatures {', '.join(f'{x:g}' for x in recipe.task.turn_temperatures)} by turn"
    samples = f"{counted(rollout.group_size, 'sample')}, {heat}"
    batches = f"{recipe.train_batches} train batch{'es' * (recipe.train_batches > 1)}"
    steps = f"{batches} of {train.batch} responses × {counted(train.epochs, 'epoch')}"
    if recipe.gradient_steps_per_rollout == 1 and recipe.objective.loss.compares:
        steps += "" if recipe.is_stale else "; the policy has not moved then: ρ = 1, no bound acts"
    every = f"{counted(train.steps, 'step')}: {train.steps * rollout.batch:,} responses sampled"
    gradient_steps = counted(recipe.gradient_steps, "gradient step")
    lines = [
        ("rollout", f"{rollout.batch} responses = {prompts} × {samples}"),
        *_extra_sample_lines(recipe.objective.advantage, rollout),
        *_reshaping_lines(rollout.reshaping),
        ("gradient steps", f"{recipe.gradient_steps_per_rollout} per rollout = {steps}"),
        ("in all", f"{every}, {gradient_steps} ({rate})"),
    ]
    limits = {"on average": train.mismatch_mean, "on a token": train.mismatch_max}
    if texts := [f"{limit:g} {how}" for how, limit in limits.items() if limit is not None]:
        differ = f"stops the run if sampler and learner differ by more than {', '.join(texts)}"
        lines.append(("alarm", differ))
    if not isinstance(train.learn, AllLearn):
        lines.append(("learning", _format_learning(train.learn)))
    return lines


def _reshaping_lines(reshaping: Sequence[str]) -> Lines:
    text = "in the draws only; log-probabilities are the model's at the sampling temperature"
    return [("sampling", f"{', '.join(reshaping)}, {text}")] if reshaping else []


def _format_adamw(train: TrainConfig) -> str:
    """Name the optimizer, with weight decay and ε if they differ from the defaults."""
    decay = f" with weight decay {train.weight_decay:g}" * bool(train.weight_decay)
    eps = f"{' and' if decay else ' with'} ε {train.eps:g}"
    return f"AdamW{decay}{eps * (train.eps != TrainConfig().eps)}"


def _extra_sample_lines(advantage: Advantage, rollout: RolloutConfig) -> Lines:
    """Return lines on the samples that only serve to value other samples: greedy baselines and
    continuations; no lines if the advantage needs none."""
    if isinstance(advantage, Remax):
        text = "more per rollout, one per prompt, which serve as baselines only"
        return [("greedy responses", f"{rollout.prompts} {text}")]
    if not isinstance(advantage, Vine):
        return []
    most = rollout.max_tokens
    tokens = extra_tokens(advantage, rollout, most)
    text = f"at most {tokens:,} more tokens are sampled per rollout"
    known = "" if isinstance(advantage.steps, int) else f" and a step {STEP} or more"
    return [("continuations", f"{text}, if a response has up to {most} tokens{known}")]


def _format_learning(learn: AnyLearning) -> str:
    if isinstance(learn, AllLearn):
        return "all weights"
    if isinstance(learn, LayersLearn):
        return f"last {learn.last} layers"
    where = "all layers" if learn.last is None else f"the last {learn.last} layers"
    which = "all linear layers" if set(learn.modules) == {*MODULES} else ", ".join(learn.modules)
    return f"LoRA of rank {learn.rank}, alpha {learn.alpha:g}, on {which} of {where}"


def _selection_lines(chosen: SelectionConfig, rollout: RolloutConfig, loop: AnyLoop) -> Lines:
    lines, groups = list[tuple[str, str]](), rollout.prompts
    most = groups * chosen.max_asked
    if chosen.dead_groups != "keep":
        why = {
            "advantage": "all its advantages are 0",
            "correct": "none or all of its responses are correct, before length penalties",
        }
        lines.append(("a group is dead if", why[chosen.dead_by]))
    if chosen.dead_groups == "drop":
        lines.append(("dead groups", "are removed from the batch, which gets smaller"))
    elif chosen.fills:
        in_rounds = chosen.dead_groups == "dynamic" and not isinstance(loop, FreeLoop)
        when = "in further rounds" if in_rounds else "whenever a group is dead"
        text = f"further prompts are sampled, {when}, until {groups} groups are not dead"
        end = (
            "the run stops"
            if chosen.on_bound == "stop"
            else "the step learns from the groups it has"
        )
        bound = f"{most:,} groups ({most * rollout.group_size:,} responses) per step"
        lines += [
            ("dead groups", text),
            ("sampled at most", f"{bound}; if they are too few, {end}"),
        ]
    if chosen.leave_at is not None:
        text = f"are retired once {chosen.leave_at:.0%} of a group's responses are correct"
        lines.append(("solved prompts", text))
    if chosen.target is not None:
        far = f"|s − {chosen.target:g}| / {max(chosen.target, 1 - chosen.target):g}"
        chance = f"max({chosen.floor:g}, 1 − {far})"
        text = f"a prompt with solve rate s is sampled with probability {chance}"
        lines.append(("curriculum", text))
    return lines


def _engine_lines(engine: AnyEngine) -> Lines:
    """Return lines on an engine in another process; no lines for an engine in this process."""
    if not engine.is_apart:
        return []
    where = f"a separate process of {engine.python or 'this Python'}"
    if engine.url is not None:
        where = f"served at {engine.url}"
    lines = [("engine", f"{engine.name}, {where}")]
    if isinstance(engine, SglangConfig):
        lines.append(("weights", WEIGHT_TRANSFERS[engine.weights]))
    if engine.sleep:
        lines.append(("sleep", "caches, and weights with a copy in main memory, leave the GPU"))
    if not engine.repeats:
        text = "made by the engine: a resumed or repeated run draws different samples"
        lines.append(("draws", text))
    return lines


def _lag_lines(loop: AnyLoop, buffer: BufferConfig | None, groups: int, versions: int) -> Lines:
    """Return lines on the lag of samples behind the learner and on the replay buffer; no lines if
    there is neither.

    A rollout has ``groups`` groups; its gradient steps produce ``versions`` versions of the
    weights.
    """
    lines = list[tuple[str, str]]()
    if isinstance(loop, FreeLoop):
        text = f"at most {loop.max_lag} versions, of which a rollout adds {versions}"
        late = "generators wait" if loop.on_stale == "wait" else "groups are dropped"
        lines.append(("lag", f"{text}; beyond that, {late}"))
        lines.append(("window", f"the learner takes {groups} of {loop.window or groups} groups"))
        lines.append(("new weights", f"loop.on_update = {loop.on_update!r}"))
    elif loop.lag:
        text = f"rollout n is sampled with the weights after step n − {loop.lag + 1}"
        lines.append(("lag", f"{loop.lag} × {versions} versions: {text}"))
    if buffer is not None:
        text = f"{buffer.capacity} groups, {buffer.order}, each for {buffer.max_uses} steps at most"
        lines.append(("buffer", text))
    return lines


def _actor_lines(runtime: AnyRuntime, ranks: int) -> Lines:
    """Return lines on the actors of Ray; no lines for another runtime."""
    if not isinstance(runtime, RayRuntime):
        return []
    where = "started on this machine"
    return [
        ("Ray", where if runtime.address is None else f"at {runtime.address}"),
        ("generators", f"{runtime.generators} × ({runtime.generator})"),
        ("learner", f"{ranks} × ({runtime.learner})"),
        ("scorer", "1, with separate grader processes"),
    ]


def _mesh_lines(mesh: MeshConfig, batch: int) -> Lines:
    lines = [("ranks", f"{mesh.ranks} = {mesh}")]
    share = batch / mesh.data_ranks
    lines.append(("packs", f"about {share:g} of {batch} responses per rank and step"))
    kept = {"step": "once, and kept for the step", "layer": "whenever their layer runs"}
    lines.append(("weights", f"gathered {kept[mesh.gather]}"))
    if mesh.offload:
        lines.append(("offload", "the learner's weights and moments leave the GPU to sample"))
    return lines


def _weight_lines(size: Size, train: TrainConfig, sampled: str, model: AnyModel) -> Lines:
    """Return lines on precisions and trainable parameters; ``sampled`` is the engine's
    precision."""
    head = ", logits in fp32" * model.fp32_head
    lines = [("precision", f"{train.precision} to learn, {sampled} to sample{head}")]
    if size.learned is not None:
        lines.append(("learns", f"{size.learned:,} parameters of {size.parameters:,}"))
    return lines


def _need_lines(found: Sequence[Need], *, on_mesh: bool) -> Lines:
    """Return one line each for memory, cache and disk."""
    lines = list[tuple[str, str]]()
    for resource in dict.fromkeys(need.resource for need in found):
        parts = [need for need in found if need.resource == resource]
        lines.append((resource, f"{_format_sum(parts)}: {', '.join(map(_format_need, parts))}"))
    if on_mesh:
        own = [n for n in found if n.resource == "memory" and n.what != ENGINE]
        lines.append(
            ("per rank", f"{_format_sum(own)} of it on each rank; the rest is the engine's")
        )
    return lines


def _format_need(need: Need) -> str:
    return f"{need.what} {format_bytes(need.size)}"


def _format_sum(found: list[Need]) -> str:
    return format_bytes(sum(need.size for need in found))
