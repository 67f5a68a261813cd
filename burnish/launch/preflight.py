"""The inputs of a run before its first second: whether they are there, and their hashes.

Problems that would make a run fail are packages that are not installed, files and first runs that
are missing, and too little disk or memory. No torch is loaded.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from burnish import config
from burnish.engine.environment import check_engine
from burnish.errors import BurnishError, ConfigError, DataError, MissingExtra, ModelError, RunError
from burnish.graders import judge, rewards
from burnish.plan import Need, spell
from burnish.progress import tell
from burnish.runs import checkpoints
from burnish.runs.directory import check_new, to_jsonl, version_of
from burnish.schema.learning import LoraLearns
from burnish.schema.models import LanguageConfig, ScratchConfig
from burnish.schema.recipe import Recipe
from burnish.schema.tasks import FilesTask, GymTask, JudgedTask, MathTask, PreferencesTask, Rows

EXTRAS = {
    "math": ("math_verify", "grading answers of math tasks"),
    "gym": ("reasoning_gym", "questions that a generator makes (arithmetic)"),
    "hf": ("huggingface_hub", "models by hf:ORG/NAME"),
    "tensorboard": ("tensorboard", "events of runs for TensorBoard; none is needed to run"),
    "ray": ("ray", "sampling and learning in processes of their own (--runtime ray)"),
}
"""The optional parts of the package: for each, a module that it installs, and its purpose."""
MADE = {
    "sums": "python examples/write_sums.py sums",
    "small-sums": "python examples/write_sums.py small-sums --small",
    "sentences": "python examples/write_keywords.py sentences --recipe keywords-scratch",
}
"""Directories that recipes read, and the commands that write them."""
REMEDIES = {
    "memory": "end other programs, lower engine.kv_mb, or use a smaller model or a larger machine",
    "cache": "lower engine.kv_mb",
    "disk": "make room, choose another --out, or lower checkpoint.keep",
}
"""Remedies for too little of each resource."""
CODE = ("graders", "tasks")
"""Folders of the package that make prompts and grade responses."""
PACKAGES = {"math": ("math-verify", "sympy"), "gym": ("reasoning-gym",)}
"""Packages that do the same, by the task's name."""
PLAIN = (str, bytes, int, float, complex, bool, type(None))
"""Types of values whose text is the same in every process."""
_RUN = re.compile(r"runs/([\w.-]+)-\d+")


def check(recipe: Recipe, path: Path | None = None) -> None:
    """Raises if ``problems`` finds any."""
    raise_all(problems(recipe, path))


def problems(recipe: Recipe, path: Path | None = None) -> list[BurnishError]:
    """The first problem of each kind: packages, files and models that are missing, and rows and
    rewards that are not usable.

    ``path`` is the directory of a new run; None if nothing is trained.
    """
    found = [] if path is None else problem_of(check_new, path)
    for check in (check_extras, check_files, check_model, check_adapter, check_engine):
        found += problem_of(check, recipe)
    for other in frozen(recipe).values():
        found += [*problem_of(check_extras, other), *problem_of(check_model, other)]
    found = list({str(problem): problem for problem in found}.values())
    return found or problem_of(check_rows, recipe)  # rows may need a package that is missing


def problem_of(check: Callable[..., None], *given: Any) -> list[BurnishError]:
    """The error that a check raises; empty if there is none."""
    try:
        check(*given)
    except BurnishError as error:
        return [error]
    return []


def is_installed(extra: str) -> bool:
    return importlib.util.find_spec(EXTRAS[extra][0]) is not None


def check_extras(recipe: Recipe) -> None:
    source, needed = origin(recipe).source, []  # (an extra, the setting that needs it)
    for task in recipe.tasks.values():
        if isinstance(task, MathTask):
            needed.append(("math", "task.name = 'math'"))
        if isinstance(task, GymTask):
            needed.append(("gym", f"the generator {task.generator}"))
    if source.startswith("hf:"):
        needed.append(("hf", f"the model {source}"))
    if recipe.runtime.name == "ray":
        needed.append(("ray", "runtime.name = 'ray'"))
    for extra, what in needed:
        if not is_installed(extra):
            raise MissingExtra(extra, what)


def check_files(recipe: Recipe) -> None:
    absent = _missing_files(recipe)
    if absent:
        told = " and ".join(f"{key} = {file!r}" for key, file in absent.items())
        remedy = [*_made(recipe), "give rows as JSONL files by these names"][0]
        raise DataError(f"{told} can't be read: no such file; first: {remedy}")


