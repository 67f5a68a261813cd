"""The Python API: ``train``, ``resume``, ``sft``, ``evaluate``, ``generate`` and ``export``."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console

from burnish.console.display import Display
from burnish.console.notebook import NotebookDisplay, is_notebook
from burnish.console.progress import Show, begin, showing, tell
from burnish.console.text import counted
from burnish.errors import ConfigError, RunError
from burnish.launch import torchrun
from burnish.launch.preflight import as_rows
from burnish.launch.resolve import resolve
from burnish.loops.callbacks import Callbacks, CheckpointRecord, StepRecord, ValidationRecord
from burnish.machine.threads import share_cores
from burnish.model import hub
from burnish.randomness import Stream
from burnish.recipe.load import (
    Overrides,
    Table,
    effective_settings,
    flatten,
    load_recipe,
    parse_overrides,
    recipe_to_toml,
)
from burnish.recipe.objective.advantages import Remax, Vine
from burnish.recipe.recipe import LogConfig, Recipe
from burnish.recipe.tasks import AgentTask, EnvironmentTask, KeywordsTask, RowsTask
from burnish.runs import checkpoints, directory, failure, resuming
from burnish.runs.directory import PROMPTS, RunDirectory
from burnish.runs.metrics import iterate_rows
from burnish.runs.note import write_note
from burnish.runs.run import Run, unsaved_best
from burnish.tasks.data.names import is_table_object, parts_of_directory
from burnish.tasks.rows import DataRow, read_rows
from burnish.types import Prompt, SamplingParams

if TYPE_CHECKING:
    from burnish.runs.results import Evaluation

AnyPath = str | os.PathLike[str]
AnyRecipe = AnyPath | Table | Recipe
"""A name that ``burnish recipes`` lists, a TOML file, a table of settings, or a ``Recipe``."""
Prompts = Iterable[str | Mapping[str, Any]]
OneReward = Callable[..., Any] | str
RewardArgument = OneReward | Sequence[OneReward | Table] | Mapping[Any, float] | None
"""A reward function or "FILE.py:NAME"; a list of several, which may also be tables with "reward",
"weight" and "name"; or a dict with the weight of each. None to use the recipe's reward."""
AnyData = Any
"""A file, a pattern, a directory or hf:ORG/NAME, a Dataset, a DatasetDict, a pandas DataFrame, or
rows."""
ShowArgument = Show | Literal[False] | None
"""A callback for progress reports; None to display them on stderr or in a notebook's cell, False to
ignore them."""
EXPORTED = ("fp32", "bf16", "fp16")
"""Types of the tensors in exported files."""
EVALUATION_SETTINGS = (
    *("model", "task", "engine", "validation", "seed", "reward_model"),
    *("rollout.max_tokens", "rollout.min_tokens", "rollout.stop"),
)
"""Names of the settings and sections of a recipe that affect the results of an evaluation."""


