"""Load an environment from a user's file, and check it before the first episode begins.

FILE.py:NAME names a class, or a function without arguments that returns an environment. A script
that creates its pool at its top level, without a main guard, must not do so again in a worker. A
worker therefore runs only the definitions of a running script.
"""

from __future__ import annotations

import inspect
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from burnish.console.text import printable
from burnish.environments.descendants import child_processes, exit_text, kill_descendants
from burnish.environments.protocol import Environment
from burnish.errors import DataError
from burnish.machine.scripts import definitions, names_set

MODULE = "burnish_environment"
"""Module name of a user's file in a worker."""
LONGEST_EXCEPTION = 300
"""Characters of an exception that an error quotes."""
ARGUMENTS = {"reset": ("row", "seed"), "step": ("message",)}
"""Arguments of the methods that an environment must have."""


class LoadedEnvironment(NamedTuple):
    """What a worker knows about an environment before its first episode."""

    make: Callable[[], Environment]
    """The class or the function that the file defines."""
    file: Path
    deterministic: bool
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that the model may call."""


def split_spec(spec: str, kind: str = "environment") -> tuple[Path, str]:
    """Return the absolute path of the file and the name in FILE.py:NAME.

    Raise a DataError, which says that a ``kind`` must have this form, if the spec has another form.
    """
    file, _, name = spec.rpartition(":")
    if not file.endswith(".py") or not name:
        raise DataError(f"{kind} must be FILE.py:NAME, got {spec!r}")
    return Path(file).resolve(), name


def load_environment(spec: str, *, is_script: bool) -> LoadedEnvironment:
    """Execute the file of an environment as a new module, and check the class that it defines.

    Of a running script (``is_script``), only the definitions are executed. A function is called in
    a fork of this process, which checks the environment that it returns. The file's directory is
    appended to ``sys.path``. Raise a DataError if the file can't be loaded or the environment lacks
    a method.
    """
    path, name = split_spec(spec)
    module = execute_file(path, name, MODULE, spec=f"environment {spec}", is_script=is_script)
    make = getattr(module, name)
    if inspect.isclass(make):
        _check_call(make, (), f"environment {spec}: the class {name}")
        deterministic = _check(make, spec, drop=1)
    elif callable(make):
        _check_call(make, (), f"environment {spec}: the function {name}")
        deterministic = _check_in_fork(make, spec, path)
    else:
        raise DataError(
            f"environment {spec}: must be a class or a function without arguments, got an object "
            f"of type {type(make).__name__}; name the class"
        )
    return LoadedEnvironment(make, path, deterministic)


def execute_file(path: Path, name: str, module: str, *, spec: str, is_script: bool) -> ModuleType:
    """Execute a user's file as the new module ``module``, and append its directory to ``sys.path``.

    Raise a DataError, which begins with ``spec``, if the file can't be loaded or does not define
    ``name``.
    """
    _check_file(spec, path, name)
    sys.path.append(str(path.parent))  # last, so that files beside it hide no library
    made = sys.modules[module] = ModuleType(module)
    made.__file__ = str(path)
    try:
        if b"async def" in path.read_bytes():
            import asyncio  # noqa: F401 here, because each episode would otherwise import it
        code = definitions(path) if is_script else path.read_bytes()
        exec(compile(code, path, "exec"), vars(made))
        getattr(made, name)
    except (Exception, SystemExit) as error:
        raise _unloadable(spec, path, error) from error
    return made


def loaded_module(module: str, name: str, *, spec: str) -> ModuleType:
    """Return a module that ``execute_file`` has made; raise a DataError if it has no ``name``."""
    made = sys.modules[module]
    _check_file(spec, Path(str(made.__file__)), name)
    return made


def exception_text(error: BaseException, file: Path) -> str:
    """Return the type and the text of an exception, and its last line in the user's file, or its
    last line anywhere if none is in that file."""
    said = "".join(traceback.format_exception_only(error)).strip()[:LONGEST_EXCEPTION]
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == file] or frames
    where = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return printable(said + where)


def _check_file(spec: str, path: Path, name: str) -> None:
    if not path.is_file():
        raise DataError(f"{spec}: there is no file {path}")
    try:
        code = path.read_text(encoding="utf-8")
        names = names_set(code)
    except (SyntaxError, ValueError) as error:
        raise _unloadable(spec, path, error) from error
    if not names & {name, "__getattr__"} and "import *" not in code:
        known = (
            ", ".join(sorted(known for known in names if not known.startswith("_"))) or "no name"
        )
        raise DataError(f"{spec}: {path.name} defines {known}, but not {name!r}")


def _check_in_fork(make: Callable[[], Any], spec: str, path: Path) -> bool:
    """Call a function in a fork and check the environment that it returns, because a user's
    function may exit or change this process. Return whether the environment is deterministic."""
    others = child_processes()
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            try:
                answer: dict[str, Any] = {"deterministic": _check(make(), spec, drop=0)}
            except DataError as error:
                answer = {"error": str(error)}
            except BaseException as error:
                said = exception_text(error, path)
                answer = {"error": f"environment {spec}: the function raised {said}"}
            os.write(writer, json.dumps(answer).encode())
        finally:
            os._exit(0)
    os.close(writer)
    _, status = os.waitpid(pid, 0)
    kill_descendants(others)
    # Not read to the end: a process that the function has started may still have the pipe open.
    os.set_blocking(reader, False)
    try:
        answer = json.loads(os.read(reader, 1 << 16) or b"{}")
    except BlockingIOError:
        answer = {}
    finally:
        os.close(reader)
    if "deterministic" in answer:
        return bool(answer["deterministic"])
    ended = f"the function's process {exit_text(os.waitstatus_to_exitcode(status))}"
    raise DataError(answer.get("error", f"environment {spec}: {ended}"))


def _check(environment: Any, spec: str, *, drop: int) -> bool:
    """Check an environment, or a class if ``drop``, the number of unbound arguments, is 1. Return
    whether it is deterministic."""
    name = environment.__name__ if drop else type(environment).__name__
    for method, arguments in ARGUMENTS.items():
        function = getattr(environment, method, None)
        if not callable(function):
            raise DataError(
                f"environment {spec}: {name} has no method {method}; define reset(self, row, seed) "
                "and step(self, message)"
            )
        static = drop and not isinstance(
            inspect.getattr_static(environment, method), staticmethod | classmethod
        )
        given = ("self", *arguments) if static else arguments
        _check_call(function, given, f"environment {spec}: {method}")
    if not callable(getattr(environment, "close", len)):
        raise DataError(f"environment {spec}: close must be a method")
    deterministic = getattr(environment, "deterministic", False)
    if not isinstance(deterministic, bool):
        raise DataError(
            f"environment {spec}: deterministic must be True or False, got {deterministic!r}"
        )
    return deterministic


def _check_call(function: Callable[..., Any], given: tuple[str, ...], name: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        takes = f"the arguments {', '.join(given)}" if given else "no argument"
        raise DataError(f"{name} must take {takes}, but has {signature} ({error})") from None


def _unloadable(spec: str, path: Path, error: BaseException) -> DataError:
    remedy = "correct the file"
    if isinstance(error, ModuleNotFoundError) and error.name:
        remedy = f"install the package that provides {error.name}, or correct the import"
    said = exception_text(error, path)
    if isinstance(error, SyntaxError):
        file = (
            Path(error.filename or "").name if error.filename not in (None, "code") else path.name
        )
        said = f"{type(error).__name__}: {error.msg} ({file}, line {error.lineno})"
    return DataError(f"{spec}: the file can't be loaded: {said}; {remedy}")