def check_rows(recipe: Recipe) -> None:
    """Raises if a row lacks a field that its task needs, if a reward is missing, or if a judge
    does not answer one question."""
    from burnish.tasks import judged, math, pairs, rows, text

    for task in recipe.tasks.values():
        if isinstance(task, FilesTask):
            reward = text.reward_of(task)
            if isinstance(reward, str):
                rewards.check(reward)
            rows.rows_of(task, seed=recipe.seed)
        if task.name in pairs.CHECKS:
            rows.rows_of(task, seed=recipe.seed, check=pairs.CHECKS[task.name])
        if isinstance(task, MathTask):
            math.rows_of(task, seed=recipe.seed)
        if isinstance(task, JudgedTask):
            rows.rows_of(task, seed=recipe.seed, check=partial(judged.check_judged, task))
            judge.Judge(task.judge).check()


def check_model(recipe: Recipe) -> None:
    from burnish.model import hub

    name, path = recipe.source, Path(recipe.source).expanduser()
    is_bytes = name == hub.BYTES and isinstance(recipe.model, ScratchConfig)
    if not name or name == hub.DEFAULT or is_bytes or name.startswith("hf:"):
        return
    if (path / "recipe.toml").is_file():
        checkpoints.choose(path, "last")  # it raises if there is none
        check_model(origin(recipe))
    elif first := first_run(name):
        command = f"burnish {'sft' if first.is_supervised else 'train'} {first.name}"
        made = "; ".join([*_made(first), command])
        raise ModelError(f"{name} is a run that is not there yet; make it with: {made}")
    elif not path.exists():
        hub.resolve(name)  # its error lists the names that a model may have


def check_adapter(recipe: Recipe) -> None:
    """Raises if ``model.adapter`` is no adapter, or is not the one that ``train.learn`` means."""
    from burnish.model import peft

    adapter, learn = getattr(recipe.model, "adapter", None), recipe.train.learn
    if adapter is None:
        return
    found = peft.read_config(adapter)
    if isinstance(learn, LoraLearns):
        given = {"rank": learn.rank, "alpha": learn.alpha}
        own = {"rank": found["r"], "alpha": found["lora_alpha"]}
        for key in (key for key in own if own[key] != given[key]):
            raise ConfigError(
                f"train.learn.{key} = {given[key]:g} must be that of model.adapter = '{adapter}', "
                f"which goes on learning; use {own[key]:g}"
            )


def first_run(name: str) -> Recipe | None:
    """The recipe whose run a model's name, such as runs/RECIPE-1, means; None if it is no run, or
    if the run is there."""
    match = _RUN.fullmatch(name)
    is_run = match and match[1] in config.list_recipes() and not Path(name).exists()
    return config.load(match[1]) if match and is_run else None


def _made(recipe: Recipe) -> list[str]:
    """The commands that write the missing files of a recipe of the package."""
    folders = [Path(file).parts[0] for file in _missing_files(recipe).values()]
    return list(dict.fromkeys(MADE[folder] for folder in folders if folder in MADE))


def _missing_files(recipe: Recipe) -> dict[str, str]:
    files = {f"{s}.{k}": file for s, t in recipe.tasks.items() for k, file in _files_of(t).items()}
    return {key: file for key, file in files.items() if file and not Path(file).exists()}


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
    """The JSONL files of a task by their setting."""
    if not isinstance(task, Rows):
        return {}
    return {"train": task.train, "validation": task.validation}


def origin(recipe: Recipe) -> Recipe:
    """The recipe that made the model first: the recipe itself unless its model is a run."""
    model, run = recipe.model, run_of(recipe)
    if not isinstance(model, LanguageConfig) or run is None:
        return recipe
    if isinstance(run.task, PreferencesTask):
        raise ConfigError(
            f"{model.name} is a run that learned a reward, which samples nothing; to use it as "
            f"reward_model.name, write it with: burnish export {model.name} DIRECTORY"
        )
    first = origin(run)
    if first.model.name == "sorter":
        raise ConfigError(f"{model.name} trained the sorting model, which is not a language model")
    made = first.model.model_copy(update={"fp32_head": model.fp32_head})
    return first.model_copy(update={"model": made})


def run_of(recipe: Recipe) -> Recipe | None:
    """The recipe of the run that is a recipe's model; None if the model is no run."""
    file = Path(recipe.source).expanduser() / "recipe.toml"
    is_run = isinstance(recipe.model, LanguageConfig) and file.is_file()
    return config.load(file) if is_run else None


def frozen(recipe: Recipe) -> dict[str, Recipe]:
    """For each frozen model beside the policy, by its setting, the recipe with it as its model."""
    names = {
        "teacher.model": recipe.teacher and recipe.teacher.model,
        "reward_model.name": recipe.reward_model and recipe.reward_model.name,
    }
    head = getattr(recipe.model, "fp32_head", False)
    models = {setting: LanguageConfig(name=n, fp32_head=head) for setting, n in names.items() if n}
    alone = {"teacher": None, "reward_model": None}
    return {s: recipe.model_copy(update={"model": own} | alone) for s, own in models.items()}


