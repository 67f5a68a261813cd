"""Checks of a recipe's inputs before torch is loaded.

The checks find optional packages that are not installed, missing files, runs and models, engines
without their packages or keys, rows that lack a field, rewards that can't be imported, and judges
that do not respond.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, distributions, requires
from pathlib import Path
from typing import Any

from burnish.engine.remote.environment import check_packages, check_token, read_key
from burnish.environments.taskset import require_verifiers
from burnish.errors import BurnishError, ConfigError, DataError, MissingExtra, ModelError, RunError
from burnish.graders import judge, rewards, trial
from burnish.machine import hardware
from burnish.recipe.engine import AnyEngine
from burnish.recipe.load import list_recipes, load_recipe
from burnish.recipe.models import AnyModel, LanguageConfig, ScratchConfig, SorterConfig
from burnish.recipe.objective.advantages import Vine
from burnish.recipe.objective.objective import check_functions
from burnish.recipe.recipe import Recipe, TrainConfig
from burnish.recipe.tasks import (
    AgentsTask,
    AgentTask,
    EnvironmentTask,
    FilesTask,
    GymTask,
    JudgedTask,
    MathTask,
    RowsTask,
    VerifiersTask,
)
from burnish.recipe.trainable import AnyLearning, LoraLearns
from burnish.runs import checkpoints
from burnish.runs.directory import check_new
from burnish.tasks.data.names import FORMS, parse_data_name

Model = SorterConfig | ScratchConfig | LanguageConfig
EXTRAS = {
    "math": ("math_verify", "grading answers of math tasks"),
    "gym": ("reasoning_gym", "questions that a generator makes (arithmetic)"),
    "data": ("datasets", "Parquet, Arrow and CSV files, and datasets by hf:ORG/NAME"),
    "hf": ("huggingface_hub", "models by hf:ORG/NAME"),
    "tensorboard": ("tensorboard", "events of runs for TensorBoard; none is needed to run"),
    "wandb": ("wandb", "the tracker Weights & Biases (log.trackers)"),
    "mlflow": ("mlflow", "the tracker MLflow (log.trackers)"),
    "trackio": ("trackio", "the tracker Trackio (log.trackers)"),
    "serve": ("uvicorn", "the endpoint of `burnish serve`"),
    "agents": ("openai", "the client that agents call the policy with"),
    "verifiers": ("verifiers", "tasksets of the package verifiers (task.name = 'verifiers')"),
    "ray": ("ray", "sampling and learning in processes of their own (--runtime ray)"),
}
"""Optional dependencies: for each extra, a module that it installs, and the extra's purpose."""
COMMANDS = {name: f"burnish data {name}" for name in ("small-sums", "sums", "sentences", "guess")}
"""Commands that write the data files of built-in recipes, by the directory that they write to."""
SPARE_PROCESSES = 64
"""Processes that are left to the run itself and to environments that start their own."""
_RUN = re.compile(r"runs/([\w.-]+)-\d+")


def find_problems(recipe: Recipe, out: Path | None = None) -> list[BurnishError]:
    """Run all checks of a recipe, and return the first problem that each of them finds. Rows,
    rewards and judges are checked only if the other checks find no problem: this reads the data,
    calls rewards with made-up responses, and sends a test request to judges.

    ``out`` is the directory of a new run; None if no run is written.
    """
    tasks, models = recipe.tasks, [recipe.model, *recipe.frozen_models.values()]
    found = [] if out is None else problem_of(check_new, out)
    if out is not None:
        found += problem_of(check_rate, recipe.model, recipe.train, recipe.is_supervised)
        found += problem_of(check_functions, recipe.objective)
    found += problem_of(check_task_extras, tasks)
    if recipe.runtime.name == "ray":
        found += problem_of(require_extra, "ray", "runtime.name = 'ray'")
    for tracker in recipe.log.trackers or ():
        found += problem_of(require_extra, tracker, f"log.trackers = ['{tracker}']")
    found += problem_of(check_files, tasks)
    for model in models:
        found += [*problem_of(check_model_extra, model), *problem_of(check_model, model)]
    found += problem_of(check_chat, tasks, recipe.model)
    found += problem_of(check_adapter, recipe.model.adapter, recipe.train.learn)
    found += problem_of(check_engine, recipe.engine)
    found += problem_of(check_live, tasks)
    found = list({str(problem): problem for problem in found}.values())
    # Rows may need a package that is missing.
    replays = isinstance(recipe.objective.advantage, Vine)
    return found or problem_of(
        check_rows, tasks, recipe.seed, recipe.rollout.max_errors, out is not None, replays
    )


