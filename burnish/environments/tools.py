"""Load the tools of a task, and answer the calls in a model's messages.

A tool is a Python function, whose type hints and docstring become a JSON schema (see ``schema``).
``ToolEnvironment`` wraps an environment: it runs the calls of a message, in their order, and
returns their results. The environment itself receives only messages without calls.

    what fails                          the model reads
    a malformed call                    what is wrong with its JSON
    an unknown tool, wrong arguments    the tools, or the argument
    the function raises                 the exception's type and text
    the function is too slow            the time limit

None of them ends the episode. A function that can't be interrupted at its time limit, because it
runs in C, ends it at the limit of the whole step.
"""

from __future__ import annotations

import inspect
import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from burnish.calls import CallFormatName, ToolCall, read_calls
from burnish.environments.calculator import calculator
from burnish.environments.loading import (
    MODULE,
    LoadedEnvironment,
    execute_file,
    loaded_module,
    split_spec,
)
from burnish.environments.protocol import TOOL_CALLS, TOOL_ERRORS, Environment, ToolError
from burnish.environments.sandbox import PythonSource, python_tool
from burnish.environments.schema import check_arguments, tool_schema
from burnish.environments.search import SearchSource, search_tools
from burnish.errors import DataError

MOST_CALLS = 32
"""Calls of one message that are run."""
LONGEST_RESULT = 200_000
"""Characters of a result; the rest is discarded. ``task.observation_tokens`` cuts it again."""
LONGEST_FAILURE = 1000
"""Characters of an exception's text."""
CALCULATOR = "calculator"
ToolSource = str | SearchSource | PythonSource
"""A tool of a recipe: FILE.py:NAME, `CALCULATOR`, or the settings of another shipped tool."""


@dataclass(frozen=True)
class ToolSettings:
    """The tools of a task."""

    sources: tuple[ToolSource, ...]
    calls: CallFormatName = "hermes"
    """Format of the model's calls."""
    call_seconds: float = 5.0
    """Time limit of a call."""
    step_seconds: float = 20.0
    """Time limit of all calls of a message; a later call is not run."""


class Tool(NamedTuple):
    """A function that the model may call."""

    function: Callable[..., Any]
    schema: Mapping[str, Any]
    """JSON schema, in the form that chat templates expect."""

    @property
    def name(self) -> str:
        return str(self.schema["function"]["name"])

    @property
    def deterministic(self) -> bool:
        """Whether the arguments determine the result; the function's attribute of this name."""
        return bool(getattr(self.function, "deterministic", False))


class ToolResult(NamedTuple):
    """The text of a call's result, or of its error."""

    text: str
    is_error: bool = False


def add_tools(
    loaded: LoadedEnvironment, settings: ToolSettings, script: Path | None
) -> LoadedEnvironment:
    """Return an environment whose model may call tools. ``script`` is the running script, of which
    only the definitions are executed. Raise a DataError if a tool can't be loaded."""
    tools = load_tools(settings, loaded.file, script)
    return loaded._replace(
        make=partial(ToolEnvironment, loaded.make, tools, settings),
        deterministic=loaded.deterministic and all(tool.deterministic for tool in tools),
        tools=tuple(tool.schema for tool in tools),
    )


def load_tools(
    settings: ToolSettings, environment: Path | None = None, script: Path | None = None
) -> list[Tool]:
    """Load the functions of tools and derive their schemas. Functions in the file of the
    ``environment`` are taken from its module. Raise a DataError if there is none or it can't be a
    tool."""
    modules = {} if environment is None else {environment: MODULE}
    found: list[Tool] = []
    for source in settings.sources:
        for function in _functions(source, modules, script):
            where = f"tool {source}" if isinstance(source, str) else f"tool {source.name}"
            tool = Tool(function, tool_schema(function, where))
            if tool.name in {other.name for other in found}:
                raise DataError(
                    f"{where}: there are two tools with the name {tool.name}; rename one"
                )
            found.append(tool)
    return found


def _functions(
    source: ToolSource, modules: dict[Path, str], script: Path | None
) -> list[Callable[..., Any]]:
    if isinstance(source, SearchSource):
        return search_tools(source)
    if isinstance(source, PythonSource):
        return [python_tool(source)]
    if source == CALCULATOR:
        return [calculator]
    path, name = split_spec(source, "tool")
    if path not in modules:
        modules[path] = f"burnish_tools_{len(modules)}"
        module = execute_file(
            path, name, modules[path], spec=f"tool {source}", is_script=path == script
        )
    else:
        module = loaded_module(modules[path], name, spec=f"tool {source}")
    function = getattr(module, name)
    if not inspect.isfunction(function):
        raise DataError(
            f"tool {source}: must be a function, got an object of type {type(function).__name__}; "
            "name a function with type hints and a docstring"
        )
    return [function]


