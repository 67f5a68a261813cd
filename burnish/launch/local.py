"""Builds the components of a run in this process: task, engine, learner and loop.

Each component is built from the resolved recipe alone, so that actors can use the same functions to
build one component each. Importing this module loads torch, so ``api`` imports it only after all
checks that do not need torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

from burnish.console.progress import tell
from burnish.engine.protocol import Engine, require
from burnish.engine.sorter import decode_numbers
from burnish.environments.pool import EnvironmentPool
from burnish.environments.protocol import ANSWERING
from burnish.errors import BurnishError
from burnish.launch import engines
from burnish.launch.memory import check_offload
from burnish.launch.models import DTYPES, ModelSource, open_model, open_policy, with_reward_head
from burnish.launch.resolve import Resolved
from burnish.launch.settings import (
    make_evaluator,
    rollout_settings,
    run_settings,
    step_settings,
)
from burnish.learner.learner import LocalLearner
from burnish.learner.optimizer import Optimizer
from burnish.learner.preferences import PreferenceProgram
from burnish.learner.program import compile
from burnish.learner.protocol import Learner, Step
from burnish.learner.ranks import Ranks
from burnish.loops import lagged, supervised, sync
from burnish.loops.evaluate import Decode
from burnish.loops.recorder import RunComponents
from burnish.model.critic import Critic
from burnish.model.reward import load_reward_model
from burnish.model.sorter import Sorter
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import Transformer
from burnish.recipe.load import with_steps
from burnish.recipe.runtime import BufferConfig, LaggedLoop
from burnish.recipe.tasks import (
    AgentsTask,
    EnvironmentTask,
    MixtureTask,
    PairsTask,
    PreferencesTask,
    SortTask,
)
from burnish.rollout.agent_answers import AgentAnswers
from burnish.rollout.agent_server import AgentServer
from burnish.rollout.agents import AgentEngine, AgentLimits
from burnish.rollout.buffer import Buffer
from burnish.rollout.episodes import EpisodeEngine, EpisodeLimits
from burnish.rollout.length import check_phrase
from burnish.rollout.packing import cut, pack
from burnish.rollout.reward_model import LearnedReward
from burnish.rollout.step_values import make_step_sampler
from burnish.runs.metrics import Metrics
from burnish.tasks import (
    agent,
    environment,
    gym,
    judged,
    keywords,
    math,
    mixture,
    pairs,
    sorting,
    taskset,
    text,
)
from burnish.tasks.solve_rates import History
from burnish.tasks.stream import PromptStream, fits
from burnish.tasks.task import Task
from burnish.types import Group, Measured

MakeLearner = Callable[[Resolved], Learner]
PROBED = 1000
"""Maximum number of training prompts among which `look_at_prompts` searches for the longest."""
TASKS: dict[str, Any] = {
    "files": text.make_files,
    "keywords": keywords.make_keywords,
    "math": math.make_math,
    "gym": gym.make_gym,
    "judged": judged.make_judged,
    "environment": environment.make_environment,
    "agent": agent.make_agents,
    "verifiers": taskset.make_taskset,
}
"""Functions that build a language task, by the task's name in a recipe."""


def build_local(resolved: Resolved, make: MakeLearner | None = None) -> RunComponents:
    """Build the components of a run in this process: task, engine, learner and training loop; the
    caller calls their ``close``. ``make`` builds the learner; None for `build_learner`. Raise an
    EngineError if the engine lacks a capability that the recipe needs."""
    recipe, make = resolved.recipe, make or build_learner
    if recipe.is_supervised:
        return _build_supervised(resolved, make)
    task, engine, decode = build_sampler(resolved)
    # A resumed run must repeat the same random draws.
    require(engine.capabilities, repeats=recipe.engine.repeats)
    learner = make(resolved)
    bound = engines.tolerance(recipe.engine.precision, recipe.train.precision)
    shut = engines.attach(engine, learner.probe, bound)
    stream, buffer = build_stream(resolved, task), build_buffer(recipe.buffer, recipe.seed)

    def drift(groups: list[Group]) -> Metrics:
        return learner.held_out_drift(pack(groups).to(learner.device))

    def close() -> None:
        shut()
        task.close()

    settings, training = rollout_settings(recipe), step_settings(recipe)
    total = recipe.train.steps
    steps = make_step_sampler(recipe.objective.advantage, settings.group_size, lambda: decode)
    rollouts = lagged.LocalRollouts(settings, task, engine, steps)
    train: Callable[..., Iterator[Step]]
    if recipe.is_stale:
        assert isinstance(recipe.loop, LaggedLoop)
        runner = lagged.LocalStepRunner(training, learner, engine)
        parts: dict[str, Any] = {"rollouts": rollouts, "learner": runner, "buffer": buffer}
        train = partial(lagged.train_lagged, settings, total, lag=recipe.loop.lag, **parts)
    else:
        rest = engines.rest(engine, sleeps=recipe.engine.sleep)
        parts = {"task": task, "engine": engine, "learner": learner, "steps": steps, "rest": rest}
        train = partial(sync.train_sync, settings, training, total, **parts)
    return RunComponents(
        settings=run_settings(recipe),
        learner=learner,
        prompts=stream,
        train=partial(train, prompts=stream),
        validate=partial(make_evaluator(recipe, task, engine, decode).validate, drift),
        listen=rollouts.listen if recipe.is_stale else None,
        in_flight=rollouts.in_flight,
        restore=rollouts.restore,
        buffer=buffer,
        publish=lambda: engine.load(learner.weights()),
        decode=decode,
        close=close,
        waited=_waiting_time(task),
    )


