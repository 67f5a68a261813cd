"""A recipe becomes the parts of a run: task, engine, model and learner, on a device.

Each part is made from the recipe alone, so parts may be built in different processes. Importing
this module loads torch, so ``api`` imports it after all checks that need no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from burnish import config, engines, machine, preflight, sizes
from burnish.engine.protocol import Engine, require
from burnish.engine.sorter import SorterEngine, spell
from burnish.errors import BurnishError, MissingExtra, ModelError
from burnish.learner.learner import Learner
from burnish.learner.objective import compile
from burnish.learner.optim import Optimizer, Policy
from burnish.learner.preferences import Preferences
from burnish.learner.ranks import Ranks
from burnish.loops import asynchronous, supervised, sync
from burnish.loops.evaluate import Decode, Evaluator
from burnish.loops.recorder import Parts
from burnish.model import hub, products, reward
from burnish.model.reward import RewardModel
from burnish.model.sorter import Sorter
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import Transformer
from burnish.model.value import Critic
from burnish.models import DTYPES, learned, open_model, open_policy, open_tokenizer
from burnish.plan import PAGE, Need, Size, room
from burnish.progress import tell
from burnish.rollout.branches import branching
from burnish.rollout.buffer import Buffer
from burnish.rollout.learned import LearnedReward
from burnish.rollout.length import check_phrase
from burnish.rollout.packing import cut, pack
from burnish.runs.metrics import Metrics
from burnish.schema.models import SorterConfig
from burnish.schema.recipe import Recipe
from burnish.schema.tasks import MixtureTask, PairsTask, PreferencesTask, SortTask
from burnish.tasks import gym, judged, keywords, math, mixture, pairs, sorting, text
from burnish.tasks.history import History
from burnish.tasks.stream import PromptStream, fits
from burnish.tasks.task import Task
from burnish.types import Group

PROBED = 1000
"""Training prompts among which a plan looks for the longest; all rows of a file are checked."""
TASKS: dict[str, Any] = {
    "files": text.make_files,
    "keywords": keywords.make_keywords,
    "math": math.make_math,
    "gym": gym.make_gym,
    "judged": judged.make_judged,
}


def build(recipe: Recipe, make: Callable[[Recipe], Learner] | None = None) -> Parts:
    """The parts of a recipe's run. ``make`` makes the learner; None for `build_learner`."""
    make = make or build_learner
    if recipe.is_supervised:
        return _build_supervised(recipe, make)
    task, engine, decode = build_sampler(recipe)
    require(engine.capabilities, repeats=recipe.engine.repeats)  # a resumed run draws the same
    learner = make(recipe)
    shut = engines.attach(recipe, engine, learner.policy)
    stream, buffer = stream_of(recipe, task), buffer_of(recipe)

    def drift(groups: list[Group]) -> Metrics:
        return learner.held_out_drift(pack(groups).to(learner.device))

    def close() -> None:
        shut()
        task.close()

    steps = branching(recipe, lambda: decode)
    rollouts = asynchronous.LocalRollouts(recipe, task, engine, steps)
    train: Callable[..., Iterator[sync.Step]]
    parts: dict[str, Any] = {"task": task, "engine": engine, "rest": engines.rest(recipe, engine)}
    train = partial(sync.train, recipe, learner=learner, steps=steps, **parts)
    if recipe.is_stale:
        local = asynchronous.LocalLearner(recipe, learner, engine)
        train = partial(asynchronous.train, recipe, rollouts=rollouts, learner=local, buffer=buffer)
    return Parts(
        recipe=recipe,
        learner=learner,
        prompts=stream,
        train=partial(train, prompts=stream),
        validate=partial(Evaluator(recipe, task, engine, decode).validate, drift),
        listen=rollouts.listen if recipe.is_stale else None,
        in_flight=rollouts.in_flight,
        restore=rollouts.restore,
        buffer=buffer,
        publish=lambda: engine.load(learner.weights()),
        decode=decode,
        close=close,
    )


def buffer_of(recipe: Recipe) -> Buffer | None:
    if recipe.buffer is None:
        return None
    return Buffer(**recipe.buffer.model_dump(), seed=recipe.seed)


