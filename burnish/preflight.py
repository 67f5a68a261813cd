"""Problems that would make a run fail, found before its first second: packages that are not
installed, files and first runs that are missing, too little disk or memory. No torch is loaded."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

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

Prompts = Iterable[str | Mapping[str, Any]] | None
Given = rewards.Reward | str | None
"""A reward that a script gives; None if the recipe's own reward is meant."""


class Extra(NamedTuple):
    """An optional part of the package."""

    modules: tuple[str, ...]
    """The modules that it installs."""
    purpose: str


EXTRAS = {
    "math": Extra(
        ("math_verify", "latex2sympy2_extended", "antlr4"), "grading answers of math tasks"
    ),
    "gym": Extra(("reasoning_gym",), "questions that a generator makes (arithmetic)"),
    "hf": Extra(("transformers", "huggingface_hub"), "models by hf:ORG/NAME"),
    "tensorboard": Extra(("tensorboard",), "events of runs for TensorBoard; none is needed to run"),
    "ray": Extra(("ray",), "several machines; no recipe uses it yet"),
    "vllm": Extra(("vllm",), "another engine; no recipe uses it yet"),
}
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


def check(
    recipe: Recipe, path: Path | None = None, *, prompts: Prompts = None, reward: Given = None
) -> None:
    """Raises if ``problems`` finds any."""
    raise_all(problems(recipe, path, prompts=prompts, reward=reward))


def problems(
    recipe: Recipe, path: Path | None = None, *, prompts: Prompts = None, reward: Given = None
) -> list[BurnishError]:
    """Packages, files and models that are missing, and rows and rewards that are not usable.

    ``path`` is the directory of a new run; None if nothing is trained.
    """
    found: list[BurnishError] = []
    if path is not None:
        with _collecting(found):
            check_new(path)
    absent = [*missing_extras(recipe), *missing_files(recipe, has_rows=prompts is not None)]
    if not absent:
        for task in recipe.tasks:
            with _collecting(absent):
                _check_rows(task, recipe.seed, prompts, reward)
    return [*found, *absent, *missing_model(recipe)]


@contextmanager
def _collecting(found: list[BurnishError]) -> Iterator[None]:
    """Keeps an error of the block instead of raising it."""
    try:
        yield
    except BurnishError as error:
        found.append(error)


def _check_rows(task: Any, seed: int, prompts: Prompts, reward: Given) -> None:
    """Raises if a row lacks what its task needs, or if a reward is missing."""
    from burnish.tasks import math, pairs, rows, text

    if isinstance(task, FilesTask):
        chosen = text.reward_of(task, reward)
        if isinstance(chosen, str):
            rewards.check(chosen)
        rows.rows_of(task, seed=seed, prompts=prompts)
    if isinstance(task, PairsTask) and prompts is None:
        rows.rows_of(task, seed=seed, check=pairs.check_pair)
    if isinstance(task, MathTask):
        math.rows_of(task, seed=seed)


def is_installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def missing_extras(recipe: Recipe) -> list[BurnishError]:
    source, needed = origin(recipe).source, []  # (an extra, what needs it)
    for task in recipe.tasks:
        if isinstance(task, MathTask):
            needed.append(("math", "task.name = 'math'"))
        if isinstance(task, GymTask):
            needed.append(("gym", f"the generator {task.generator}"))
    if source.startswith("hf:"):
        needed.append(("hf", f"the model {source}"))
    absent = {name for name, extra in EXTRAS.items() if not is_installed(*extra.modules)}
    return [MissingExtra(extra, what) for extra, what in needed if extra in absent]


def missing_files(recipe: Recipe, *, has_rows: bool = False) -> list[BurnishError]:
    found: list[BurnishError] = []
    for task in recipe.tasks:
        files = _files_of(task)
        if has_rows:
            files.pop("train", None)
        absent = {key: file for key, file in files.items() if file and not Path(file).exists()}
        if absent:
            told = " and ".join(f"task.{key} = {file!r}" for key, file in absent.items())
            remedy = _made(recipe) or ["give rows as JSONL files by these names"]
            found.append(DataError(f"{told} can't be read: no such file; first: {remedy[0]}"))
    return found


def missing_model(recipe: Recipe) -> list[BurnishError]:
    from burnish.model import hub

    name, found = recipe.source, list[BurnishError]()
    path = Path(name).expanduser()
    if not name or name == hub.DEFAULT or name.startswith("hf:"):
        return []
    if (path / "recipe.toml").is_file():
        if checkpoints.latest(path) is None:
            return [RunError(f"{path} has no checkpoint yet; train on, or resume it")]
        return missing_model(origin(recipe))
    with _collecting(found):
        if first := first_run(name):
            command = f"burnish {'sft' if first.is_supervised else 'train'} {first.name}"
            made = "; ".join([*_made(first), command])
            raise ModelError(f"{name} is a run that is not there yet; make it with: {made}")
        if not path.exists():
            hub.resolve(name)  # its error says what a model's name may be
    return found


def first_run(name: str) -> Recipe | None:
    """The recipe whose run a model's name, such as runs/RECIPE-1, means; None if it is no run, or
    if the run is there."""
    match = _RUN.fullmatch(name)
    is_run = match and match[1] in config.list_recipes() and not Path(name).exists()
    return config.load(match[1]) if match and is_run else None


def _made(recipe: Recipe) -> list[str]:
    """The commands that write the missing files of a recipe of the package."""
    files = [file for task in recipe.tasks for file in _files_of(task).values() if file]
    absent = [Path(file).parts[0] for file in files if not Path(file).exists()]
    return list(dict.fromkeys(MADE[folder] for folder in absent if folder in MADE))


def lacking(needs: Sequence[Need], free: Mapping[str, int]) -> list[BurnishError]:
    """An error for each resource of which more bytes are needed than there are."""
    found: list[BurnishError] = []
    for resource, there in free.items():
        parts = sorted((need.size, need.what) for need in needs if need.resource == resource)
        needed = sum(size for size, _ in parts)
        if needed > there:
            most = ", ".join(f"{what} {spell(size)}" for size, what in reversed(parts[-3:]))
            found.append(
                RunError(
                    f"the run needs {spell(needed)} of {resource} (the most: {most}), and "
                    f"{spell(there)} are there; {REMEDIES[resource]}"
                )
            )
    return found


def _files_of(task: Any) -> dict[str, str | None]:
    """The JSONL files of a task by their setting."""
    if not isinstance(task, Rows):
        return {}
    return {"train": task.train, "validation": task.validation}


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