def raise_all(found: Sequence[BurnishError]) -> None:
    """Raises one problem as it is, and several as one error."""
    if len(found) == 1:
        raise found[0]
    if found:
        raise RunError("\n".join(["this run can't start:", *(f"- {error}" for error in found)]))


def hashes(recipe: Recipe) -> dict[str, str]:
    """Hashes of the inputs that a recipe only names, by setting. A resumed run and a repeated
    evaluation must read the same.

    "prompts" and "reward" are a script's. The hash of a model from scratch is the tokenizer's, the
    hash of a run its checkpoint's as well; the sorting model, which its seed makes, has none.
    """
    root, task = Path(__file__).parent, recipe.task
    code = (file for folder in CODE for file in (root / folder).rglob("*"))
    found = {"code": of_files(sorted(file for file in code if file.suffix in (".py", ".txt")))}
    for section, part in recipe.tasks.items():
        found |= {f"{section}.{key}": value for key, value in _of_task(part)}
    if isinstance(task, Rows) and task.rows is not None:
        found["prompts"] = _hash(to_jsonl(task.rows).encode())
    if isinstance(task, FilesTask) and task.function is not None:
        found["reward"] = of_function(task.function)
    if recipe.source:
        files = _files_of_model(recipe)
        tell("load", f"hashing the files of {recipe.model.name}")
        found["model"] = of_files(files)
    for setting, other in frozen(recipe).items():
        found[setting] = of_files(_files_of_model(other))
    return found


def _files_of_model(recipe: Recipe) -> list[Path]:
    from burnish.model import hub

    first, run, adapter = origin(recipe), run_of(recipe), getattr(recipe.model, "adapter", None)
    files = sorted(Path(adapter).expanduser().glob("adapter_*")) if adapter else []
    if run is not None:
        files.append(checkpoints.choose(Path(recipe.model.name), "best"))
        if run.train.learn.name != "all":  # the checkpoint holds only what learned
            return [*_files_of_model(run), *files]
    is_whole = run is None and isinstance(recipe.model, LanguageConfig)
    kinds = (".json", ".jinja", *[".safetensors"] * is_whole)
    own = sorted(f for f in hub.resolve(first.source).glob("*") if f.suffix in kinds)
    return [*own, *files]


def of_files(files: Iterable[Path]) -> str:
    """One hash of several files' contents."""
    digests = []
    for file in files:
        with file.open("rb") as opened:
            digests.append(hashlib.file_digest(opened, "sha256").digest())
    return _hash(b"".join(digests))


def of_function(function: rewards.Reward) -> str:
    """A function's name and the hash of its own code, with the plain values that it holds.

    Comments, line numbers and the code of other functions that it calls do not count.
    """
    if isinstance(function, partial):
        given = repr((function.args, function.keywords))
        return f"{of_function(function.func)} of {_hash(given.encode())}"
    name = getattr(function, "__name__", type(function).__name__)
    call: Any = function if hasattr(function, "__code__") else type(function).__call__
    if not hasattr(call, "__code__"):  # written in C
        return str(name)
    held = [*(call.__defaults__ or ()), *(cell.cell_contents for cell in call.__closure__ or ())]
    values = [repr(value) if isinstance(value, PLAIN) else type(value).__name__ for value in held]
    return f"{name} ({_hash(repr((_of_bytecode(call.__code__), values)).encode())})"


def _of_bytecode(code: CodeType) -> Any:
    """A function's instructions in values that another process repeats."""
    constants = [
        _of_bytecode(value)
        if isinstance(value, CodeType)
        else sorted(map(repr, value if isinstance(value, frozenset) else [value]))
        for value in code.co_consts
    ]
    return code.co_code, code.co_names, constants


def as_rows(prompts: Iterable[str | Mapping[str, Any]]) -> list[Any]:
    """A script's prompts as a file would give them, since the run keeps them in a file."""
    if isinstance(prompts, str | Mapping):
        raise DataError(
            f"prompts must be a list of texts or rows, got one, {prompts!r}; write "
            f"prompts=[{prompts!r}], or give the name of a JSONL file as data"
        )
    rows = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
    try:
        return [json.loads(json.dumps(row, default=dict)) for row in rows]
    except (TypeError, ValueError) as error:
        raise DataError(
            "prompts must hold texts, numbers, lists and dicts alone, since a run keeps its rows "
            f"as JSON: {error}; change the row, or look the rest up in the reward"
        ) from None


def _of_task(task: Any) -> Iterator[tuple[str, str]]:
    for key, file in _files_of(task).items():
        if file is not None:
            yield key, of_files([Path(file)])
    if isinstance(task, FilesTask) and task.reward and task.reward not in rewards.BUILT_IN:
        yield "reward", of_files([Path(task.reward.rpartition(":")[0])])
    for package in PACKAGES.get(task.name, ()):
        yield package, str(version_of(package))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