def train(
    recipe: AnyRecipe,
    *,
    prompts: Prompts | None = None,
    data: AnyData = None,
    reward: RewardArgument = None,
    environment: str | None = None,
    agent: str | None = None,
    overrides: Overrides = (),
    out: AnyPath | None = None,
    note: str | None = None,
    tags: Sequence[str] = (),
    show: ShowArgument = None,
    stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[StepRecord], Any] | None = None,
    on_validation: Callable[[ValidationRecord], Any] | None = None,
    on_checkpoint: Callable[[CheckpointRecord], Any] | None = None,
    **settings: Any,
) -> Run:
    """Train a model by a recipe in a new run directory; return the finished or stopped run.

    ``recipe`` is a name that ``burnish recipes`` lists, a TOML file, a dict of sections or a
    ``Recipe``. ``settings`` change its settings, as in ``train={"steps": 10}`` or ``seed=1``;
    ``overrides`` do the same as "train.steps=10" or as a dict. ``out`` is a new directory, by
    default runs/NAME-1, runs/NAME-2, … ``prompts`` (texts, or rows with a "prompt") or ``data`` (a
    JSONL, Parquet, Arrow or CSV file, a pattern, a directory, "hf:ORG/NAME:SPLIT", a Dataset, a
    DatasetDict, a pandas DataFrame, or rows) and ``reward`` (a function of response text and row,
    "FILE.py:NAME", or several of them) replace the recipe's task. So does ``environment``, the
    FILE.py:NAME of a class for multi-turn episodes, and ``agent``, the FILE.py:NAME of a function
    that calls the policy with an OpenAI client (docs/agents.md). ``model`` may also be a pair
    of objects, a model and its tokenizer, from burnish or transformers. ``note`` and ``tags`` are
    recorded in the run and may be changed later (`Run.note`, `Run.tags`). ``stop`` is called
    between steps; if it returns True, the run saves a checkpoint and stops. So does a callback
    (``on_step``, ``on_validation``, ``on_checkpoint``) that returns True; docs/api.md has its
    arguments.

    Progress is displayed on stderr, or in one output of a notebook's cell, unless ``show`` is False
    or a callback. A callback is called with every ``Progress``; in phase "step" it has the metrics
    of a finished step. Problems of the recipe, its data or the machine raise a ``BurnishError``. An
    error during the run is recorded in its directory, and raised with the command to continue.
    """
    if "model" in settings:
        settings["model"] = hub.as_setting(settings["model"])
    changes = [parse_overrides(overrides), settings]
    given: dict[str, Any] = {"prompts": prompts, "data": data, "reward": reward}
    recipe = recipe_of(recipe, changes, environment=environment, agent=agent, **given)
    claimed = directory.claimed(None if out is None else Path(out), recipe.name)
    with claimed as path, progress_display(show, path.name):
        tell("check", "checking the recipe and its data")
        is_new = not path.exists() or not any(path.iterdir())
        resolved = resolve(recipe, path, threads=torchrun.threads(recipe.runtime))
        from burnish.launch.build import build_run
        from burnish.launch.inputs import hash_functions, hash_inputs
        from burnish.loops.recorder import record

        recipe = resolved.recipe
        inputs = hash_inputs(recipe.task, recipe.tasks, resolved.model, resolved.frozen)
        inputs |= hash_functions(recipe.objective)
        about = directory.environment(resolved.device) | {"inputs": inputs}
        about[directory.STARTED] = directory.origin()
        rows = getattr(recipe.task, "rows", None)
        create = partial(RunDirectory, path, recipe_to_toml(recipe), environment=about, rows=rows)
        try:
            with (
                failure.recorded(path, create) as attempt,
                failure.closing_last(build_run(resolved)) as parts,
                attempt.open() as run,
            ):
                if note or tags:
                    write_note(path, note, add=tags)
                callbacks = Callbacks(on_step, on_validation, on_checkpoint)
                record(run, parts, stop=stop, callbacks=callbacks)
            _tell_warnings(path, show)
        except KeyboardInterrupt:
            is_empty = not [*iterate_rows(path / "metrics.jsonl")]  # not even an evaluation
            if is_new and is_empty:
                shutil.rmtree(path, ignore_errors=True)  # it may not exist yet
            raise
    return Run(path)


def sft(
    recipe: AnyRecipe = "sft",
    *,
    data: AnyData = None,
    **how: Any,
) -> Run:
    """Fine-tune on prompts with given answers and return the run: a warm start for ``train``.

    ``data`` is as in ``train``, with rows that have a "prompt" and an "answer". ``how`` takes the
    arguments of ``train``.
    """
    how["task"] = {"name": "pairs"} | how.get("task", {})
    return train(recipe, data=data, **how)


