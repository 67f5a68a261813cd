"""Checks of an engine's environment: its packages, and the variables with its token and key."""

from __future__ import annotations

import json
import os
import re
import sys

from burnish.errors import ChildError, EngineError
from burnish.machine.process import run_command

TOKEN = "BURNISH_ENGINE_TOKEN"
"""Environment variable that holds the token of a `burnish engine serve`."""

NEEDED = {
    "native": ("torch", "2.11"),
    "hf": ("transformers", "5.0"),
    "vllm": ("vllm", "0.24"),
}
"""Package that each engine needs in its environment, and its oldest supported version."""
NEWEST = {"vllm": "0.32"}
"""Newest supported versions; other packages have no upper bound."""
ALWAYS = {"numpy": "1.26", "safetensors": "0.5"}
"""Packages that the process of every engine needs, with their oldest supported versions."""
OLDEST = (3, 11)
"""Oldest supported Python."""
TIMEOUT = 120.0
"""Seconds that a Python has to report its packages."""
REPORT_VERSIONS = """
import importlib.metadata as m, json, sys
owners, found = m.packages_distributions(), {}
for name in sys.argv[1:]:
    found[name] = m.version(owners[name][0]) if name in owners else None
print(json.dumps([list(sys.version_info[:2]), found]))
"""
"""A program that prints the versions of its Python and of the packages in its arguments."""


def check_token(url: str) -> None:
    """Raise an EngineError if the environment variable `TOKEN` is not set, which the `burnish
    engine serve` at ``url`` needs."""
    if not os.environ.get(TOKEN):
        raise EngineError(
            f"engine.url = '{url}' needs a token: set {TOKEN} in the environment to the token "
            "that `burnish engine serve` printed"
        )


def read_key(variable: str | None, url: str | None) -> str | None:
    """Return the API key of the SGLang server at ``url`` from the environment variable
    ``variable``, without surrounding blanks; None if ``variable`` is None. Raise an EngineError if
    the variable is not set or its value can't be a key."""
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not re.fullmatch(r"[!-~]+", key):  # an HTTP error would print any other value
        raise EngineError(
            f"engine.key = '{variable}' must be an environment variable that holds a key without "
            f"blanks; export it with the API key of the server at {url}"
        )
    return key


def check_packages(name: str, python: str | None) -> dict[str, str]:
    """Return the versions of the packages that the engine ``name`` needs, by the packages' names,
    in a Python environment. Raise an EngineError if a package is missing or its version is not
    supported, or if the Python does not run or is too old.

    ``name``: a key of `NEEDED`; ``python``: the environment's interpreter, which is run; None for
    this one.
    """
    needed, where = dict([NEEDED[name]]) | ALWAYS, python or sys.executable
    given = f"engine.python = {python!r}" if python else f"this Python ({where})"
    command = [where, "-P", "-c", REPORT_VERSIONS, *needed]
    try:
        version, found = json.loads(run_command(command, name=where, timeout=TIMEOUT))
    except (ChildError, ValueError) as error:
        raise EngineError(
            f"{given} is not a working Python; use a path such as ENV/bin/python: {error}"
        ) from None
    problems = [
        f"{package} {_range(package, oldest)}, and has {found[package] or 'none'}"
        for package, oldest in needed.items()
        if found[package] is None or not _fits(package, oldest, version_parts(found[package]))
    ]
    if tuple(version) < OLDEST:
        problems.append(f"Python 3.11 or newer, and is {version[0]}.{version[1]}")
    if problems:
        raise EngineError(
            f"engine.name = '{name}': {given} needs {'; and '.join(problems)}; install it there, "
            "or select another environment with engine.python (docs/engines.md)"
        )
    return dict(found)


def _fits(package: str, oldest: str, version: tuple[int, ...]) -> bool:
    newest = version_parts(NEWEST.get(package, "")) or version
    return version_parts(oldest) <= version and version[: len(newest)] <= newest


def _range(package: str, oldest: str) -> str:
    return f"{oldest} to {NEWEST[package]}" if package in NEWEST else f"{oldest} or newer"


def version_parts(version: str) -> tuple[int, ...]:
    """Return the first three numbers in a version, for comparisons: (0, 5, 15) for 0.5.15.post1;
    fewer if the version has fewer."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