def problem_of(check: Callable[..., None], *given: Any) -> list[BurnishError]:
    """Call a check; return a list with the BurnishError that it raises, or an empty list if it
    raises none."""
    try:
        check(*given)
    except BurnishError as error:
        return [error]
    return []


def raise_problems(found: Sequence[BurnishError]) -> None:
    """Raise the problem if ``found`` has one, or a RunError that lists all of them if it has
    several. Do nothing if it is empty."""
    if len(found) == 1:
        raise found[0]
    if found:
        raise RunError("\n".join(["this run can't start:", *(f"- {error}" for error in found)]))


def is_installed(extra: str) -> bool:
    """Return whether the package of an extra, a key of `EXTRAS`, can be imported."""
    return importlib.util.find_spec(EXTRAS[extra][0]) is not None


def missing_packages(extra: str) -> list[str]:
    """Return the packages of an extra that are not installed, by the metadata of this package; []
    if it has no metadata, because it is not installed itself."""
    with suppress(PackageNotFoundError):
        marker = re.compile(rf"extra == ['\"]{extra}['\"]")
        needed = [line for line in requires("burnish") or () if marker.search(line)]
        names = [re.split(r"[^\w.-]", line, maxsplit=1)[0] for line in needed]
        return [name for name in names if not any(distributions(name=name))]
    return []


def require_extra(extra: str, needed_by: str) -> None:
    """Raise a MissingExtra error unless an extra, a key of `EXTRAS`, is installed. ``needed_by``
    names the setting or command that needs it, for the message."""
    if not is_installed(extra):
        raise MissingExtra(extra, needed_by)


def check_rate(model: AnyModel, train: TrainConfig, is_supervised: bool) -> None:
    """Raise a ConfigError if a pretrained model would be trained at the default learning rate,
    which suits small models that start from random weights."""
    if not model.is_pretrained or train.has_own_rate:
        return
    rate = "1e-4" if isinstance(train.learn, LoraLearns) else "1e-5" if is_supervised else "1e-6"
    raise ConfigError(
        f"train.learning_rate has no default for a pretrained model, as '{model.name}' is; begin "
        f"with train.learning_rate = {rate}"
    )


def check_task_extras(tasks: Mapping[str, Any]) -> None:
    """Raise a MissingExtra error if a task, or the format of its data, needs an extra that is not
    installed."""
    for task in tasks.values():
        if isinstance(task, MathTask):
            require_extra("math", "task.name = 'math'")
        if isinstance(task, GymTask):
            require_extra("gym", f"the generator {task.generator}")
        if isinstance(task, VerifiersTask):
            require_verifiers()
        if isinstance(task, AgentsTask) and not all(map(is_installed, ("agents", "serve"))):
            raise MissingExtra("agents", f"task.name = '{task.name}'")  # it includes "serve"
        for key, name in files_of_task(task).items():
            if name is not None and parse_data_name(name).is_table:
                require_extra("data", f"task.{key} = {name!r}")


def check_model_extra(model: Model) -> None:
    """Raise a MissingExtra error if a model, or the model that a run started from, is named by
    hf:ORG/NAME and the extra for Hugging Face's hub is not installed."""
    files = first_model(model).files
    if files.startswith("hf:"):
        require_extra("hf", f"the model {files}")


def check_engine(engine: AnyEngine) -> None:
    """Raise an error if the engine's Python lacks a package, or if an environment variable with the
    engine's token or key is not set."""
    if engine.url is not None and engine.name != "sglang":
        check_token(engine.url)
    read_key(engine.key, engine.url)
    if engine.is_apart and engine.url is None:
        check_packages(engine.name, engine.python)