def recipe_of(
    source: AnyRecipe,
    changes: Sequence[str | Table] = (),
    *,
    prompts: Prompts | None = None,
    data: AnyData = None,
    reward: RewardArgument = None,
    environment: str | None = None,
    agent: str | None = None,
) -> Recipe:
    """Load the recipe ``source`` and apply ``changes``, overrides of its settings.

    If ``prompts``, ``data`` or ``reward`` is given (see `train`), the recipe's task becomes the
    task "files" with these prompts and this reward; only the tasks "environment", "agent", "pairs",
    "preferences" and, if no reward is given, "judged" stay what they are. With ``environment``, it
    becomes the task "environment", and with ``agent`` the task "agent". New prompts or data also
    replace the recipe's validation data: held-out rows are taken from the new ones. The keywords
    task keeps its reward unless a new one is given. Raise a ConfigError if both ``prompts`` and
    ``data`` are given, if the reward of an environment is a function, or if an agent is given
    together with a reward or an environment.
    """
    given = {"prompts": prompts, "data": data, "reward": reward, "environment": environment}
    if agent is None and all(value is None for value in given.values()):
        return load_recipe(source, changes)
    _check_source_of_episodes(environment, agent)
    if prompts is not None and data is not None:
        kind = data if isinstance(data, str | os.PathLike) else type(data).__name__
        raise ConfigError(f"prompts and data = {str(kind)!r}: give one of the two")
    if data is not None and not (isinstance(data, str | os.PathLike) or is_table_object(data)):
        prompts, data = data, None
    before = load_recipe(source).task
    name = parse_overrides(changes).get("task.name", before.name)
    name = name if environment is None else "environment"
    name = name if agent is None else "agent"
    is_written, has_turns = name in ("pairs", "preferences"), name in ("environment", "agent")
    keeps = is_written or has_turns or (name == "judged" and reward is None)
    if name == "agent" and reward is not None:
        raise ConfigError("an agent returns the reward itself; leave reward out")
    own: dict[str, Any] = {"name": name if keeps else "files"}
    if environment is not None:
        own["environment"] = environment
    if agent is not None:
        own |= agent_settings(before, agent)
    if prompts is not None:
        own |= {"train": None, "rows": as_rows(prompts), "validation": None}
    elif data is not None:
        own |= _named_data(data)
    own_files = isinstance(before, RowsTask) and before.is_validated and before.validation
    if own.keys() & {"train"} and own_files:
        own["validation_rows"] = None  # it was a number of rows of the replaced validation data
    if has_turns and not isinstance(reward, str | None):
        raise ConfigError(
            f"the reward of an environment is FILE.py:NAME, got {type(reward).__name__}; write one "
            "function to a file, or return rewards from the environment's step"
        )
    if reward is not None:
        own |= {"reward": reward} if has_turns else reward_settings(reward)
    elif isinstance(before, KeywordsTask) and not (is_written or has_turns):
        own |= {"reward": before.reward, "must_end": before.must_end}
    return load_recipe(source, [{"task": own}, *changes])


def _check_source_of_episodes(environment: str | None, agent: str | None) -> None:
    if agent is not None and environment is not None:
        raise ConfigError(f"agent = {agent!r} and environment = {environment!r}: give one of them")


def agent_settings(before: Any, agent: str) -> dict[str, Any]:
    """Return the settings of an agent's task that replaces the task ``before``, whose rows and, if
    it has episodes, limits it keeps."""
    kept = {"train", "rows", "validation", "validation_rows", "columns"}
    if isinstance(before, EnvironmentTask | AgentTask):
        kept |= {"turns", "turn_tokens", "tool_format", "pace", "live", "memory_mb"}
    given = kept & before.model_fields_set & type(before).model_fields.keys()
    return {name: getattr(before, name) for name in given} | {"agent": agent}


def reward_settings(reward: RewardArgument) -> dict[str, Any]:
    """Convert the ``reward`` argument of ``train`` to settings of a task: a dict with "reward" (a
    name), "function" and "rewards" (several of them), of which the unused ones are None."""
    none: dict[str, Any] = {"reward": None, "function": None, "rewards": None}
    if isinstance(reward, str) or callable(reward):
        return none | {"function" if callable(reward) else "reward": reward}
    if isinstance(reward, Mapping):
        several: list[Any] = [{"reward": key, "weight": weight} for key, weight in reward.items()]
    else:
        several = [one if isinstance(one, Mapping) else {"reward": one} for one in reward or ()]
    return none | {
        "rewards": [
            {**one, "reward": None, "function": one["reward"]}
            if callable(one.get("reward"))
            else one
            for one in several
        ]
    }


