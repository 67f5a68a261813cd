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
from burnish.preflight import Given
from burnish.runs.directory import version_of
from burnish.schema import FilesTask, MixtureTask, Recipe, Rows

CODE = ("graders", "tasks")
"""Folders of the package that make prompts and grade responses."""
PACKAGES = {"math": ("math-verify", "sympy"), "gym": ("reasoning-gym",)}
"""Packages that do the same, by the task's name."""
PLAIN = (str, bytes, int, float, complex, bool, type(None))


def hashes(
    recipe: Recipe, *, rows: list[Any] | None = None, reward: Given = None
) -> dict[str, str]:
    """Hashes by the setting that names the input; "prompts" and "reward" are a script's."""
    found = {"code": _of_code()}
    tasks: dict[str, Any] = {"task": recipe.task}
    if isinstance(recipe.task, MixtureTask):
        tasks = {f"task.tasks.{name}": task for name, task in recipe.task.tasks.items()}
    for section, task in tasks.items():
        found |= {f"{section}.{key}": value for key, value in _of_task(task)}
    if rows is not None:
        found["prompts"] = _hash(to_jsonl(rows).encode())
    if callable(reward):
        found["reward"] = of_function(reward)
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
    rows = [{"prompt": prompt} if isinstance(prompt, str) else prompt for prompt in prompts]
    try:
        return [json.loads(json.dumps(row, default=dict)) for row in rows]
    except (TypeError, ValueError) as error:
        raise DataError(
            "prompts must hold texts, numbers, lists and dicts alone, since a run keeps its rows "
            f"as JSON: {error}; change the row, or look the rest up in the reward"
        ) from None


def to_jsonl(rows: Iterable[Any]) -> str:
    return "".join(json.dumps(row, default=str) + "\n" for row in rows)


def _of_task(task: Any) -> Iterator[tuple[str, str]]:
    if isinstance(task, Rows):
        for key, source in (("train", task.train), ("validation", task.validation)):
            if source is not None:
                yield key, of_files([Path(source)])
    if isinstance(task, FilesTask) and task.reward and task.reward not in rewards.BUILT_IN:
        yield "reward", of_files([Path(task.reward.rpartition(":")[0])])
    for package in PACKAGES.get(task.name, ()):
        yield package, str(version_of(package))


def _of_code() -> str:
    root = Path(__file__).parent
    files = (file for folder in CODE for file in (root / folder).rglob("*"))
    return of_files(sorted(file for file in files if file.suffix in (".py", ".txt")))


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