def build_buffer(config: BufferConfig | None, seed: int) -> Buffer | None:
    """Build a recipe's replay buffer; return None if ``config`` is None, because the recipe has no
    buffer."""
    return None if config is None else Buffer(**config.model_dump(), seed=seed)


def build_stream(resolved: Resolved, task: Task) -> PromptStream:
    """Build the stream of training prompts, which skips prompts that are too long. It records solve
    rates if the recipe selects prompts by them, and evolves the rubrics of judged tasks if the
    recipe says so."""
    recipe, history = resolved.recipe, None
    if recipe.selection.remembers:
        drops = recipe.rollout.overlong == "drop"
        history = History(recipe.selection, recipe.seed, drops_truncated=drops)
    return PromptStream(task, resolved.room, history, judged.evolving(recipe.parts))


def _build_supervised(resolved: Resolved, make: MakeLearner) -> RunComponents:
    """Build the components of a supervised run, which has rows and a learner, but no engine."""
    tell("load", "reading the rows")
    answers = read_pairs(resolved)
    recipe = with_steps(resolved.recipe, answers.steps(resolved.recipe.train.batch))
    learner = make(replace(resolved, recipe=recipe))
    return RunComponents(
        settings=run_settings(recipe),
        learner=learner,
        train=partial(
            supervised.train_supervised,
            recipe.train.steps,
            recipe.train.batch,
            pairs=answers,
            learner=learner,
        ),
        validate=partial(supervised.validate_supervised, answers, learner),
    )


def read_pairs(resolved: Resolved) -> pairs.Pairs:
    """Read, check and encode the training and held-out rows of a supervised recipe. Raise an error
    if a row lacks a field or is too long."""
    recipe, source = resolved.recipe, resolved.source
    assert isinstance(recipe.task, PairsTask | PreferencesTask)
    given: dict[str, Any] = {"tokenizer": source.tokenizer, "seed": recipe.seed}
    together = recipe.train.micro_tokens
    return pairs.make_pairs(recipe.task, **given, context=source.shape.context, together=together)


def build_learner(resolved: Resolved) -> Learner:
    """Build the learner of a run in this process: it trains a reward model on preferences if that
    is the task, otherwise a policy."""
    recipe = resolved.recipe
    check_offload(recipe.train, resolved.device)
    if not isinstance(recipe.task, PreferencesTask):
        return build_policy_learner(resolved)
    policy = open_policy(resolved.source, recipe.train, recipe.seed)
    model = with_reward_head(policy, resolved.source.tokenizer).to(resolved.device)
    tell("load", "preparing the learner")
    train = recipe.train.model_copy(update={"decay_steps": recipe.decay_steps})
    return LocalLearner(model, PreferenceProgram(), train)