def _named_data(data: AnyData) -> dict[str, str | None]:
    """Return the names of the training and the validation data, by their setting."""
    if isinstance(data, str | os.PathLike):
        if Path(data).is_dir():
            return parts_of_directory(Path(data))
        return {"train": os.fspath(data), "validation": None}
    from burnish.tasks.data.table import save_dataset

    return save_dataset(data)


@contextmanager
def progress_display(show: ShowArgument, name: str) -> Iterator[None]:
    """Pass progress reports inside the block to ``show``: a callback, False to ignore them, or None
    to display them on stderr or in a notebook's cell. ``name`` is the title of the display.

    OpenMP's threads are configured first (`share_cores`), because the block may import torch.
    """
    share_cores()
    display: AbstractContextManager[Show] = nullcontext(show or (lambda progress: None))
    if show is None and is_notebook():
        display = NotebookDisplay(name)
    elif show is None:
        display = Display(name, Console(stderr=True, highlight=False, emoji=False))
    with display as callback, showing(callback):
        yield


def resume(
    run_path: AnyPath,
    *,
    overrides: Overrides = (),
    from_checkpoint: str | None = None,
    anyway: bool = False,
    reward: RewardArgument = None,
    show: ShowArgument = None,
    stop: Callable[[], bool] = lambda: False,
    on_step: Callable[[StepRecord], Any] | None = None,
    on_validation: Callable[[ValidationRecord], Any] | None = None,
    on_checkpoint: Callable[[CheckpointRecord], Any] | None = None,
    **settings: Any,
) -> Run:
    """Continue a run from its last checkpoint, bit for bit as if it had never stopped; return the
    finished or stopped run. Without a checkpoint, the run begins again at step 0.

    ``overrides`` and ``settings`` (see ``train``) may change the number of steps and intervals such
    as validation.every, but no setting that affects results. ``from_checkpoint`` is the name of
    another checkpoint of the run, such as "step-00000040"; later checkpoints are deleted. If the
    run's reward was a function, pass it again as ``reward``, and a function of its objective as in
    ``objective={"loss": function}``; its prompts are stored in the run.
    ``anyway`` resumes the run even if its machine, packages or inputs have changed. ``show``,
    ``stop`` and the callbacks are as in ``train``; they are not stored, so pass them again.
    """
    path = Path(run_path)
    with RunDirectory(path) as opened, progress_display(show, path.name):
        tell("check", "checking the recipe and its data")
        changes = parse_overrides([parse_overrides(overrides), settings])
        recipe = resuming.resumed_recipe(path, changes)
        resuming.check_functions_passed(path, recipe.objective)
        if recipe.idle_steps and "train.steps" in changes:
            tell(
                "note",
                f"the learning rate is 0 after gradient step {recipe.steps_to_lowest}, so the last "
                f"{counted(recipe.idle_steps, 'gradient step')} will change nothing",
            )
        chosen = checkpoints.latest(path)
        if from_checkpoint is not None:
            chosen = checkpoints.find_checkpoint(path, from_checkpoint)
        before = directory.load_json(path / directory.ENVIRONMENT)
        read_before = before.get("inputs", {})
        if recorded := getattr(recipe.task, "rewards", None):
            several = [reward] if isinstance(reward, str) or callable(reward) else reward
            given = reward_settings(several)["rewards"]
            rewards = resuming.attach_functions(path, recorded, read_before, given)
            recipe = load_recipe(recipe, {"task": {"rewards": rewards}})
        else:
            own_reward = getattr(recipe.task, "reward", None)
            resuming.check_reward(path, own_reward, read_before, reward)
        if "prompts" in read_before:
            recipe = load_recipe(recipe, {"task": {"rows": read_rows(path / PROMPTS, DataRow)}})
        if "reward" in read_before:
            recipe = load_recipe(recipe, {"task": {"function": reward}})
        with resuming.naming_directory(before):
            resolved = resolve(recipe, path, is_new=False, threads=before.get("threads"))
        from burnish.launch.build import build_run
        from burnish.launch.inputs import hash_functions, hash_inputs
        from burnish.loops.recorder import go_back, record

        recipe = resolved.recipe
        inputs = hash_inputs(recipe.task, recipe.tasks, resolved.model, resolved.frozen)
        inputs |= hash_functions(recipe.objective)
        now = directory.environment(resolved.device) | {"inputs": inputs}
        now[directory.STARTED] = directory.origin()
        if chosen is not None:  # otherwise the run begins again, and nothing has to be the same
            with resuming.naming_directory(before):
                resuming.check_environment(before, now, anyway=anyway)
        free = {key: value for key, value in changes.items() if not key.startswith("objective.")}
        options = {"from_checkpoint": from_checkpoint, "anyway": anyway, "changes": free}
        with (
            failure.recorded(path, options=options) as attempt,
            failure.closing_last(build_run(resolved)) as parts,
        ):
            start = go_back(opened, parts, chosen)
            if chosen is None:
                opened.write(directory.ENVIRONMENT, json.dumps(now, indent=2) + "\n")
            opened.write("recipe.toml", recipe_to_toml(recipe))
            attempt.options, attempt.is_restored = {"anyway": anyway}, True
            callbacks = Callbacks(on_step, on_validation, on_checkpoint)
            record(opened, parts, start=start, stop=stop, callbacks=callbacks)
        _tell_warnings(path, show)
    return Run(path)


