"""A reward is a function of (response text, row) that returns a number or a dict of parts.

A dict has a "reward" and any other parts, all of them numbers; its "status" may say "unparsed" for
a response that could not be read, which scores 0. Its "correct" says whether the response is right
(True, False, or None if the reward has no such notion); without it, a reward of at least 1 counts.
Whatever else a function does is an error of the grader: a counted failure with a message, never a
0. (Workers import this file: no numpy.)

A script that calls ``burnish.train`` at its top level, with no main guard, must not do so a second
time in a worker. So of a running script a worker runs the definitions alone.
"""

from __future__ import annotations

import ast
import math
import symtable
import sys
import traceback
from collections.abc import Callable, Mapping
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from burnish.errors import DataError
from burnish.graders import keywords
from burnish.wording import printable

Reward = Callable[[str, Mapping[str, Any]], Any]


def none(response: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """For rows without a reward of their own: a learned reward or a teacher is learned from."""
    return {"reward": 0.0, "correct": None}


BUILT_IN: dict[str, Reward] = {**keywords.REWARDS, "none": none}
LONGEST_MESSAGE = 300
FULL = 1 - 1e-6
"""The least reward that counts as correct if the reward function does not say: 1 up to rounding."""
DEFINITIONS = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
ASSIGNMENTS = (ast.Assign, ast.AnnAssign)
ACTIONS = (ast.Call, ast.NamedExpr, ast.Await)


class Source(NamedTuple):
    """Where a worker finds a reward."""

    spec: str
    """A name in ``BUILT_IN``, or FILE.py:NAME."""
    module: str = "burnish_reward"
    """The file's name as a module. Of a running script, "__main__", only the imports, functions,
    classes and constants are run."""
    compares_answers: bool = False
    """For burnish's own comparisons. They take seconds to load, and a model's answer may keep them
    busy for ever: they are loaded once, before workers are forked, and such an answer scores 0."""
    late_parts: tuple[tuple[str, float], ...] = ()
    """The parts of the grade of such an answer, by name."""

    @property
    def file_and_name(self) -> tuple[Path, str]:
        file, _, name = self.spec.rpartition(":")
        return Path(file), name


class Outcome(NamedTuple):
    """A ``Grade`` as it travels."""

    status: str
    reward: float
    parts: dict[str, float]
    message: str | None
    correct: bool | None = None


def score(reward: Reward, response: str, row: Mapping[str, Any]) -> Outcome:
    """Calls the reward and holds what it returns to the rules above."""
    try:
        return _read(reward(response, row))
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        said = "".join(traceback.format_exception_only(error)).strip()[:LONGEST_MESSAGE]
        frames = traceback.extract_tb(error.__traceback__, limit=-1)
        where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
        return _failed(said + where)


def _read(value: Any) -> Outcome:
    parts = dict(value) if isinstance(value, Mapping) else {"reward": value}
    status = parts.pop("status", "scored")
    says_correct, correct = "correct" in parts, parts.pop("correct", None)
    if correct not in (True, False, None):
        shown = repr(correct)[:LONGEST_MESSAGE]
        return _failed(f"correct must be True, False or None, got {shown}")
    if "reward" not in parts:
        return _failed(f"the reward's dict has no 'reward', only {', '.join(map(str, parts))}")
    for name, part in parts.items():
        if not isinstance(part, Real) or not math.isfinite(part):
            shown = repr(part)[:LONGEST_MESSAGE]
            return _failed(f"{name} must be one finite number, got {type(part).__name__} {shown}")
    numbers = {str(name): float(part) for name, part in parts.items()}
    total = numbers.pop("reward")
    if status not in ("scored", "unparsed") or (status == "unparsed" and total):
        return _failed(f"status must be scored, or unparsed with reward 0, got {status!r}, {total}")
    if not says_correct:
        correct = total >= FULL
    return Outcome(status, total, numbers, None, None if correct is None else bool(correct))


def _failed(message: str) -> Outcome:
    return Outcome("error", math.nan, {}, printable(message))


def find(reward: str | Reward) -> Source | None:
    """Where a worker would find this reward; None for a function that lives in this process alone.

    That is so for lambdas, closures, methods, functions typed into a prompt or changed since they
    were loaded, and functions of a running script that depend on what else the script did.
    """
    if isinstance(reward, str):
        path, _, name = reward.rpartition(":")
        if reward in BUILT_IN:
            return Source(reward)
        if path.endswith(".py") and name:
            return Source(f"{Path(path).resolve()}:{name}")
        known = ", ".join(BUILT_IN)
        raise DataError(f"reward must be FILE.py:NAME or one of {known}, got {reward!r}")
    module = sys.modules.get(getattr(reward, "__module__", None) or "")
    name = getattr(reward, "__qualname__", "<none>")
    file = getattr(module, "__file__", None) or ""
    if module is None or not file.endswith(".py") or getattr(module, name, None) is not reward:
        return None
    spec = f"{Path(file).resolve()}:{name}"
    if module.__name__ == "__main__" and not stands_alone(module, Path(file)):
        return None
    return Source(spec, module.__name__)


def check(reward: str) -> None:
    """Raises if a reward can't be loaded, as far as that is seen without running its file."""
    source = find(reward)
    assert source is not None
    if source.spec in BUILT_IN:
        return
    path, name = source.file_and_name
    if not path.is_file():
        raise DataError(f"reward {source.spec}: there is no file {path}")
    try:
        code = path.read_text()
        names = names_set(code)
    except (SyntaxError, ValueError) as error:
        raise _unloadable(source, error) from error
    if not names & {name, "__getattr__"} and "import *" not in code:
        known = sorted(known for known in names if not known.startswith("_"))
        raise DataError(f"reward {source.spec}: {path.name} has {known}, no function {name!r}")


def load(source: Source) -> Reward:
    """The reward itself; a file is run as a module of its own."""
    if source.spec in BUILT_IN:
        return BUILT_IN[source.spec]
    check(source.spec)
    path, name = source.file_and_name
    sys.path.append(str(path.parent))  # last, so that a reward's neighbours hide no library
    module = sys.modules[source.module] = ModuleType(source.module)
    module.__file__ = str(path)
    module.__package__ = source.module.rpartition(".")[0]
    is_script = source.module == "__main__"
    code = definitions(path) if is_script else path.read_bytes()
    try:
        exec(compile(code, path, "exec"), vars(module))
        reward: Reward = getattr(module, name)
    except (Exception, SystemExit) as error:
        raise _unloadable(source, error) from error
    return reward


def _unloadable(source: Source, error: BaseException) -> DataError:
    said = "".join(traceback.format_exception_only(error)).strip()
    return DataError(f"reward {source.spec}: the file can't be loaded: {said}")


def definitions(path: Path) -> ast.Module:
    """The script's imports, functions, classes and constants (assignments that call nothing)."""
    tree = ast.parse(path.read_bytes(), str(path))
    kept = [s for s in tree.body if isinstance(s, DEFINITIONS) or _is_constant(s)]
    return ast.Module(body=kept, type_ignores=[])


def stands_alone(script: ModuleType, path: Path) -> bool:
    """Whether a script's definitions mean in a worker what they mean in the running script.

    They don't if the script changed one of its constants, or if they read a name that only the
    rest of the script sets.
    """
    tree = definitions(path)
    constants: list[ast.stmt] = [s for s in tree.body if isinstance(s, ASSIGNMENTS)]
    now, afresh = vars(script), dict(vars(script))
    exec(compile(ast.Module(body=constants, type_ignores=[]), "script", "exec"), afresh)
    loaded = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    missing = (loaded & now.keys()) - names_set(ast.unparse(tree))
    changed = [name for name in loaded & now.keys() if repr(afresh[name]) != repr(now[name])]
    return not changed and all(name.startswith("__") for name in missing)


def names_set(code: str) -> set[str]:
    """The names that a module's code may set, also inside an if or a try."""
    symbols = symtable.symtable(code, "code", "exec").get_symbols()
    return {s.get_name() for s in symbols if s.is_assigned() or s.is_imported()}


def _is_constant(statement: ast.stmt) -> bool:
    if not isinstance(statement, ASSIGNMENTS) or statement.value is None:
        return False
    return not any(isinstance(node, ACTIONS) for node in ast.walk(statement))