def stream_of(recipe: Recipe, task: Task) -> PromptStream:
    is_sorter = isinstance(recipe.task, SortTask)
    bound = None if is_sorter else room(recipe, sizes.measured(recipe))
    history = None
    if recipe.selection.remembers:
        drops = recipe.rollout.overlong == "drop"
        history = History(recipe.selection, recipe.seed, drops_truncated=drops)
    return PromptStream(task, bound, history, judged.evolving(recipe))


def _build_supervised(recipe: Recipe, make: Callable[[Recipe], Learner]) -> Parts:
    tell("load", "reading the rows")
    answers = _written(recipe)
    recipe = config.with_steps(recipe, answers.steps(recipe.train.batch))
    learner = make(recipe)
    is_reward = isinstance(recipe.task, PreferencesTask)
    measure = supervised.measure_preferences if is_reward else supervised.measure_answers
    return Parts(
        recipe=recipe,
        learner=learner,
        train=partial(supervised.train, recipe, pairs=answers, learner=learner),
        validate=partial(supervised.validate, measure, answers, learner),
    )


def _written(recipe: Recipe) -> pairs.Pairs:
    assert isinstance(recipe.task, PairsTask | PreferencesTask)
    context, together = sizes.measured(recipe).context, recipe.train.micro_tokens
    given: dict[str, Any] = {"tokenizer": open_tokenizer(recipe), "seed": recipe.seed}
    return pairs.make_pairs(recipe.task, **given, context=context, together=together)


def build_learner(recipe: Recipe, ranks: Ranks | None = None) -> Learner:
    """The learner of a recipe's model, with the program of its objective. ``ranks`` as in
    `Learner`; they move a model to their devices, part by part."""
    policy: Policy
    if isinstance(recipe.task, SortTask):
        policy = _sorter(recipe)
    else:
        policy = learned(recipe, open_policy(recipe))
        policy = policy if ranks else policy.to(sizes.device_of(recipe))
    tell("load", "preparing the learner")
    train = recipe.train.model_copy(update={"decay_steps": recipe.decay_steps})
    if isinstance(policy, RewardModel):
        # It has all that is asked of the program of a run that samples nothing.
        return Learner(policy, Preferences(), train)  # type: ignore[arg-type]
    if recipe.is_supervised:
        return Learner(policy, supervised.PROGRAM, train, ranks=ranks)
    program, critic = compile(recipe.objective, recipe.critic), None
    if recipe.critic is not None:
        assert isinstance(policy, Transformer), "the schema refuses a critic of the sorting model"
        own = train.model_copy(update={"learning_rate": recipe.critic.learning_rate})
        critic = Optimizer(Critic(policy, shared=recipe.critic.shared), own, ranks)
    return Learner(policy, program, train, _teacher(recipe, ranks), critic, ranks)


def _teacher(recipe: Recipe, ranks: Ranks | None) -> Transformer | None:
    other = preflight.frozen(recipe).get("teacher.model")
    if other is None:
        return None
    model = open_model(other, DTYPES[sizes.settled(recipe).train.precision])[0]
    model.requires_grad_(False)
    return ranks.place(model, "fp32") if ranks else model.to(sizes.device_of(recipe))


def build_sampler(recipe: Recipe) -> tuple[Task, Engine, Decode]:
    """A recipe's task and engine, and a function that turns token ids into a text each."""
    recipe = sizes.settled(recipe)
    engine = build_engine(recipe)
    tell("load", "reading the prompts")
    task, decode = build_task(recipe)
    return task, engine, decode


def build_task(recipe: Recipe) -> tuple[Task, Decode]:
    """A recipe's task, and a function that turns token ids into a text each."""
    if isinstance(recipe.task, SortTask):
        return sorting.Sorting(recipe.task, seed=recipe.seed), spell
    tokenizer = open_tokenizer(recipe)
    return _with_reward(recipe, _language_task(recipe, tokenizer)), decoder(tokenizer)


def _with_reward(recipe: Recipe, task: Task) -> Task:
    """The task with its learned reward, if the recipe has one."""
    if recipe.reward_model is None:
        return task
    name, train = recipe.reward_model.name, sizes.settled(recipe).train
    device, dtype = sizes.device_of(recipe), DTYPES[train.precision]
    tell("load", f"loading {name}")
    model = reward.load(hub.resolve(name), dtype=dtype).to(device)
    split = partial(cut, tokens=train.micro_tokens, sequences=train.micro_sequences)
    return LearnedReward(task, model, weight=recipe.reward_model.task, cut=split)