def _tell_warnings(path: Path, show: ShowArgument) -> None:
    """Display the warnings about a run, unless the caller displays its progress."""
    if show is None:
        for warning in Run(path).warnings:
            tell("note", f"warning: {warning}")
        if unsaved := unsaved_best(path):
            tell("note", unsaved)


def evaluate(
    recipe: AnyRecipe,
    *,
    model: Any = None,
    environment: str | None = None,
    agent: str | None = None,
    overrides: Overrides = (),
    out: AnyPath | None = None,
    show: ShowArgument = None,
    **settings: Any,
) -> Evaluation:
    """Sample and grade a model's responses to a recipe's held-out prompts, as in the validation
    before the first step of a run; return the results.

    ``recipe`` may also be a run, whose trained model is then evaluated. ``model`` is another model
    to evaluate, as in ``train``; None for the model of the recipe or the run. ``environment``, the
    FILE.py:NAME of a class, replaces the recipe's environment, and ``agent``, the FILE.py:NAME of a
    function, its agent. ``settings`` and ``overrides`` change the recipe's settings, as in
    ``train``; the advantage does not matter. The directory ``out`` gets every response and a
    report; an evaluation that it already contains is not repeated, and a different one in it raises
    a RunError. By default it is runs/eval-NAME-HASH, where the hash covers everything that the
    results depend on.
    """
    changes = [parse_overrides(overrides), settings]
    recipe = evaluation_recipe(recipe, hub.as_setting(model), changes, environment, agent)
    with progress_display(show, recipe.name):
        resolved = resolve(recipe)
        from burnish.engine.protocol import require
        from burnish.launch import local
        from burnish.launch.inputs import hash_inputs
        from burnish.launch.settings import make_evaluator
        from burnish.runs import results

        recipe = resolved.recipe
        settings = flatten(effective_settings(recipe))
        depends = {
            key: value for key, value in settings.items() if key.startswith(EVALUATION_SETTINGS)
        }
        inputs = hash_inputs(recipe.task, recipe.tasks, resolved.model, resolved.frozen)
        depends |= {f"hash of {name}": value for name, value in inputs.items()}
        digest = hashlib.sha256(json.dumps(depends).encode()).hexdigest()
        path = Path(out or f"runs/eval-{recipe.name}-{digest[:8]}")
        task, engine, decode = local.build_sampler(resolved)
        with closing(task):
            require(engine.capabilities, repeats=False)
            if not engine.capabilities.counter_draws:
                depends["draws"] = "the engine's own"
            make_evaluator(recipe, task, engine, decode).evaluate_into(path, depends)
        tell("report", "writing the report")
        results.write_evaluation([path], path / "report.html")
        return results.read_evaluation(path)


