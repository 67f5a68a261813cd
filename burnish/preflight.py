"""Problems that would make a run fail, found before its first second: packages that are not
installed, files and first runs that are missing, too little disk or memory. No torch is loaded."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from burnish import config
from burnish.config import (
    FilesTask,
    GymTask,
    LanguageConfig,
    MathTask,
    PairsTask,
    Recipe,
    Rows,
    ScratchConfig,
    SorterConfig,
)
from burnish.errors import BurnishError, ConfigError, DataError, MissingExtra, ModelError, RunError
from burnish.graders import rewards
from burnish.plan import CACHE, disk_bytes, memory_parts, spell
from burnish.runs import checkpoints
from burnish.runs.directory import check_new

if TYPE_CHECKING:
    from burnish.plan import Size

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
    "datasets": Extra(("datasets",), "rows by hf:ORG/NAME/SPLIT"),
    "tensorboard": Extra(("tensorboard",), "events of runs for TensorBoard; none is needed to run"),
    "ray": Extra(("ray",), "several machines; no recipe uses it yet"),
    "vllm": Extra(("vllm",), "another engine; no recipe uses it yet"),
}
MADE = {
    "sums": "python examples/write_sums.py sums",
    "sentences": "python examples/write_keywords.py sentences --recipe keywords-scratch",
}
"""Directories that recipes read, and the commands that write them."""
_RUN = re.compile(r"runs/([\w.-]+)-\d+")


def check_before(
    recipe: Recipe, path: Path, *, prompts: Prompts = None, reward: Given = None
) -> None:
    """Raises if the directory, model, data, reward or packages of a new run have a problem."""
    found = before(recipe, path, prompts=prompts, reward=reward)
    raise_all([*found, *lacking_disk(recipe, path, None)])


def before(
    recipe: Recipe, path: Path, *, prompts: Prompts = None, reward: Given = None
) -> list[BurnishError]:
    """All problems of a new run that are seen without torch, except too little disk or memory."""
    found: list[BurnishError] = []
    with _collecting(found):
        check_new(path)
    return [*found, *problems(recipe, prompts=prompts, reward=reward)]


def check_sources(recipe: Recipe, *, prompts: Prompts = None, reward: Given = None) -> None:
    """Raises if a recipe's model, data, reward or packages are missing or not usable."""
    raise_all(problems(recipe, prompts=prompts, reward=reward))


def problems(
    recipe: Recipe, *, prompts: Prompts = None, reward: Given = None
) -> list[BurnishError]:
    """Packages, files and models that are missing, and rows and rewards that are not usable."""
    takes = isinstance(recipe.task, FilesTask) or (recipe.is_supervised and reward is None)
    if (prompts is not None or reward is not None) and not takes:
        return [
            ConfigError(
                f"prompts and reward have no effect with task.name = '{recipe.task.name}'; load "
                "the recipe with task.name = 'files', or pass its name"
            )
        ]
    found = missing_extras(recipe)
    absent = missing_files(recipe, has_rows=prompts is not None)
    if not found and not absent:
        for task in recipe.tasks:
            with _collecting(found):
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
    from burnish.tasks import files, math, pairs, rows

    if isinstance(task, FilesTask):
        chosen = files.reward_of(task, reward)
        if isinstance(chosen, str):
            rewards.check(chosen)
        rows.rows_of(task, seed=seed, prompts=prompts)
    if isinstance(task, PairsTask) and prompts is None:
        rows.rows_of(task, seed=seed, check=pairs.check_pair)
    if isinstance(task, MathTask) and len(_files_of(task)) == 2:  # none comes from a hub
        math.rows_of(task, seed=seed)


def is_installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def missing_extras(recipe: Recipe) -> list[BurnishError]:
    needs: list[tuple[str, tuple[str, ...], str]] = []  # an extra, its modules, what needs them
    for task in recipe.tasks:
        if isinstance(task, MathTask):
            needs.append(("math", EXTRAS["math"].modules, "task.name = 'math'"))
            sources = [task.train, task.validation or ""]
            rows = [source for source in sources if source.startswith("hf:")]
            needs += [("datasets", ("datasets",), f"reading {source}") for source in rows]
        if isinstance(task, GymTask):
            needs.append(("gym", ("reasoning_gym",), f"the generator {task.generator}"))
    source = _model_source(origin(recipe))
    if source.startswith("hf:"):
        needs.append(("hf", ("huggingface_hub",), f"the model {source}"))
    if recipe.log.tensorboard:
        needs.append(("tensorboard", ("tensorboard",), "log.tensorboard = true"))
    return [MissingExtra(extra, what) for extra, parts, what in needs if not is_installed(*parts)]


def missing_files(recipe: Recipe, *, has_rows: bool = False) -> list[BurnishError]:
    found: list[BurnishError] = []
    for task in recipe.tasks:
        files = _files_of(task)
        if has_rows:
            files.pop("train", None)
        if "train" in files and files["train"] is None:
            found.append(
                ConfigError("there are no prompts; give --data FILE.jsonl or set task.train")
            )
        absent = {key: file for key, file in files.items() if file and not Path(file).exists()}
        if absent:
            named = " and ".join(f"task.{key} = {file!r}" for key, file in absent.items())
            command = MADE.get(Path(next(iter(absent.values()))).parts[0])
            remedy = (
                f"first run: {command}" if command else "give rows as JSONL files by these names"
            )
            found.append(DataError(f"{named} can't be read: no such file; {remedy}"))
    return found


