"""What a run or an evaluation reads that its recipe only names, each with a hash: rows, rewards,
the code that grades. A resumed run and a repeated evaluation must read the same."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any

from burnish.config import FilesTask, MathTask, MixtureTask, Recipe, Rows
from burnish.errors import DataError
from burnish.graders import rewards
from burnish.runs.directory import version_of

Row = dict[str, Any]
CODE = ("graders", "tasks")
"""Folders of the package that make prompts and grade responses."""
PACKAGES = {"math": ("math-verify", "sympy"), "gym": ("reasoning-gym",)}
"""Packages that do the same, by the task's name."""
DIGITS = 16
PLAIN = (str, bytes, int, float, complex, bool, type(None))


def hashes(
    recipe: Recipe, *, rows: Iterable[Row] | None = None, reward: rewards.Reward | None = None
) -> dict[str, str]:
    """Hashes and versions, by the setting that names what is read.

    ``rows`` are "prompts" and ``reward`` is "reward": a script gave them.
    """
    found = {"code": _of_code()}
    for section, task in _sections(recipe):
        found |= {f"{section}.{key}": value for key, value in _of_task(task)}
    if rows is not None:
        found["prompts"] = _hash(to_jsonl(rows).encode())
    if reward is not None:
        found["reward"] = of_function(reward)
    return found


def of_files(files: Iterable[Path]) -> str:
    """One hash of several files' contents."""
    digests = []
    for file in files:
        with file.open("rb") as opened:
            digests.append(hashlib.file_digest(opened, "sha256").digest())
    return _hash(b"".join(digests))


def of_function(reward: rewards.Reward) -> str:
    """A function's name and the hash of its own code, wherever it is defined.

    Comments, line numbers and the code of other functions that it calls do not count.
    """
    given: list[Any] = []
    call: Any = reward
    while isinstance(call, partial):
        given += [*call.args, *call.keywords.values()]
        call = call.func
    name = getattr(call, "__name__", type(call).__name__)
    call = getattr(call, "__func__", call if hasattr(call, "__code__") else type(call).__call__)
    if not hasattr(call, "__code__"):  # written in C
        return str(name)
    given += [*(call.__defaults__ or ()), *(call.__kwdefaults__ or {}).values()]
    given += [cell.cell_contents for cell in call.__closure__ or ()]
    told = [repr(value) if isinstance(value, PLAIN) else type(value).__name__ for value in given]
    return f"{name} ({_hash(repr((_told(call.__code__), told)).encode())})"


def as_rows(prompts: Iterable[str | Mapping[str, Any]]) -> list[Row]:
    """A script's prompts as a file would give them, since the run keeps them in a file."""
    rows: list[Any] = []
    for i, prompt in enumerate(prompts):
        row = {"prompt": prompt} if isinstance(prompt, str) else prompt
        try:
            rows.append(json.loads(json.dumps(dict(row) if isinstance(row, Mapping) else row)))
        except (TypeError, ValueError) as error:
            raise DataError(
                f"prompts[{i}] must hold texts, numbers, lists and dicts alone, since a run keeps "
                f"its rows as JSON: {error}; change the row, or look the rest up in the reward"
            ) from None
    return rows


def to_jsonl(rows: Iterable[Row]) -> str:
    return "".join(json.dumps(row, default=str) + "\n" for row in rows)


def _sections(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    if isinstance(recipe.task, MixtureTask):
        yield from ((f"task.tasks.{name}", task) for name, task in recipe.task.tasks.items())
    else:
        yield "task", recipe.task


def _of_task(task: Any) -> Iterator[tuple[str, str]]:
    if isinstance(task, Rows | MathTask):
        for key in ("train", "validation"):
            source: str | None = getattr(task, key)
            if source is not None:
                yield key, _of_source(source)
    file = isinstance(task, FilesTask) and task.reward and task.reward not in rewards.BUILT_IN
    if file:
        yield "reward", of_files([Path(task.reward.rpartition(":")[0])])
    packages = PACKAGES.get(task.name, ())
    if packages:
        yield "packages", ", ".join(f"{name} {version_of(name)}" for name in packages)


def _of_source(source: str) -> str:
    if not source.startswith("hf:"):
        return of_files([Path(source)])
    from burnish.tasks import math

    return _hash(to_jsonl(math.read(source)).encode())


def _of_code() -> str:
    root = Path(__file__).parent
    files = (file for folder in CODE for file in (root / folder).rglob("*"))
    return of_files(sorted(file for file in files if file.suffix in (".py", ".txt")))


def _told(code: CodeType) -> Any:
    """What a function does, in values that another process repeats."""
    return code.co_code, code.co_names, [_constant(value) for value in code.co_consts]


def _constant(value: Any) -> Any:
    if isinstance(value, CodeType):
        return _told(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:DIGITS]
