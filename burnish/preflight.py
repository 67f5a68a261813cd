"""Problems that would make a run fail, found before its first second: packages that are not
installed, files and first runs that are missing, too little disk or memory. No torch is loaded."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from burnish import config
from burnish.errors import BurnishError, ConfigError, DataError, MissingExtra, ModelError, RunError
from burnish.graders import rewards
from burnish.plan import Need, spell
from burnish.runs import checkpoints
from burnish.runs.directory import check_new
from burnish.schema import (
    FilesTask,
    GymTask,
    LanguageConfig,
    MathTask,
    PairsTask,
    Recipe,
    Rows,
    SorterConfig,
)

EXTRAS = {
    "math": ("math_verify", "grading answers of math tasks"),
    "gym": ("reasoning_gym", "questions that a generator makes (arithmetic)"),
    "hf": ("huggingface_hub", "models by hf:ORG/NAME"),
    "datasets": ("datasets", "rows by hf:ORG/NAME/SPLIT"),
    "tensorboard": ("tensorboard", "events of runs for TensorBoard; none is needed to run"),
    "ray": ("ray", "several machines; no recipe uses it yet"),
    "vllm": ("vllm", "another engine; no recipe uses it yet"),
}
"""The optional parts of the package: for each, a module that it installs, and its purpose."""
MADE = {
    "sums": "python examples/write_sums.py sums",
    "sentences": "python examples/write_keywords.py sentences --recipe keywords-scratch",
}
"""Directories that recipes read, and the commands that write them."""
REMEDIES = {
    "memory": "end other programs, lower engine.kv_mb, or use a smaller model or a larger machine",
    "cache": "lower engine.kv_mb",
    "disk": "make room, choose another --out, or lower checkpoint.keep",
}
"""What to do about too little of each resource."""
_RUN = re.compile(r"runs/([\w.-]+)-\d+")


def check(recipe: Recipe, path: Path | None = None) -> None:
    """Raises if ``problems`` finds any."""
    raise_all(problems(recipe, path))


def problems(recipe: Recipe, path: Path | None = None) -> list[BurnishError]:
    """Packages, files and models that are missing, and rows and rewards that are not usable.

    ``path`` is the directory of a new run; None if nothing is trained.
    """
    found: list[BurnishError] = []
    if path is not None:
        with _collecting(found):
            check_new(path)
    absent = [*missing_extras(recipe), *missing_files(recipe)]
    if not absent:
        for task in recipe.tasks:
            with _collecting(absent):
                _check_rows(task, recipe.seed)
    return [*found, *absent, *missing_model(recipe)]


@contextmanager
def _collecting(found: list[BurnishError]) -> Iterator[None]:
    """Keeps an error of the block instead of raising it."""
    try:
        yield
    except BurnishError as error:
        found.append(error)


def _check_rows(task: Any, seed: int) -> None:
    """Raises if a row lacks a field that its task needs, or if a reward is missing."""
    from burnish.tasks import files, math, pairs, rows

    if isinstance(task, FilesTask):
        reward = files.reward_of(task)
        if isinstance(reward, str):
            rewards.check(reward)
        rows.rows_of(task, seed=seed)
    if isinstance(task, PairsTask):
        rows.rows_of(task, seed=seed, check=pairs.check_pair)
    if isinstance(task, MathTask) and len(_files_of(task)) == 2:  # none comes from a hub
        math.rows_of(task, seed=seed)


def is_installed(extra: str) -> bool:
    return importlib.util.find_spec(EXTRAS[extra][0]) is not None


def missing_extras(recipe: Recipe) -> list[BurnishError]:
    source, needed = origin(recipe).source, []  # (an extra, the setting that needs it)
    for task in recipe.tasks:
        if isinstance(task, MathTask):
            needed.append(("math", "task.name = 'math'"))
            hubs = [rows for rows in (task.train, task.validation or "") if rows.startswith("hf:")]
            needed += [("datasets", f"reading {rows}") for rows in hubs]
        if isinstance(task, GymTask):
            needed.append(("gym", f"the generator {task.generator}"))
    if source.startswith("hf:"):
        needed.append(("hf", f"the model {source}"))
    return [MissingExtra(extra, what) for extra, what in needed if not is_installed(extra)]


def missing_files(recipe: Recipe) -> list[BurnishError]:
    found: list[BurnishError] = []
    for task in recipe.tasks:
        absent = {key: file for key, file in _files_of(task).items() if not _exists(file)}
        if absent:
            told = " and ".join(f"task.{key} = {file!r}" for key, file in absent.items())
            remedy = _made(recipe) or ["give rows as JSONL files by these names"]
            found.append(DataError(f"{told} can't be read: no such file; first: {remedy[0]}"))
    return found


def missing_model(recipe: Recipe) -> list[BurnishError]:
    from burnish.model import hub

    name, found = recipe.source, list[BurnishError]()
    path = Path(name).expanduser()
    if not name or name in hub.PACKAGED or name.startswith("hf:"):
        return []
    if (path / "recipe.toml").is_file():
        if checkpoints.latest(path) is None:
            return [RunError(f"{path} has no checkpoint yet; train on, or resume it")]
        return missing_model(origin(recipe))
    if first := first_run(name):
        command = f"burnish {'sft' if first.is_supervised else 'train'} {first.name}"
        made = "; ".join([*_made(first), command])
        return [ModelError(f"{name} is a run that is not there yet; make it with: {made}")]
    if not path.exists():
        with _collecting(found):
            hub.resolve(name)  # its error lists the names that a model may have
    return found


def first_run(name: str) -> Recipe | None:
    """The recipe whose run a model's name, such as runs/RECIPE-1, means; None if it is no run, or
    if the run is there."""
    match = _RUN.fullmatch(name)
    is_run = match and match[1] in config.list_recipes() and not Path(name).exists()
    return config.load(match[1]) if match and is_run else None


def _made(recipe: Recipe) -> list[str]:
    """The commands that write the missing files of a recipe of the package."""
    files = [file for task in recipe.tasks for file in _files_of(task).values()]
    absent = [Path(file).parts[0] for file in files if file and not _exists(file)]
    return list(dict.fromkeys(MADE[folder] for folder in absent if folder in MADE))


def _exists(file: str | None) -> bool:
    return file is None or Path(file).exists()


def lacking(needs: Sequence[Need], free: Mapping[str, int]) -> list[BurnishError]:
    """An error for each resource of which more bytes are needed than there are."""
    found: list[BurnishError] = []
    for resource, there in free.items():
        parts = sorted((need.size, need.what) for need in needs if need.resource == resource)
        needed = sum(size for size, _ in parts)
        if needed > there:
            most = ", ".join(f"{what} {spell(size)}" for size, what in reversed(parts[-3:]))
            told = f"the run needs {spell(needed)} of {resource} (the most: {most}), and "
            found.append(RunError(f"{told}{spell(there)} are there; {REMEDIES[resource]}"))
    return found


def _files_of(task: Any) -> dict[str, str | None]:
    """The JSONL files of a task by their setting; rows from a hub are no files."""
    if not isinstance(task, Rows | MathTask):
        return {}
    files = {"train": task.train, "validation": task.validation}
    return {key: file for key, file in files.items() if not (file or "").startswith("hf:")}


def origin(recipe: Recipe) -> Recipe:
    """The recipe that made the model first: the recipe itself unless its model is a run."""
    model, file = recipe.model, Path(recipe.source).expanduser() / "recipe.toml"
    if not isinstance(model, LanguageConfig) or not file.is_file():
        return recipe
    first = origin(config.load(file))
    if isinstance(first.model, SorterConfig):
        raise ConfigError(f"{model.name} trained the sorting model, which is not a language model")
    made = first.model.model_copy(update={"fp32_head": model.fp32_head})
    return first.model_copy(update={"model": made})


def raise_all(found: Sequence[BurnishError]) -> None:
    """Raises one problem as it is, and several as one error."""
    if len(found) == 1:
        raise found[0]
    if found:
        raise RunError("\n".join(["this run can't start:", *(f"- {error}" for error in found)]))
