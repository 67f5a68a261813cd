"""Hashes of the inputs that a recipe only names: rows, rewards, the code that grades. A resumed run
and a repeated evaluation must read the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from burnish.errors import DataError
from burnish.graders import rewards
from burnish.runs.directory import to_jsonl, version_of
from burnish.schema import FilesTask, MathTask, MixtureTask, Recipe, Rows

CODE = ("graders", "tasks")
"""Folders of the package that make prompts and grade responses."""
PACKAGES = {"math": ("math-verify", "sympy"), "gym": ("reasoning-gym",)}
"""Packages that do the same, by the task's name."""
PLAIN = (str, bytes, int, float, complex, bool, type(None))


def hashes(recipe: Recipe) -> dict[str, str]:
    """Hashes by the setting that names the input; "prompts" and "reward" are a script's."""
    root, task = Path(__file__).parent, recipe.task
    code = (file for folder in CODE for file in (root / folder).rglob("*"))
    found = {"code": of_files(sorted(file for file in code if file.suffix in (".py", ".txt")))}
    tasks: dict[str, Any] = {"task": task}
    if isinstance(task, MixtureTask):
        tasks = {f"task.tasks.{name}": part for name, part in task.tasks.items()}
    for section, part in tasks.items():
        found |= {f"{section}.{key}": value for key, value in _of_task(part)}
    if isinstance(task, Rows) and task.rows is not None:
        found["prompts"] = _hash(to_jsonl(task.rows).encode())
    if isinstance(task, FilesTask) and task.function is not None:
        found["reward"] = of_function(task.function)
    return found


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
    if isinstance(task, Rows | MathTask):
        for key, source in (("train", task.train), ("validation", task.validation)):
            if source is not None:
                yield key, _of_source(source)
    if isinstance(task, FilesTask) and task.reward and task.reward not in rewards.BUILT_IN:
        yield "reward", of_files([Path(task.reward.rpartition(":")[0])])
    for package in PACKAGES.get(task.name, ()):
        yield package, str(version_of(package))


def _of_source(source: str) -> str:
    if not source.startswith("hf:"):
        return of_files([Path(source)])
    from burnish.tasks import math

    return _hash(repr(math.read(source)).encode())


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