def missing_model(recipe: Recipe) -> list[BurnishError]:
    from burnish.model import hub

    name = _model_source(recipe)
    if not name or name in hub.PACKAGED or name.startswith("hf:"):
        return []
    path = Path(name).expanduser()
    if (path / "recipe.toml").is_file():
        if checkpoints.latest(path) is None:
            return [RunError(f"{path} has no checkpoint yet; train on, or resume it")]
        return missing_model(origin(recipe))
    if path.exists():
        return []
    first = first_run(name)
    if first is None:
        try:
            hub.resolve(name)
        except ModelError as error:  # it says what a model's name may be
            return [error]
        return []
    return [
        ModelError(
            f"model.name = {name!r} is a run that is not there yet; make it with: "
            f"{'; '.join(commands(first))}"
        )
    ]


def first_run(name: str) -> Recipe | None:
    """The recipe whose run a model's name, such as runs/RECIPE-1, means; None if it is no run."""
    match = _RUN.fullmatch(name)
    return config.load(match[1]) if match and match[1] in config.list_recipes() else None


def commands(recipe: Recipe) -> list[str]:
    """The commands that run a recipe of the package, after those that write its missing files."""
    files = [file for task in recipe.tasks for file in _files_of(task).values() if file]
    absent = [Path(file).parts[0] for file in files if not Path(file).exists()]
    written = dict.fromkeys(MADE[folder] for folder in absent if folder in MADE)
    return [*written, f"burnish {'sft' if recipe.is_supervised else 'train'} {recipe.name}"]


def lacking_disk(recipe: Recipe, path: Path, size: Size | None) -> list[BurnishError]:
    """An error if the disk has too little room for the rows and checkpoints still to be written."""
    rows, files, each = disk_bytes(recipe, size)
    there = len(list((path / "checkpoints").glob("step-*")))
    needed = rows + max(1, files - there) * (each or 0)
    folder = next(p for p in (path.absolute(), *path.absolute().parents) if p.is_dir())
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return []
    saved = "" if each is None else f" ({files} checkpoints of {spell(each)})"
    return [
        RunError(
            f"the run writes up to {spell(needed)}{saved} to {path}, and {spell(free)} are free "
            "there; make room, choose another --out, or lower checkpoint.keep"
        )
    ]


def lacking_memory(
    recipe: Recipe,
    size: Size | None,
    available: int,
    device: str = "cpu",
    *,
    total: int | None = None,
) -> list[BurnishError]:
    """Memory for what is held all the time. On a CPU the cache takes memory only as it fills, and
    must fit the ``total``; None if that is not known."""
    held = memory_parts(recipe, size)
    parts = {
        f"{who}'s {what}": count
        for who, of in held.items()
        for what, count in of.items()
        if device != "cpu" or not what.startswith(CACHE)
    }
    found = lacking_cache(recipe, total) if device == "cpu" and "engine" in held else []
    needed = sum(parts.values())
    if needed <= available:
        return found
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    told = ", ".join(f"{what} {spell(count)}" for what, count in largest)
    lower = "lower engine.kv_mb, " if any(CACHE in what for what, _ in largest) else ""
    return [
        *found,
        RunError(
            f"the run needs {spell(needed)} of {_MEMORY[device]} and more for activations (the "
            f"most: {told}), and {spell(available)} are free; end other programs, {lower}or use a "
            "smaller model or a larger machine"
        ),
    ]


def lacking_cache(recipe: Recipe, most: int | None) -> list[BurnishError]:
    """``most`` are the bytes that the engine's cache can have; None if that is not known."""
    asked = recipe.engine.kv_mb * 2**20
    if most is None or asked <= most or isinstance(recipe.model, SorterConfig):
        return []
    return [
        ConfigError(
            f"engine.kv_mb = {recipe.engine.kv_mb} asks for {spell(asked)}, and the machine has "
            f"{spell(most)} of memory; use less than {most // 2**20}"
        )
    ]


_MEMORY = {"cpu": "memory", "cuda": "GPU memory"}


def _files_of(task: Any) -> dict[str, str | None]:
    """The JSONL files of a task by their setting; rows from a hub are no files."""
    if not isinstance(task, Rows | MathTask):
        return {}
    files = {"train": task.train, "validation": task.validation}
    return {key: file for key, file in files.items() if not (file or "").startswith("hf:")}


def _model_source(recipe: Recipe) -> str:
    """The name of the model whose files are read; empty for the sorting model."""
    if isinstance(recipe.model, ScratchConfig):
        return recipe.model.tokenizer
    return recipe.model.name if isinstance(recipe.model, LanguageConfig) else ""


def origin(recipe: Recipe) -> Recipe:
    """The recipe that made the model first: the recipe itself unless its model is a run."""
    name = _model_source(recipe)
    file = Path(name).expanduser() / "recipe.toml"
    return origin(config.load(file)) if name and file.is_file() else recipe


def raise_all(found: Sequence[BurnishError]) -> None:
    """Raises one problem as it is, and several as one error."""
    if len(found) == 1:
        raise found[0]
    if found:
        raise RunError("\n".join(["this run can't start:", *(f"- {error}" for error in found)]))