def check_files(tasks: Mapping[str, Any]) -> None:
    """Raise a DataError, with the command that writes them if it is known, if data files of the
    tasks do not exist."""
    absent = _missing_files(tasks)
    if absent:
        named = " and ".join(f"{key} = {file!r}" for key, file in absent.items())
        made = _commands(tasks)
        remedy = f"first: {made[0]}" if made else f"name files that exist; rows are {FORMS}"
        raise DataError(f"{named} can't be read: no such file; {remedy}")


def check_live(tasks: Mapping[str, Any]) -> None:
    """Raise a ConfigError if a task may run more environments at once than this machine allows
    processes."""
    for key, task in tasks.items():
        if isinstance(task, EnvironmentTask | AgentsTask):
            most = hardware.processes() - SPARE_PROCESSES
            if task.live > most:
                raise ConfigError(
                    f"{key}.live = {task.live} exceeds the processes that this machine allows "
                    f"({most} more; see ulimit -u, ulimit -n and the container's pids.max); use "
                    f"{key}.live = {max(1, most)}, or raise the limit"
                )


def check_rows(
    tasks: Mapping[str, Any],
    seed: int,
    max_errors: float,
    trains: bool = True,
    must_replay: bool = False,
) -> None:
    """Raise an error if a row lacks a field that its task needs, if a reward can't be found or
    fails for made-up responses (see ``trial.try_reward``), if an environment can't be loaded or
    reset, or if a judge does not answer a test request. ``trains``: also if no training row is
    left. ``must_replay``: also if an environment can't be replayed."""
    from burnish.tasks import agent, environment, judged, math, pairs, rows, taskset, text

    for task in tasks.values():
        if isinstance(task, FilesTask):
            chosen = text.rewards_of(task)
            for reward in chosen:
                if isinstance(reward, str):
                    rewards.check_reward_source(reward)
            loaded = rows.load_rows(task, seed=seed)
            row = next(row for part in loaded for row in part)
            for reward in chosen:
                trial.try_reward(reward, text.limits_of(task), dict(row), max_errors)
        if task.name in pairs.CHECKS:
            loaded = rows.load_rows(task, seed=seed, check=pairs.CHECKS[task.name])
        if isinstance(task, MathTask):
            loaded = math.load_math_rows(task, seed=seed)
        if isinstance(task, JudgedTask):
            loaded = rows.load_rows(task, seed=seed, check=partial(judged.check_judged, task))
        if isinstance(task, EnvironmentTask):
            loaded = environment.load_starts(task, seed)
            row = next(row for part in loaded for row in part)
            environment.try_environment(task, row, must_replay=must_replay)
            if task.reward is not None:
                rewards.check_reward_source(task.reward)
            if task.reward is not None and task.environment is None:
                tried = environment.row_with_messages(row["row"])
                trial.try_reward(task.reward, environment.reward_limits(task), tried, max_errors)
        if isinstance(task, VerifiersTask):
            loaded = taskset.load_task_rows(task, seed)
        if isinstance(task, AgentTask):
            loaded = agent.load_agent_rows(task, seed)
            agent.try_agent(task)
        if isinstance(task, RowsTask) and trains:
            rows.check_trainable(*loaded)
        if isinstance(task, JudgedTask | EnvironmentTask) and task.judge is not None:
            judge.Judge(task.judge).check()


def check_model(model: Model) -> None:
    """Raise an error if a model that can't be downloaded, or the checkpoint of a run, is not on
    this machine. Names that begin with "hf:" are only parsed."""
    from burnish.model import hub

    name, path = model.files, Path(model.files).expanduser()
    is_bytes = name == hub.BYTES and isinstance(model, ScratchConfig)
    if not name or name == hub.DEFAULT or is_bytes:
        return
    if name.startswith("hf:"):
        hub.check_hub_name(name)
    elif run := read_run_recipe(model):
        checkpoints.find_checkpoint(path, "last")  # it raises if there is none
        check_model(run.model)
    elif missing := missing_run(name):
        command = f"burnish {'sft' if missing.is_supervised else 'train'} {missing.name}"
        commands = "; ".join([*_commands(missing.tasks), command])
        raise ModelError(f"{name} is a run that does not exist yet; make it with: {commands}")
    elif not path.exists():
        hub.resolve_model(name)  # its error lists the names that a model may have