def build_policy_learner(resolved: Resolved, ranks: Ranks | None = None) -> LocalLearner[Measured]:
    """Load the policy and, if the recipe has one, the teacher; create the critic; return a learner
    that trains the policy with the recipe's objective, or on written answers in a supervised run.

    ``ranks`` are the processes that learn together; None if this is the only one. They shard the
    models and move them to their devices.
    """
    recipe = resolved.recipe
    policy: Transformer | Sorter
    if isinstance(recipe.task, SortTask):
        policy = engines.make_sorter(recipe.task, recipe.model, recipe.seed)
    else:
        policy = open_policy(resolved.source, recipe.train, recipe.seed)
        policy = policy if ranks else policy.to(resolved.device)
    tell("load", "preparing the learner")
    train = recipe.train.model_copy(update={"decay_steps": recipe.decay_steps})
    if recipe.is_supervised:
        return LocalLearner(policy, supervised.PROGRAM, train, ranks=ranks)
    program, critic = compile(recipe.objective, recipe.critic), None
    if recipe.critic is not None:
        assert isinstance(policy, Transformer), "the schema rejects a critic of the sorting model"
        own = train.model_copy(update={"learning_rate": recipe.critic.learning_rate})
        critic = Optimizer(Critic(policy, shared=recipe.critic.shared), own, ranks)
    source, teacher = resolved.frozen.get("teacher.model"), None
    if source is not None:
        teacher = _build_teacher(source, train.precision, resolved.device, ranks)
    return LocalLearner(policy, program, train, teacher, critic, ranks)


def _build_teacher(
    source: ModelSource, precision: str, device: str, ranks: Ranks | None
) -> Transformer:
    """Load the frozen teacher."""
    model = open_model(source, DTYPES[precision])
    model.requires_grad_(False)
    return ranks.place(model, "fp32") if ranks else model.to(device)


def build_sampler(resolved: Resolved) -> tuple[Task, Engine, Decode]:
    """Build the engine and the task of a recipe; return the task, the engine, and a function that
    converts token ids to one text per token. The caller closes the task and the engine."""
    engine = engines.build_engine(resolved)
    tell("load", "reading the prompts")
    task, decode = build_task(resolved)
    episodes = _inner_task(task)
    if isinstance(episodes, environment.EpisodeTask):
        engine = with_environments(
            resolved.source,
            engine,
            episodes.config,
            episodes.environments,
            history=resolved.recipe.rollout.history,
            total=resolved.recipe.train.micro_tokens,
        )
    if isinstance(episodes, agent.AgentEpisodes):
        engine = with_agents(
            resolved.source,
            engine,
            episodes.config,
            episodes.agents,
            history=resolved.recipe.rollout.history,
            total=resolved.recipe.train.micro_tokens,
        )
        episodes.closing.callback(engine.server.close)
    return task, engine, decode


def with_agents(
    source: ModelSource,
    engine: Engine,
    config: AgentsTask,
    agents: EnvironmentPool,
    *,
    history: str,
    total: int | None,
) -> AgentEngine:
    """Return an engine that samples episodes of ``agents``, whose processes have started. The
    caller closes its server. ``history`` and ``total`` are as in `with_environments`."""
    limits = AgentLimits(
        context=source.shape.context,
        turns=config.turns,
        turn_tokens=config.turn_tokens,
        total=total,
        seconds=config.wall_seconds,
        live=config.live,
    )
    return AgentEngine(
        engine,
        agents,
        AgentServer("policy", source.shape.context),
        AgentAnswers(source.tokenizer, config.tool_format, now=text.TODAY),
        limits,
        config.pace,
        follows=history == "template",
    )


def with_environments(
    source: ModelSource,
    engine: Engine,
    config: EnvironmentTask,
    environments: EnvironmentPool,
    *,
    history: str,
    total: int | None,
) -> EpisodeEngine:
    """Return an engine that samples episodes of a task, whose ``environments`` have started. Print
    a note if the chat template rewrites earlier turns, and the recipe keeps them.

    ``history`` is rollout.history; ``total`` is the maximum number of tokens of all sequences of an
    episode, None if there is none.
    """
    conversation = environment.conversation_of(config, environments, source.tokenizer)
    follows = history == "template"
    roles = conversation.rewrites(ANSWERING)
    if roles and not follows:
        tell(
            "note",
            f"note: the chat template rewrites earlier turns after {' and '.join(roles)} messages, "
            "for example without their thoughts; rollout.history = 'append' keeps them as they "
            "were sampled, and rollout.history = 'template' follows the template",
        )
    limits = EpisodeLimits(
        context=source.shape.context,
        turns=config.turns,
        turn_tokens=config.turn_tokens,
        observation_tokens=config.observation_tokens,
        seconds=config.episode_seconds,
        total=total,
        live=config.live,
    )
    return EpisodeEngine(
        engine,
        environments,
        source.tokenizer,
        conversation,
        limits,
        config.pace,
        follows=follows,
    )