def evaluation_recipe(
    source: AnyRecipe,
    model: AnyPath | Table | None = None,
    changes: Sequence[str | Table] = (),
    environment: str | None = None,
    agent: str | None = None,
) -> Recipe:
    """Return the recipe for evaluating a model, without its teacher and its trackers.

    ``source`` is a recipe (name, file, table or object) or the directory of a run: then the run's
    recipe is used with the model that the run trained and, if the run stored prompts, with these
    prompts. ``model`` is another model to evaluate; None for the model of ``source``.
    ``environment`` and ``agent`` replace the recipe's; None to keep them. If the recipe has an
    advantage that they may not support, it is replaced by "raw", because an evaluation needs none.
    ``changes`` are overrides, applied last; task.validation also replaces task.validation_rows = 0.
    Raise a ``ConfigError`` if the run trained the sorting model, if the recipe is supervised,
    because its responses are not graded, if no prompts are held out, or if both an environment and
    an agent are given.
    """
    _check_source_of_episodes(environment, agent)
    own: dict[str, Any] = {}
    if isinstance(source, str | os.PathLike) and (Path(source) / "recipe.toml").is_file():
        run, source = Path(source), Path(source) / "recipe.toml"
        if not load_recipe(source).model.is_language:
            raise ConfigError(
                f"{run} trained the sorting model, and `burnish eval` measures language models; "
                f"{run}/report.html has the figures of its held-out prompts"
            )
        own["model"] = run
        if (run / PROMPTS).is_file():
            own["task"] = {"train": run / PROMPTS}
    if model is not None:
        own["model"] = model
    if environment is not None or agent is not None:
        before = load_recipe(source)
        advantage = before.objective.advantage
        if advantage.reads_turns or isinstance(advantage, Remax | Vine):
            own["objective"] = {"advantage": "raw"}
        if environment is not None:
            named = {"name": "environment", "environment": environment}
            own["task"] = own.get("task", {}) | named
        if agent is not None:
            named = {"name": "agent"} | agent_settings(before.task, agent)
            own["task"] = named | own.get("task", {})
    given = parse_overrides(changes)
    # Settings of the validation would be refused if there is none.
    others = {key: value for key, value in given.items() if not key.startswith("validation.")}
    if not (recipe := load_recipe(source, [own, others])).is_validated:
        if "task.validation" not in given or "task.validation_rows" in given:
            raise ConfigError(
                f"{recipe.name} holds out no prompts (task.validation_rows = 0), and an evaluation "
                "needs some; name a file of them, as --set task.validation=FILE.jsonl does"
            )
        own["task"] = own.get("task", {}) | {"validation_rows": None}
    recipe = load_recipe(source, [own, *changes])
    if recipe.is_supervised:
        raise ConfigError(
            f"{recipe.name} is a supervised recipe, whose responses are not graded; evaluate "
            "another recipe"
        )
    # The student is evaluated alone, and no tracker shows the evaluation.
    return recipe.model_copy(update={"teacher": None, "log": LogConfig()})


@dataclass(frozen=True)
class Answer:
    """A sampled answer to a prompt."""

    prompt: str
    sample: int
    """Index among the answers to the same prompt."""
    text: str
    finish: str
    """stop (end token or stop text), length (token limit), or abort (numerical overflow)."""
    token_ids: list[int] = field(repr=False)
    logprobs: list[float] = field(repr=False)
    """Log-probability of each token under the model at the sampling temperature."""


