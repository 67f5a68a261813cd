"""What can be refused before a run loads anything: without a model, and without torch.

A run takes seconds to load; a wrong path or a missing package shall not wait for that.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from burnish import config
from burnish.config import (
    FilesTask,
    GymTask,
    LanguageConfig,
    MathTask,
    MixtureTask,
    PairsTask,
    Recipe,
    ScratchConfig,
)
from burnish.errors import ConfigError, MissingExtra, ModelError, RunError
from burnish.graders import rewards
from burnish.model import hub
from burnish.runs import checkpoint
from burnish.runs.directory import check_new

Prompts = Iterable[str | Mapping[str, Any]] | None


def check_before(
    recipe: Recipe,
    path: Path,
    *,
    prompts: Prompts = None,
    reward: rewards.Reward | str | None = None,
) -> None:
    """Raises for what is wrong with a new run: its directory, model, data, reward and packages."""
    check_new(path)
    if recipe.engine.name != "native":
        raise ConfigError("engine.name = 'hf' is for `burnish eval`; training needs 'native'")
    check_sources(recipe, prompts=prompts, reward=reward)


def check_sources(
    recipe: Recipe, *, prompts: Prompts = None, reward: rewards.Reward | str | None = None
) -> None:
    """Raises where a recipe's model, data, reward or packages are not there or not usable."""
    given = prompts is not None or reward is not None
    if given and not isinstance(recipe.task, FilesTask):
        raise ConfigError(
            f"prompts and reward have no effect with task.name = '{recipe.task.name}'; load the "
            "recipe with task.name = 'files', or pass its name"
        )
    if isinstance(recipe.model, LanguageConfig):
        _check_model("model.name", recipe.model.name)
    if isinstance(recipe.model, ScratchConfig):
        _check_model("model.tokenizer", recipe.model.tokenizer)
    if recipe.engine.name == "hf":
        need("transformers", "hf", "engine.name = 'hf'")
    task = recipe.task
    for part in task.tasks.values() if isinstance(task, MixtureTask) else [task]:
        _check_task(part, recipe.seed, prompts, reward)


def need(package: str, extra: str, needed_for: str) -> None:
    """Raises where a package is not installed; it is not imported."""
    if importlib.util.find_spec(package) is None:
        raise MissingExtra(extra, needed_for)


def first_run(name: str) -> str | None:
    """The commands that make the run which a model's name means; None if no recipe makes it."""
    match = re.fullmatch(r"(?:.*/)?(.+)-\d+", name)
    if match is None or match[1] not in config.list_recipes():
        return None
    recipe = config.load(match[1])
    if not isinstance(recipe.task, PairsTask) or recipe.task.train is None:
        return f"burnish train {match[1]}"
    data = Path(recipe.task.train)
    commands = [] if data.exists() else re.findall(r"burnish data [\w -]+", recipe.description)
    given = data if recipe.task.validation is None else data.parent
    return "; ".join([*commands, f"burnish sft {match[1]} --data {given}"])


def _check_model(setting: str, name: str) -> None:
    if name in hub.PACKAGED:
        return
    if name.startswith("hf:"):
        need("huggingface_hub", "hf", f"the model {name}")
        return
    path = Path(name).expanduser()
    if not path.exists():
        commands = first_run(name)
        if commands is not None:
            raise ModelError(
                f"{setting} = '{name}' is a run that is not there yet; make it first with: "
                f"{commands}"
            )
        hub.resolve(name)  # which says what a model's name may be
    if (path / "recipe.toml").is_file() and checkpoint.latest(path) is None:
        raise RunError(f"{path} has no checkpoint yet; train on, or resume it")


def _check_task(
    task: Any, seed: int, prompts: Prompts, reward: rewards.Reward | str | None
) -> None:
    from burnish.tasks import files, math, pairs

    if isinstance(task, FilesTask):
        chosen = files.reward_of(task, reward)
        if isinstance(chosen, str):
            rewards.check(chosen)
        files.rows_of(task, seed=seed, prompts=prompts)
    if isinstance(task, PairsTask):
        files.rows_of(task, seed=seed, check=pairs.check_pair)
    if isinstance(task, GymTask):
        need("reasoning_gym", "gym", f"the generator {task.generator}")
    if isinstance(task, MathTask):
        need("math_verify", "math", "task.name = 'math'")
        sources = [task.train] if task.validation is None else [task.train, task.validation]
        if any(source.startswith("hf:") for source in sources):
            need("datasets", "datasets", f"reading {sources[0]}")
        else:
            math.rows_of(task, seed=seed)
