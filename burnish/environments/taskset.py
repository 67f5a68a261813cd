"""A taskset of the package verifiers with its environment, as a process that plays its tasks loads
it.

    this module      loads the environment and its tasks; here the user's code defines everything
    taskset_rows     the rows of a run, from a process of their own
    taskset_agent    the agent that plays the task of a row

These modules import verifiers inside of functions: only a run with such a task needs the package.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from burnish.environments.loading import exception_text
from burnish.errors import DataError, MissingExtra

VERSIONS = ((0, 4), (0, 5))
"""The first version of verifiers that burnish supports, and the first that it does not."""
SUBPROCESS = "subprocess"
"""Type of verifiers' runtime that starts programs as processes of this machine."""
NO_RETRIES = {"max_retries": 0, "rules": ()}
"""verifiers' retries: none, because a second attempt would be learned together with the first."""
LONGEST_ERROR = 500
"""Characters of an error of verifiers that burnish quotes."""


@dataclass(frozen=True)
class TasksetSource:
    """A taskset as a recipe names it."""

    taskset: str
    """Name of its module, or FILE.py."""
    env: Mapping[str, Any] = field(default_factory=dict)
    """verifiers' own settings, its section "env"."""
    tasks: int | None = None
    """Number of tasks, the first ones; None: all."""
    role: str | None = None
    """The role that learns; None: the one that does."""
    runs_commands: bool = False
    """Whether a harness may run commands of the model on this machine."""


@dataclass(frozen=True)
class LoadedTaskset:
    """An environment of verifiers with its tasks."""

    source: TasksetSource
    env: Any
    """The ``verifiers.v1.Env``."""
    tasks: Sequence[Any]
    """The ``verifiers.v1.Task`` of each row."""
    roles: Mapping[str, Any]
    """Settings of the roles, ``verifiers.v1.AgentConfig``, by name."""


def has_verifiers() -> bool:
    """Whether verifiers is installed, in any version."""
    try:
        version("verifiers")
    except PackageNotFoundError:
        return False
    return True


def require_verifiers() -> None:
    """Raise a MissingExtra error if verifiers is not installed, and a DataError if its version is
    not supported."""
    first, beyond = VERSIONS
    try:
        found = version("verifiers")
    except PackageNotFoundError:
        raise MissingExtra("verifiers", "task.name = 'verifiers'") from None
    numbers = tuple(int(part) for part in found.split(".")[:2] if part.isdigit())
    if not first <= numbers < beyond:
        wanted = f">={_dotted(first)},<{_dotted(beyond)}"
        raise DataError(
            f"task.name = 'verifiers' needs the package verifiers {wanted}, got {found}; install "
            f"it: pip install 'verifiers{wanted}'"
        )


def load_taskset(source: TasksetSource) -> LoadedTaskset:
    """Import a taskset and its environment, and load the tasks. Programs of the harness run as
    processes of this machine, and no episode is played twice.

    Raise a DataError if the module or the settings do not suit, and a MissingExtra error if
    verifiers is not installed.
    """
    require_verifiers()
    named = Path(source.taskset)
    is_file = source.taskset.endswith(".py")
    if is_file:
        _check_file_name(named)
        sys.path.append(str(named.resolve().parent))
    import verifiers.v1 as vf

    if is_file and find_spec(f"verifiers.v1.tasksets.{named.stem}") is not None:
        raise _name_is_taken(named, "a taskset of verifiers")
    module = named.stem if is_file else source.taskset
    given = _settings(source, module)
    try:
        kind = vf.env_config_type(module, given.get("id", ""))
        names = [
            name
            for name, one in kind.model_fields.items()
            if isinstance(one.default, vf.AgentConfig)
        ]
        _check_roles(source, names)
        config = kind.model_validate(given | {name: _role(given.get(name)) for name in names})
        harnesses = {role: vf.load_harness(one) for role, one in config.agent_harnesses().items()}
        _check_harnesses(source, harnesses, vf.task_type(module))
        loaded = vf.load_environment(config)
        tasks = _tasks(source, loaded.taskset)
    except DataError:
        raise
    except (Exception, SystemExit) as error:
        raise DataError(_load_error(source, module, error)) from error
    roles = {name: getattr(config, name) for name in names}
    return LoadedTaskset(source, loaded, tasks, roles)


def row_of(task: Any) -> dict[str, Any]:
    """Return the row of a task: its place, a key of its contents without the place, and its
    prompt."""
    fields = task.data.model_dump(mode="json", exclude_none=True)
    place = fields.pop("idx")
    content = json.dumps(fields, sort_keys=True).encode()
    key = hashlib.sha256(content).hexdigest()[:16]
    texts = [task.data.system_prompt, task.data.prompt_text]
    return {"task": place, "key": key, "prompt": "\n\n".join(text for text in texts if text)}


def _check_file_name(file: Path) -> None:
    """Raise a DataError if the file of a taskset does not exist, or if its name means another
    module or none, because verifiers imports the taskset by name."""
    where = f"task.taskset = {str(file)!r}"
    if not file.is_file():
        raise DataError(f"{where}: there is no such file")
    name, folder = file.stem, file.resolve().parent
    wanted = re.sub(r"\W", "_", name, flags=re.ASCII).lower()
    if name != wanted:
        raise DataError(
            f"{where}: verifiers imports a taskset by a name of lower-case letters, digits and _; "
            f"rename the file, for example {wanted}.py"
        )
    others = [entry for entry in sys.path if Path(entry).resolve() != folder]
    found = PathFinder.find_spec(name, others)
    other = None if found is None else found.origin  # a folder without __init__.py has no origin
    if other is None and name in sys.stdlib_module_names:
        other = "Python's standard library"
    if other is not None:
        raise _name_is_taken(file, other)