class ToolEnvironment:
    """An environment whose model may call tools."""

    def __init__(
        self, make: Callable[[], Environment], tools: Sequence[Tool], settings: ToolSettings
    ) -> None:
        self._environment, self._settings = make(), settings
        self._tools = {tool.name: tool for tool in tools}
        self._calls = self._errors = 0

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        return self._environment.reset(row, seed)

    def step(self, message: Mapping[str, Any]) -> Any:
        """Return the results of a message's calls, or the environment's answer if it has none."""
        calls = read_calls(message["content"], self._settings.calls)
        if not calls:
            return self._environment.step(message)
        cpu_left, _ = signal.setitimer(signal.ITIMER_PROF, 0)  # calls have limits of their own
        try:
            results = self._answer_all(calls)
        finally:
            signal.setitimer(signal.ITIMER_PROF, cpu_left)
        self._calls += len(calls)
        self._errors += sum(result.is_error for result in results) + len(calls[MOST_CALLS:])
        return {
            "messages": [{"role": "tool", "content": result.text} for result in results],
            "metrics": {TOOL_CALLS: self._calls, TOOL_ERRORS: self._errors},
        }

    def close(self) -> Any:
        close = getattr(self._environment, "close", None)
        return None if close is None else close()

    def _answer_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        deadline, own = time.monotonic() + self._settings.step_seconds, os.getpid()
        results = []
        for call in calls[:MOST_CALLS]:
            results.append(self._answer(call, deadline - time.monotonic()))
            if os.getpid() != own:  # the function has forked, and this is its child
                os._exit(0)
        if len(calls) > MOST_CALLS:
            last = results.pop()
            said = f"a message may have at most {MOST_CALLS} calls; the others were not run"
            results.append(ToolResult(f"{last.text}\nerror: {said}", last.is_error))
        return results

    def _answer(self, call: ToolCall, left: float) -> ToolResult:
        if call.error is not None:
            return _failed(call.error)
        tool = self._tools.get(call.name)
        if tool is None:
            known = ", ".join(self._tools)
            return _failed(f"there is no tool {call.name[:80]!r}; the tools are {known}")
        try:
            parameters = tool.schema["function"]["parameters"]
            arguments = check_arguments(tool.function, parameters, call.arguments)
        except (ValueError, RecursionError) as error:
            return _failed(f"{call.name}: {error}")
        if left <= 0:
            return _failed(
                f"{call.name} was not run: the earlier calls of this message took "
                f"{self._settings.step_seconds:g} s"
            )
        seconds = min(left, self._settings.call_seconds)
        return call_function(partial(_text_of, tool.function, arguments), call.name, seconds)


def call_function(function: Callable[[], str], name: str, seconds: float) -> ToolResult:
    """Call the function of the tool ``name``, and interrupt it after ``seconds``. Return its text,
    or the text of the exception that it raised."""
    is_running = True

    def interrupt(number: int, frame: FrameType | None) -> None:
        if is_running:
            raise _TimeLimit

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds)
            text = function()
        finally:
            is_running = False
            signal.setitimer(signal.ITIMER_REAL, 0)
        return ToolResult(text)
    except _TimeLimit:
        return _failed(f"{name} took more than {seconds:g} s")
    except ToolError as error:
        return _failed(_said(error))
    except BaseException as error:  # also SystemExit: a function does not end the episode
        return _failed(f"{type(error).__name__}: {_said(error)}".removesuffix(": "))
    finally:
        signal.signal(signal.SIGALRM, previous)


class _TimeLimit(BaseException):
    """A function has exceeded its time limit. Functions that catch Exception do not catch it."""


def _text_of(function: Callable[..., Any], arguments: Mapping[str, Any]) -> str:
    """Call a function and return its result as text: a text as it is, anything else as JSON."""
    value = function(**arguments)
    if inspect.iscoroutine(value):
        import asyncio

        value = asyncio.run(value)
    if isinstance(value, str):
        return _readable(value)
    try:
        return _readable(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError):
        return _readable(str(value))


def _readable(text: str) -> str:
    """Return a text of limited length, without lone surrogates."""
    if len(text) > LONGEST_RESULT:
        text = f"{text[:LONGEST_RESULT]} … [cut]"
    return text.encode(errors="replace").decode()


def _said(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:  # the exception's own __str__
        text = "its text can't be read"
    return text if len(text) <= LONGEST_FAILURE else f"{text[:LONGEST_FAILURE]} …"


def _failed(text: str) -> ToolResult:
    return ToolResult(f"error: {_readable(text)}", is_error=True)