def generate(
    prompts: str | Sequence[str],
    *,
    model: Any = "smollm2-135m",
    n: int = 1,
    chat: bool = True,
    precision: str = "auto",
    device: str = "auto",
    stop: str | Sequence[str] = (),
    show: ShowArgument = None,
    **sampling: Any,
) -> list[Answer]:
    """Sample ``n`` answers to each prompt; return one list of all answers, in the order of the
    prompts. A single text is one prompt.

    ``model`` is a name, a directory, hf:ORG/NAME, a run, or a pair of objects as in ``train``.
    ``chat`` applies the model's chat template if it has one. ``stop`` texts end an answer.
    ``sampling`` may set ``temperature`` (0 is greedy), ``max_tokens`` (128 by default),
    ``min_tokens``, ``top_p``, ``top_k``, ``min_p``, ``repetition_penalty`` and ``seed``.
    """
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    named = {"task": "keywords", "model": hub.as_setting(model), "device": device}
    recipe = load_recipe(named | {"engine": {"precision": precision}})
    with progress_display(show, recipe.model.name):
        engine, tokenizer = open_engine(recipe)
        from burnish.rollout.rollout import sample
        from burnish.tasks.text import encode_prompt

        stops = (stop,) if isinstance(stop, str) else tuple(stop)
        params = SamplingParams(**sampling, stop=stops)
        chat = chat and tokenizer.chat_template is not None
        inputs = [encode_prompt(tokenizer, text, chat=chat) for text in texts]
        numbered = [
            (i, Prompt(str(i), text, ids, "generate")) for i, (text, ids) in enumerate(inputs)
        ]
        report = begin("generate", f"sampling {n * len(texts)} responses", unit="responses")
        done = sample(engine, numbered, n, params, Stream.GENERATE, report)
    return [
        Answer(
            text, c.sample_index, c.text, str(c.finish), c.token_ids.tolist(), c.logprobs.tolist()
        )
        for text, completions in zip(texts, done, strict=True)
        for c in completions
    ]


def open_engine(recipe: Recipe) -> tuple[Any, Any]:
    """Check a recipe, load its language model (downloaded if necessary) into its engine, and return
    the engine and the tokenizer."""
    resolved = resolve(recipe)
    from burnish.launch.engines import build_engine

    return build_engine(resolved), resolved.source.tokenizer


def export(
    run_path: AnyPath,
    out: AnyPath,
    *,
    which: str = "best",
    adapter: bool = False,
    dtype: str = "fp32",
    show: ShowArgument = None,
) -> Path:
    """Write a run's model to the directory ``out``, new or empty, in Hugging Face's layout; return
    the path of the run's checkpoint that was exported.

    ``which`` is "last", "best" (by validation score; the last checkpoint if there is none), or a
    checkpoint's name. ``adapter`` writes only the run's adapter, in PEFT's layout; otherwise an
    adapter is merged. If the base model of the adapter is itself a run, or was initialized at
    random, it is written to the subdirectory ``base``, because PEFT can't open a run. ``dtype`` is
    the type of the tensors in the files: "fp32", "bf16" or "fp16".
    """
    if dtype not in EXPORTED:
        names = "; fp32 keeps all bits, bf16 and fp16 halve the size"
        raise ConfigError(
            f"--dtype, or dtype= in Python, must be {' or '.join(EXPORTED)}, got {dtype!r}{names}"
        )
    path, target = Path(run_path), Path(out).resolve()
    recipe = resuming.resumed_recipe(path, ())
    if not recipe.model.is_language:
        raise ConfigError("the sorting model is not a language model and can't be exported")
    if adapter and (recipe.train.learn.name != "lora" or recipe.task.name == "preferences"):
        raise ConfigError(
            f"{path} has no adapter: train.learn is '{recipe.train.learn.name}', not 'lora', or it "
            "trained a reward model, whose head is not part of an adapter; export the model "
            "without --adapter"
        )
    if target.exists() and any(target.iterdir()):
        raise RunError(f"{out} is not empty; name a directory that is new or empty")
    chosen = checkpoints.find_checkpoint(path, which)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Write to a temporary directory beside the target and rename it when it is complete.
    scratch = tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-")
    with progress_display(show, path.name), scratch as made:
        tell("load", "loading torch")
        from burnish.launch import models

        if which == "best" and (unsaved := unsaved_best(path)):
            tell("note", unsaved)
        tell("export", f"writing {out}")
        source = models.find_run(recipe, path)
        assert source is not None
        models.write_run(
            source,
            chosen,
            Path(made, "model"),
            adapter=adapter,
            dtype=models.DTYPES[dtype],
            final=target,
        )
        Path(made, "model").rename(target)
    return chosen