def _name_is_taken(file: Path, other: str) -> DataError:
    return DataError(
        f"task.taskset = {str(file)!r}: the file has the name of another module, {file.stem} "
        f"({other}), and Python imports one module of a name; rename the file, for example "
        f"{file.stem}_tasks.py"
    )


def _settings(source: TasksetSource, module: str) -> dict[str, Any]:
    """Return verifiers' settings of a recipe, with the module of the taskset and without
    retries."""
    for name in ("retries", "interception"):
        if name in source.env:
            raise DataError(
                f"task.env.{name}: burnish sets it, because each episode is played once, in its "
                "own process; remove it"
            )
    own = dict(source.env.get("taskset") or {})
    if own.get("id", module) != module:
        raise DataError(
            f"task.env.taskset.id = {own['id']!r} is another taskset than task.taskset = "
            f"{source.taskset!r}; remove one of them"
        )
    return {**source.env, "taskset": own | {"id": module}, "retries": NO_RETRIES}


def _role(given: Any) -> dict[str, Any]:
    """Return the settings of a role, whose programs are processes of this machine."""
    return {**(given or {}), "runtime": {"type": SUBPROCESS}, "retries": NO_RETRIES}


def _check_roles(source: TasksetSource, roles: Sequence[str]) -> None:
    """Raise a DataError if the role that learns does not exist, or if a setting is one that burnish
    sets."""
    if source.role is not None and source.role not in roles:
        known = ", ".join(roles)
        raise DataError(f"task.role = {source.role!r} is no role of this environment, only {known}")
    for name in roles:
        given = source.env.get(name) or {}
        runtime = given.get("runtime", {})
        if runtime not in ({}, {"type": SUBPROCESS}):
            raise DataError(
                f"task.env.{name}.runtime = {runtime!r}: burnish runs harnesses as processes of "
                "this machine (runtime subprocess); remove it"
            )
        sets = ("retries",) if "client" in given else ("retries", "model", "sampling")
        for setting in (one for one in sets if one in given):
            raise DataError(
                f"task.env.{name}.{setting}: burnish sets it, because the policy plays this role "
                "and each episode is played once; remove it"
            )


def _check_harnesses(source: TasksetSource, harnesses: Mapping[str, Any], task: Any) -> None:
    """Raise a DataError if a harness or the tasks need a container, or if a harness runs commands
    of the model although the recipe does not allow it."""
    for role, harness in harnesses.items():
        name = harness.config.id
        remedy = f"set task.env.{role}.harness.id to another one"
        if harness.NEEDS_CONTAINER or task.NEEDS_CONTAINER:
            which = f"harness {name!r}" if harness.NEEDS_CONTAINER else f"task {task.__name__}"
            raise DataError(
                f"the {which} needs a container (NEEDS_CONTAINER), and burnish runs harnesses as "
                f"processes of this machine; {remedy}, or use another taskset"
            )
        if harness.EXECUTES_CODE and not source.runs_commands:
            raise DataError(
                f"the harness {name!r} of the role {role!r} runs commands that the model writes "
                "(EXECUTES_CODE), on this machine and with all rights of your user; set "
                "task.commands = 'allow' to allow it, set EXECUTES_CODE = False in a harness that "
                f"runs none, or {remedy}"
            )


def _tasks(source: TasksetSource, taskset: Any) -> list[Any]:
    if source.tasks is None and not taskset.bounded:
        raise DataError(
            f"task.taskset = {source.taskset!r} has endlessly many tasks; set task.tasks, the "
            "number of tasks to use"
        )
    tasks = list(islice(taskset, source.tasks))
    if not tasks:
        raise DataError(f"task.taskset = {source.taskset!r} has no tasks")
    with_image = next((task for task in tasks if task.data.image is not None), None)
    if with_image is not None:
        raise DataError(
            f"task.taskset = {source.taskset!r}: task {with_image.data.idx} needs the container "
            f"image {with_image.data.image!r}, and burnish runs harnesses as processes of this "
            "machine; use a taskset without images"
        )
    return tasks


def _load_error(source: TasksetSource, module: str, error: BaseException) -> str:
    """Return the text for a taskset that can't be loaded."""
    where = f"task.taskset = {source.taskset!r}"
    made = sys.modules.get(module.rpartition("/")[2].split("@")[0].replace("-", "_").lower())
    said = str(error)
    missing = "defines no `__all__`" in said or "exports no Taskset" in said
    if (
        (missing and hasattr(made, "load_environment"))
        or "from 'verifiers'" in said
        or (isinstance(error, AttributeError) and "module 'verifiers' has no attribute" in said)
    ):
        return (
            f"{where} is an environment for verifiers before 0.4: it does not export a Taskset; "
            "use its version for verifiers 0.4, a module that names a Taskset in __all__"
        )
    if isinstance(error, ModuleNotFoundError) and "tried to import" in said:
        return (
            f"{where}: there is no module of this name; install the package of the taskset, or "
            "name its file, FILE.py"
        )
    if hasattr(error, "errors"):  # of pydantic
        found = error.errors()[0]
        key = ".".join(map(str, found["loc"]))
        return f"{where}: task.env.{key}: {found['msg'][:LONGEST_ERROR]}"
    file = Path(getattr(made, "__file__", None) or __file__)
    return f"{where} can't be loaded: {exception_text(error, file)}"


def _dotted(numbers: Sequence[int]) -> str:
    return ".".join(map(str, numbers))