def check_chat(tasks: Mapping[str, Any], model: Model) -> None:
    """Raise a ModelError if a task formats the prompts of its rows as chat messages and the model,
    if it is on this machine, has no chat template."""
    from burnish.model import hub

    graded = {key: one for key, one in tasks.items() if isinstance(one, FilesTask | JudgedTask)}
    chats = [key for key, task in graded.items() if task.chat]
    name = first_model(model).files
    if chats and name and hub.has_chat_template(name) is False:
        unset = " and ".join(f"{key}.chat = false" for key in chats)
        raise ModelError(
            f"{name} has no chat template, which {chats[0]}.chat = true needs; set {unset}, so "
            "that prompts are plain texts, or name a model with a chat template"
        )


def check_adapter(adapter: str | None, learn: AnyLearning) -> None:
    """Raise an error if ``adapter`` is not a directory in PEFT's layout, or if LoRA would continue
    to train it with another rank or alpha."""
    from burnish.model import peft

    if adapter is None:
        return
    found = peft.read_adapter_config(adapter)
    if isinstance(learn, LoraLearns):
        given = {"rank": learn.rank, "alpha": learn.alpha}
        own = {"rank": found["r"], "alpha": found["lora_alpha"]}
        for key in (key for key in own if own[key] != given[key]):
            raise ConfigError(
                f"train.learn.{key} = {given[key]:g} must equal the {key} of model.adapter = "
                f"'{adapter}', whose training continues; use {own[key]:g}"
            )


def missing_run(name: str) -> Recipe | None:
    """Return the built-in recipe of a run that does not exist yet, such as runs/RECIPE-1.

    None if the name is not of this form, or if the run exists.
    """
    match = _RUN.fullmatch(name)
    is_run = match and match[1] in list_recipes() and not Path(name).exists()
    return load_recipe(match[1]) if match and is_run else None


def read_run_recipe(model: Model) -> Recipe | None:
    """Return the recipe of the run that a model names; None if the model is not a run."""
    file = Path(model.files).expanduser() / "recipe.toml"
    is_run = isinstance(model, LanguageConfig) and file.is_file()
    return load_recipe(file) if is_run else None


def first_model(model: Model) -> Model:
    """Return the model that training started from: the model itself or, if it is a run, the first
    model of that run, and so on through runs that started from runs."""
    run = read_run_recipe(model)
    return model if run is None else first_model(run.model)


def _commands(tasks: Mapping[str, Any]) -> list[str]:
    """Return the commands that write the missing files of a built-in recipe."""
    folders = [Path(file).parts[0] for file in _missing_files(tasks).values()]
    return list(dict.fromkeys(COMMANDS[folder] for folder in folders if folder in COMMANDS))


def _missing_files(tasks: Mapping[str, Any]) -> dict[str, str]:
    files = {f"{s}.{k}": file for s, t in tasks.items() for k, file in files_of_task(t).items()}
    return {key: file for key, file in files.items() if file and parse_data_name(file).is_missing}


def files_of_task(task: Any) -> dict[str, str | None]:
    """Return the names of a task's training and validation data (files, datasets), by the settings
    "train" and "validation"; a name is None if the setting is, or if the data is not read. Return
    an empty dict for a task that reads no rows."""
    if not isinstance(task, RowsTask):
        return {}
    return {"train": task.train, "validation": task.validation if task.is_validated else None}


def as_rows(prompts: Iterable[str | Mapping[str, Any]]) -> list[Any]:
    """Convert a script's prompts to rows that can be written to the run's JSONL file: a text
    becomes a row with this "prompt", a mapping is copied. Raise a DataError if ``prompts`` is a
    single text or mapping, if it is empty, or if JSON can't represent a value."""
    if isinstance(prompts, str | Mapping):
        raise DataError(
            f"prompts must be a list of texts or rows, got one, {prompts!r}; write "
            f"prompts=[{prompts!r}], or give the name of a file as data"
        )
    rows = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
    if not rows:
        raise DataError("prompts is empty; give at least one prompt or row")
    try:
        return [json.loads(json.dumps(row, default=dict)) for row in rows]
    except (TypeError, ValueError) as error:
        raise DataError(
            "prompts may contain only texts, numbers, lists and dicts, because a run stores its "
            f"rows as JSON: {error}; change the row, or look up other objects in the reward"
        ) from None