def _waiting_time(task: Task) -> Callable[[], float] | None:
    """Return a function that returns the seconds for which a task's environments or agents were
    waited for so far; None if the task has none."""
    inner = _inner_task(task)
    if isinstance(inner, agent.AgentEpisodes):
        pool = inner.agents
    elif isinstance(inner, environment.EpisodeTask):
        pool = inner.environments
    else:
        return None
    return lambda: pool.waited


def _inner_task(task: Task) -> Task:
    """Return the task whose grades a reward model changes; the task itself without one."""
    return task.task if isinstance(task, LearnedReward) else task


def build_task(resolved: Resolved) -> tuple[Task, Decode]:
    """Build the task, with the reward model if the recipe has one; return the task and a function
    that converts token ids to one text per token."""
    recipe = resolved.recipe
    if isinstance(recipe.task, SortTask):
        return sorting.Sorting(recipe.task, seed=recipe.seed), decode_numbers
    tokenizer = resolved.source.tokenizer
    return _with_reward_model(resolved, _language_task(resolved)), decoder(tokenizer)


def _with_reward_model(resolved: Resolved, task: Task) -> Task:
    """Return the task, wrapped so that the recipe's reward model grades its responses; without a
    reward model, return the task itself."""
    config, train = resolved.recipe.reward_model, resolved.recipe.train
    if config is None:
        return task
    tell("load", f"loading {config.name}")
    files, dtype = resolved.frozen["reward_model.name"].files, DTYPES[train.precision]
    model = load_reward_model(files, dtype=dtype).to(resolved.device)
    split = partial(cut, tokens=train.micro_tokens, samples=train.micro_sequences)
    return LearnedReward(task, model, weight=config.task, cut=split)


def decoder(tokenizer: Tokenizer) -> Decode:
    """Return a function that converts token ids to one text per token."""
    return lambda ids: [tokenizer.decode([i]) for i in ids]


def _language_task(resolved: Resolved) -> Task:
    """Build the task of a language model, or a mixture of tasks, and remove held-out prompts that
    are too long. Raise a ConfigError if the think budget does not fit."""
    recipe, tokenizer, bound = resolved.recipe, resolved.source.tokenizer, resolved.room
    assert bound is not None
    if recipe.rollout.think is not None:
        own = getattr(recipe.task, "turn_tokens", None), recipe.validation.max_tokens
        lowest = min(filter(None, (recipe.rollout.max_tokens, *own)))
        check_phrase(recipe.rollout.think, lowest, tokenizer)

    def make(part: Any) -> Any:
        return TASKS[part.name](part, tokenizer=tokenizer, seed=recipe.seed, room=bound)

    task: Task
    if isinstance(recipe.task, MixtureTask):
        parts = {name: make(part) for name, part in recipe.task.tasks.items()}
        task = mixture.Mixture(parts, recipe.task.weights, recipe.task.scales, seed=recipe.seed)
    else:
        task = make(recipe.task)
    task.validation = [prompt for prompt in task.validation if fits(prompt, bound)]
    return task


def look_at_prompts(resolved: Resolved) -> Resolved:
    """Read the rows and prompts of a recipe for `burnish plan`. Return a copy of ``resolved`` whose
    ``size`` has the length of the longest prompt, among up to `PROBED` training prompts and all
    held-out prompts, and the number of training prompts that were skipped because they are too
    long. If reading fails, return a copy with the error added to ``problems``.

    Return ``resolved`` unchanged if it has problems already, if its model is not on this machine or
    is the sorting model, or if the recipe is supervised, whose rows are only checked.
    """
    recipe, size, bound = resolved.recipe, resolved.size, resolved.room
    if size is None or resolved.problems:
        return resolved
    try:
        if recipe.is_supervised:
            read_pairs(resolved)
            return resolved
        with closing(_language_task(resolved)) as task:
            stream = PromptStream(task, bound)
            count = min(recipe.prompts_per_rollout * recipe.train.steps, PROBED)
            prompts = [*(prompt for _, prompt in stream.take(count)), *task.validation]
            if isinstance(task, environment.EpisodeTask):
                roles = tuple(task.conversation.rewrites(ANSWERING))
                size = size._replace(rewriting_roles=roles)
    except BurnishError as error:
        return replace(resolved, problems=(*resolved.problems, error))
    longest = max(len(prompt.token_ids) for prompt in prompts)
    return replace(resolved, size=size._replace(longest_prompt=longest, too_long=stream.skipped))
