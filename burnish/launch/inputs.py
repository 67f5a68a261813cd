"""Hashes of the files and functions that a recipe only names, so that a resumed run can check that
they have not changed."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from burnish.console.progress import tell
from burnish.environments.search import document_files
from burnish.graders import rewards
from burnish.launch.models import ModelSource
from burnish.launch.preflight import files_of_task
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.recipe.tasks import AgentTask, EnvironmentTask, FilesTask, RowsTask, VerifiersTask
from burnish.runs import checkpoints
from burnish.runs.directory import to_jsonl, version_of
from burnish.tasks.data.names import parse_data_name
from burnish.tasks.data.table import open_table

CODE = ("environments", "graders", "tasks")
"""Folders of this package whose code makes prompts and grades responses."""
PACKAGES = {
    "math": ("math-verify", "sympy"),
    "gym": ("reasoning-gym",),
    "verifiers": ("verifiers",),
}
"""Other packages that make prompts and grade responses, by the task's name."""
PLAIN = (str, bytes, int, float, complex, bool, type(None))
"""Types whose repr is the same in every process."""


def hash_inputs(
    task: Any,
    parts: Mapping[str, Any],
    model: ModelSource | None,
    frozen: Mapping[str, ModelSource],
) -> dict[str, str]:
    """Return a hash of each input of a recipe, by its setting: the code of graders and tasks, data
    files, rewards, and model files.

    ``task`` is the recipe's task, and ``parts`` are its tasks by section: several for a mixture.
    ``model`` is None for the sorting model, whose weights depend on the seed only. ``frozen`` are
    the teacher and the reward model. The keys "prompts" and "reward" are the rows and the function
    that a script has passed; "reward.NAME" is one of several functions. For a model with random
    weights, the tokenizer is hashed. For a run, its checkpoint is hashed, too.
    """
    package = Path(__file__).parents[1]
    code = (file for folder in CODE for file in (package / folder).rglob("*"))
    found = {"code": hash_files(sorted(file for file in code if file.suffix in (".py", ".txt")))}
    for section, part in parts.items():
        found |= {f"{section}.{key}": value for key, value in _hash_task(part)}
    if isinstance(task, RowsTask) and task.rows is not None:
        found["prompts"] = _hash(to_jsonl(task.rows).encode())
    if isinstance(task, FilesTask) and task.function is not None:
        found["reward"] = hash_function(task.function)
    for one in getattr(task, "rewards", None) or ():
        if one.function is not None:
            found[f"reward.{one.name}"] = hash_function(one.function)
    if model is not None:
        files = _files_of_model(model)
        tell("load", f"hashing the files of {model.name}")
        found["model"] = hash_files(files)
    for setting, source in frozen.items():
        found[setting] = hash_files(_files_of_model(source))
    return found


def hash_functions(objective: ObjectiveConfig) -> dict[str, str]:
    """Return the name and a hash of each function from a script in an objective, by its setting."""
    return {setting: hash_function(value) for setting, value in objective.functions.items()}


def _files_of_model(source: ModelSource) -> list[Path]:
    adapter = Path(source.adapter).expanduser() if source.adapter else None
    files = sorted(adapter.glob("adapter_*")) if adapter else []
    run = source.run
    if run is not None:
        files.append(checkpoints.find_checkpoint(run.path, "best"))
        if run.train.learn.name != "all":  # the checkpoint holds only the trained weights
            return [*_files_of_model(run.base), *files]
    has_weights = run is None and source.seed is None
    kinds = (".json", ".jinja", *[".safetensors"] * has_weights)
    own = sorted(file for file in source.files.glob("*") if file.suffix in kinds)
    return [*own, *files]


def hash_files(files: Iterable[Path]) -> str:
    """Return one hash of the contents of all files, in this order. Their names are not hashed."""
    digests = []
    for file in files:
        with file.open("rb") as opened:
            digests.append(hashlib.file_digest(opened, "sha256").digest())
    return _hash(b"".join(digests))


def hash_function(function: Callable[..., Any]) -> str:
    """Return a text with a function's name and a hash of its bytecode, defaults and closure; only
    the name of a function that is written in C.

    Comments, line numbers and the code of the functions that it calls are not hashed.
    """
    if isinstance(function, partial):
        given = repr((function.args, function.keywords))
        return f"{hash_function(function.func)} of {_hash(given.encode())}"
    name = getattr(function, "__name__", type(function).__name__)
    call: Any = function if hasattr(function, "__code__") else type(function).__call__
    if not hasattr(call, "__code__"):  # written in C
        return str(name)
    held = [*(call.__defaults__ or ()), *(cell.cell_contents for cell in call.__closure__ or ())]
    held += [value for _, value in sorted((call.__kwdefaults__ or {}).items())]
    values = [repr(value) if isinstance(value, PLAIN) else type(value).__name__ for value in held]
    return f"{name} ({_hash(repr((_bytecode(call.__code__), values)).encode())})"


def _bytecode(code: CodeType) -> Any:
    """Return a function's bytecode, names and constants as values whose repr is the same in every
    process."""
    constants = [
        _bytecode(value)
        if isinstance(value, CodeType)
        else sorted(map(repr, value if isinstance(value, frozenset) else [value]))
        for value in code.co_consts
    ]
    return code.co_code, code.co_names, constants


def _hash_task(task: Any) -> Iterator[tuple[str, str]]:
    for key, name in files_of_task(task).items():
        if name is None:
            continue
        named = parse_data_name(name)
        files = named.files
        if named.format == "hub":
            files = open_table(named, key).cached_files
        yield key, hash_files(files)
        if named.is_table:
            yield f"{key}.datasets", str(version_of("datasets"))
    graded = isinstance(task, FilesTask | EnvironmentTask)
    if graded and task.reward and task.reward not in rewards.BUILT_IN:
        yield "reward", hash_files([Path(task.reward.rpartition(":")[0])])
    if isinstance(task, AgentTask):
        yield "agent", hash_files([Path(task.agent.rpartition(":")[0])])
    if isinstance(task, VerifiersTask) and task.taskset_file is not None:
        yield "taskset", hash_files([Path(task.taskset_file)])
    if isinstance(task, EnvironmentTask):
        if task.environment and ":" in task.environment:
            yield "environment", hash_files([Path(task.environment.rpartition(":")[0])])
        for tool in task.tools:
            if tool.startswith("search:"):
                folder = Path(tool.removeprefix("search:"))
                yield f"tools.{tool}", hash_files(document_files(folder))
            elif ":" in tool:
                yield f"tools.{tool}", hash_files([Path(tool.rpartition(":")[0])])
    for one in getattr(task, "rewards", None) or ():
        if one.function is None and one.reward not in rewards.BUILT_IN:
            yield f"rewards.{one.name}", hash_files([Path(one.reward.rpartition(":")[0])])
    for package in PACKAGES.get(task.name, ()):
        yield package, str(version_of(package))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
