"""What would make a run fail, found before its first second: parts that are not installed, files
and first runs that are not there, too little room. Nothing here loads torch."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
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
)
from burnish.errors import BurnishError, ConfigError, DataError, MissingExtra, ModelError, RunError
from burnish.graders import rewards
from burnish.plan import CACHE, disk_bytes, memory_parts, spell
from burnish.runs import checkpoint
from burnish.runs.directory import check_new

if TYPE_CHECKING:
    from burnish.plan import Size

Prompts = Iterable[str | Mapping[str, Any]] | None
Given = rewards.Reward | str | None
"""A reward that a script gives; None if the recipe's is meant."""


class Extra(NamedTuple):
    """An optional part of the package."""

    modules: tuple[str, ...]
    """What it installs."""
    purpose: str


EXTRAS = {
    "math": Extra(("math_verify",), "grading answers of math tasks"),
    "gym": Extra(("reasoning_gym",), "questions that a generator makes (arithmetic)"),
    "hf": Extra(("transformers", "huggingface_hub"), "models by hf:ORG/NAME; engine.name = 'hf'"),
    "datasets": Extra(("datasets",), "rows by hf:ORG/NAME/SPLIT"),
    "tensorboard": Extra(("tensorboard",), "looking at runs in TensorBoard; none is needed to run"),
    "ray": Extra(("ray",), "several machines; no recipe uses it yet"),
    "vllm": Extra(("vllm",), "another engine; no recipe uses it yet"),
}
MADE = {
    "sums": "burnish data arithmetic sums",
    "sentences": "burnish data keywords sentences --recipe keywords-scratch",
}
"""Directories that recipes read, and the commands that write them."""
_RUN = re.compile(r"runs/([\w.-]+)-\d+")


def check_before(
    recipe: Recipe, path: Path, *, prompts: Prompts = None, reward: Given = None
) -> None:
    """Raises for what is wrong with a new run: its directory, model, data, reward and packages."""
    check_new(path)
    if recipe.engine.name != "native":
        raise ConfigError("engine.name = 'hf' is for `burnish eval`; training needs 'native'")
    check_sources(recipe, path, prompts=prompts, reward=reward)


def check_sources(
    recipe: Recipe, path: Path = Path(), *, prompts: Prompts = None, reward: Given = None
) -> None:
    """Raises where a recipe's model, data, reward or packages are not there or not usable."""
    takes = isinstance(recipe.task, FilesTask) or (recipe.is_supervised and reward is None)
    if (prompts is not None or reward is not None) and not takes:
        raise ConfigError(
            f"prompts and reward have no effect with task.name = '{recipe.task.name}'; load the "
            "recipe with task.name = 'files', or pass its name"
        )
    _raise(problems(recipe, path, has_rows=prompts is not None))
    for task in recipe.tasks:
        _check_rows(task, recipe.seed, prompts, reward)


def _check_rows(task: Any, seed: int, prompts: Prompts, reward: Given) -> None:
    """Raises where rows are not what their task needs, or a reward is not there."""
    from burnish.tasks import files, math, pairs

    if isinstance(task, FilesTask):
        chosen = files.reward_of(task, reward)
        if isinstance(chosen, str):
            rewards.check(chosen)
        files.rows_of(task, seed=seed, prompts=prompts)
    if isinstance(task, PairsTask) and prompts is None:
        files.rows_of(task, seed=seed, check=pairs.check_pair)
    if isinstance(task, MathTask) and len(_files_of(task)) == 2:  # none comes from a hub
        math.rows_of(task, seed=seed)


def check_room(recipe: Recipe, path: Path, size: Size | None, available: int, device: str) -> None:
    """Raises if the run can't fit: ``available`` are the bytes of memory on the device, cpu or
    cuda, and ``size`` is None for the sorting model."""
    _raise([*lacking_disk(recipe, path, size), *lacking_memory(recipe, size, available, device)])