def decoder(tokenizer: Tokenizer) -> Decode:
    return lambda ids: [tokenizer.decode([i]) for i in ids]


def _language_task(recipe: Recipe, tokenizer: Tokenizer) -> Task:
    check_phrase(recipe, tokenizer)
    bound = room(recipe, sizes.measured(recipe))

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


def build_engine(recipe: Recipe) -> Engine:
    """The engine that samples from a recipe's model."""
    if isinstance(recipe.task, SortTask):
        return SorterEngine(_sorter(recipe))
    if recipe.engine.is_apart:
        return engines.open_engine(recipe)
    from burnish.engine.engine import NativeEngine  # numba takes a second
    from burnish.engine.scheduler import STEP_TOKENS, EngineSettings

    dtype, device = DTYPES[recipe.engine.precision], sizes.device_of(recipe)
    total, free = machine.memory(device)
    cache = Need("cache", f"engine.kv_mb = {recipe.engine.kv_mb}", recipe.engine.kv_mb * 2**20)
    preflight.raise_all(preflight.lacking([cache], {"cache": total if device == "cpu" else free}))
    model, tokenizer, _ = open_model(recipe, dtype)
    settings = EngineSettings(
        kv_bytes=cache.size,
        page_size=PAGE,
        max_running=recipe.engine.max_running,
        step_tokens=STEP_TOKENS[device.partition(":")[0]],
        on_update="keep" if recipe.loop.on_update == "keep" else "recompute",
    )
    return NativeEngine(model.to(device), tokenizer, settings)


def _sorter(recipe: Recipe) -> Sorter:
    task, model = recipe.task, recipe.model
    assert isinstance(task, SortTask)
    assert isinstance(model, SorterConfig)
    return Sorter(task.numbers, task.length, model.width, seed=recipe.seed)


def probe(recipe: Recipe, size: Size) -> Size:
    """The size with the prompts of a recipe whose model and rows are here; every row is checked."""
    if recipe.is_supervised:
        _written(recipe)
        return size
    task = _language_task(recipe, open_tokenizer(recipe))
    count = min(recipe.prompts_per_rollout * recipe.train.steps, PROBED)
    stream = PromptStream(task, room(recipe, size))
    prompts = [*(prompt for _, prompt in stream.take(count)), *task.validation]
    task.close()
    return size._replace(
        longest_prompt=max(len(prompt.token_ids) for prompt in prompts),
        too_long=stream.skipped,
    )


def prepare(recipe: Recipe, threads: int | None = None) -> Recipe:
    """Sets torch up as bit-exactness needs it, before it touches a device.

    ``threads`` is None for one per core that this process may use. Returns the recipe as it will
    run here, with no precision left open.
    """
    machine.set_up_torch(threads or machine.cores())
    sizes.check_device(recipe)
    chosen = sizes.settled(recipe)
    for precision in {chosen.engine.precision, chosen.train.precision} - {"fp32"}:
        if not machine.multiplies(precision, sizes.device_of(chosen)):
            factor = products.cost(DTYPES[precision])
            tell(
                "note",
                f"note: this processor has no {precision} products, so one takes {factor:.1f} "
                "times as long as in fp32; precision = 'auto' takes fp32 here",
            )
    return chosen


def look(
    recipe: Recipe, path: Path, *, has_prompts: bool = True
) -> tuple[Recipe, Size | None, list[BurnishError]]:
    """The recipe as it would run here, its size, and its problems: for a plan."""
    unknown = preflight.problem_of(sizes.check_device, recipe)
    lacks = [*preflight.problems(recipe, path), *unknown]
    recipe = sizes.settled(recipe.model_copy(update={"device": "auto"}) if unknown else recipe)
    is_absent = any(isinstance(problem, MissingExtra | ModelError) for problem in lacks)
    for check in () if is_absent else (sizes.check_frozen, sizes.check_adapter, sizes.check_heads):
        lacks += preflight.problem_of(check, recipe)
    size = None if is_absent else sizes.measure(recipe)
    if size is not None and has_prompts and not lacks:
        try:
            size = probe(recipe, size)
        except BurnishError as error:
            lacks.append(error)
    return recipe, size, [*lacks, *sizes.lacking_room(recipe, path, size)]
