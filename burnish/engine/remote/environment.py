"""The environment of an engine: whether a Python has the packages that the engine needs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from burnish.errors import EngineError

if TYPE_CHECKING:
    from burnish.schema.recipe import Recipe

TOKEN = "BURNISH_ENGINE_TOKEN"
"""The variable of the environment that holds the token of an engine that serves."""

NEEDED = {
    "native": ("torch", "2.11"),
    "hf": ("transformers", "5.0"),
    "vllm": ("vllm", "0.24"),
}
"""The package that an engine needs in its environment, and the oldest version that has all of it,
by the engine's name."""
NEWEST = {"vllm": "0.32"}
"""The newest version of a package that burnish has been read against; others have no bound."""
ALWAYS = {"numpy": "1.26", "safetensors": "0.5"}
"""The packages that every engine's process needs."""
OLDEST = (3, 11)
"""The oldest Python that runs burnish."""
DEADLINE = 120.0
ASKED = """
import importlib.metadata as m, json, sys
owners, found = m.packages_distributions(), {}
for name in sys.argv[1:]:
    found[name] = m.version(owners[name][0]) if name in owners else None
print(json.dumps([list(sys.version_info[:2]), found]))
"""
"""A program that prints its Python's version and the versions of packages."""


def check_engine(recipe: Recipe) -> None:
    """Raises if a recipe's engine can't run in its environment, or would not let this run in."""
    own = recipe.engine
    if own.url is not None and own.name != "sglang" and not os.environ.get(TOKEN):
        raise EngineError(
            f"engine.url = '{own.url}' needs a token: set {TOKEN} in the environment to the one "
            "that `burnish engine serve` printed there"
        )
    key_of(recipe)
    if own.is_apart and own.url is None:
        check(own.name, own.python)


def key_of(recipe: Recipe) -> str | None:
    """The API key of a recipe's server; None if it has none."""
    own = recipe.engine
    if own.key is None:
        return None
    key = os.environ.get(own.key, "").strip()
    if not re.fullmatch(r"[!-~]+", key):  # an error of HTTP would print any other
        raise EngineError(
            f"engine.key = '{own.key}' is not a variable of the environment that holds a key "
            f"without blanks; export it with the API key of the server at {own.url}"
        )
    return key


def check(name: str, python: str | None) -> dict[str, str]:
    """Raises if the environment of ``python`` (None: this one) can't run the engine ``name``;
    returns the versions of the packages that it needs."""
    needed, where = dict([NEEDED[name]]) | ALWAYS, python or sys.executable
    given = f"engine.python = {python!r}" if python else f"this Python ({where})"
    command = [where, "-P", "-c", ASKED, *needed]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=True)
        version, found = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise EngineError(
            f"{given} is not a Python that runs: {error}; give the path of one, such as "
            "ENV/bin/python"
        ) from None
    problems = [
        f"{package} {_span(package, oldest)}, and has {found[package] or 'none'}"
        for package, oldest in needed.items()
        if found[package] is None or not _fits(package, oldest, parts(found[package]))
    ]
    if tuple(version) < OLDEST:
        problems.append(f"Python 3.11 or newer, and is {version[0]}.{version[1]}")
    if problems:
        raise EngineError(
            f"engine.name = '{name}': {given} needs {'; and '.join(problems)}; install it there, "
            "or name another environment by engine.python (docs/engines.md)"
        )
    return dict(found)


def _fits(package: str, oldest: str, version: tuple[int, ...]) -> bool:
    newest = parts(NEWEST.get(package, "")) or version
    return parts(oldest) <= version and version[: len(newest)] <= newest


def _span(package: str, oldest: str) -> str:
    return f"{oldest} to {NEWEST[package]}" if package in NEWEST else f"{oldest} or newer"


def parts(version: str) -> tuple[int, ...]:
    """To compare versions by."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