def problems(recipe: Recipe, path: Path, *, has_rows: bool = False) -> list[BurnishError]:
    """All that is missing; ``has_rows`` if a script passes the rows, so that no file is read."""
    return [
        *missing_extras(recipe),
        *missing_files(recipe, has_rows=has_rows),
        *missing_model(recipe),
        *lacking_disk(recipe, path, None),
    ]


def is_installed(*modules: str) -> bool:
    return all(importlib.util.find_spec(module) is not None for module in modules)


def missing_extras(recipe: Recipe) -> list[BurnishError]:
    needs: list[tuple[str, str, str]] = []  # an extra, its module, what needs it
    for task in recipe.tasks:
        if isinstance(task, MathTask):
            needs.append(("math", "math_verify", "task.name = 'math'"))
            sources = [task.train, task.validation or ""]
            rows = [source for source in sources if source.startswith("hf:")]
            needs += [("datasets", "datasets", f"reading {source}") for source in rows]
        if isinstance(task, GymTask):
            needs.append(("gym", "reasoning_gym", f"the generator {task.generator}"))
    if _model_source(recipe).startswith("hf:"):
        needs.append(("hf", "huggingface_hub", f"the model {_model_source(recipe)}"))
    if recipe.engine.name == "hf":
        needs.append(("hf", "transformers", "engine.name = 'hf'"))
    return [MissingExtra(extra, what) for extra, module, what in needs if not is_installed(module)]


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
    if (path / "recipe.toml").is_file() and checkpoint.latest(path) is None:
        return [RunError(f"{path} has no checkpoint yet; train on, or resume it")]
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
    """The recipe that a model's name, runs/RECIPE-1, says was run before; None if it says none."""
    match = _RUN.fullmatch(name)
    return config.load(match[1]) if match and match[1] in config.list_recipes() else None


def commands(recipe: Recipe) -> list[str]:
    """What is typed to run a recipe of the package, with the commands that write its files."""
    files = [file for task in recipe.tasks for file in _files_of(task).values() if file]
    absent = [Path(file).parts[0] for file in files if not Path(file).exists()]
    written = dict.fromkeys(MADE[folder] for folder in absent if folder in MADE)
    return [*written, f"burnish {'sft' if recipe.is_supervised else 'train'} {recipe.name}"]


def lacking_disk(recipe: Recipe, path: Path, size: Size | None) -> list[BurnishError]:
    """Room for rows and checkpoints, those aside that a resumed run has written."""
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
    recipe: Recipe, size: Size | None, available: int, device: str = "cpu"
) -> list[BurnishError]:
    """Memory for what is held all the time. On a CPU the cache takes memory only as it fills."""
    held = memory_parts(recipe, size)
    parts = {
        f"{who}'s {what}": count
        for who, of in held.items()
        for what, count in of.items()
        if device != "cpu" or not what.startswith(CACHE)
    }
    needed = sum(parts.values())
    if needed <= available:
        return []
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    told = ", ".join(f"{what} {spell(count)}" for what, count in largest)
    return [
        RunError(
            f"the run needs {spell(needed)} of {_MEMORY[device]} and more for activations (the "
            f"most: {told}), and {spell(available)} are free; end other programs, or use a smaller "
            "model or a larger machine"
        )
    ]


_MEMORY = {"cpu": "memory", "cuda": "GPU memory"}


def _files_of(task: Any) -> dict[str, str | None]:
    """The JSONL files of a task by their setting; what comes from a hub is none."""
    if not isinstance(task, Rows | MathTask):
        return {}
    files = {"train": task.train, "validation": task.validation}
    return {key: file for key, file in files.items() if not (file or "").startswith("hf:")}


def _model_source(recipe: Recipe) -> str:
    """The name of the model whose files are read; empty for the sorting model."""
    if isinstance(recipe.model, ScratchConfig):
        return recipe.model.tokenizer
    return recipe.model.name if isinstance(recipe.model, LanguageConfig) else ""


def _raise(found: Sequence[BurnishError]) -> None:
    """One problem as it is, several as one error."""
    if len(found) == 1:
        raise found[0]
    if found:
        raise RunError("\n".join(["this run can't start:", *(f"- {error}" for error in found)]))
