"""An environment plays one episode with the model: it writes the messages that the model answers.

A user writes it as a class in a file:

    class Game:
        deterministic = True                # optional, False by default

        def reset(self, row, seed):         # the first messages, or a text: one user message
            return f"Guess a number below {row['limit']}."

        def step(self, message):            # message: {"role": "assistant", "content": "..."}
            return {"messages": "Too low.", "reward": None, "done": False, "metrics": {}}

        def close(self):                    # optional
            ...

All keys of a step's result are optional, and a text alone is one user message. Each method may be
an ``async def``. An environment is deterministic if the row, the seed and the actions determine its
observations; an episode whose process was killed from outside can then be replayed.

    key         value                                      default
    messages    list of messages, or a text                none; required until the episode is done
    reward      a finite number, or None                   None
    done        whether the episode is over                False
    metrics     a dict of finite numbers                   {}
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal, Protocol

KEYS = ("messages", "reward", "done", "metrics")
"""Keys of a step's result."""
ROLES = ("user", "tool", "system")
"""Roles of an environment's messages; only ``reset`` may return a message of the system or, as an
example, of the assistant."""
ANSWERING = ("user", "tool")
"""Roles of the messages that ``step`` may return."""
TOOL_CALLS, TOOL_ERRORS = "tool_calls", "tool_errors"
"""Metrics of a step that count the episode's tool calls so far, and those that failed. Without the
first, each message of the role "tool" counts as a call."""
LONGEST_VALUE = 100
"""Characters of a wrong value that an error quotes."""
EnvironmentCall = Literal["reset", "step", "close"]
"""A method of an environment."""


class ToolError(Exception):
    """A failed call of a tool; the model reads the text, without the name of this class."""


class InvalidResult(Exception):
    """A result against the rules, which is not an exception of the user's code."""


class Environment(Protocol):
    """One episode's environment. ``close`` and the attribute ``deterministic`` are optional."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Begin the episode of a data row; return its first messages."""
        ...

    def step(self, message: Mapping[str, Any]) -> Any:
        """Take the model's message; return a dict with the keys `KEYS`, or a text."""
        ...


@dataclass(frozen=True)
class Observation:
    """An environment's result of one call, or the reason why there is none."""

    messages: list[dict[str, str]]
    """Messages with the keys "role" and "content"."""
    reward: float | None
    done: bool
    metrics: dict[str, float]
    error: str | None = None
    """Why the environment failed; then there are no messages, reward and metrics. None if it did
    not fail."""
    seconds: float = 0.0
    """Wall-clock time of the call."""
    was_raised: bool = False
    """Whether the error is an exception that the environment's own code has raised."""
    was_killed: bool = False
    """Whether the process was lost because someone else has killed it or its supervisor."""
    output: str = ""
    """The end of what a process that has ended during the call has printed."""


def failed_observation(
    error: str, seconds: float = 0.0, *, was_raised: bool = False, output: str = ""
) -> Observation:
    """Return the observation of an environment that failed."""
    return Observation([], None, False, {}, error, seconds, was_raised=was_raised, output=output)


def read_observation(value: Any, call: Literal["reset", "step"]) -> Observation:
    """Check the result of ``reset`` or ``step`` and return it as an observation.

    Raise a ValueError if it breaks the rules at the top of this file.
    """
    if call == "reset":
        messages = _messages(value, "reset")
        if not messages:
            raise ValueError("reset must return at least one message, got none")
        return Observation(messages, None, False, {})
    if isinstance(value, str):
        return Observation(_messages(value, "step"), None, False, {})
    if not isinstance(value, Mapping):
        raise ValueError(
            f"step must return a dict with keys from {', '.join(KEYS)}, or a text, got "
            f"{_shown(value)}"
        )
    unknown = [key for key in value if key not in KEYS]
    if unknown:
        raise ValueError(
            f"step returned the unknown key {_shown(unknown[0])}; the known keys are "
            f"{', '.join(KEYS)}"
        )
    messages = _messages(value.get("messages", []), "step")
    done = value.get("done", False)
    if not isinstance(done, bool):
        raise ValueError(f"done must be True or False, got {_shown(done)}; write bool(...)")
    if not messages and not done:
        raise ValueError(
            "step returned no messages although the episode is not done; return a message for the "
            'model to answer, or "done": True'
        )
    reward = value.get("reward")
    number = None if reward is None else _number(reward, "reward")
    return Observation(messages, number, done, _metrics(value.get("metrics", {})))


def _messages(value: Any, call: Literal["reset", "step"]) -> list[dict[str, str]]:
    if isinstance(value, str):
        return [{"role": "user", "content": _text(value, f"the text of {call}")}]
    if not isinstance(value, list | tuple):
        given = "reset must return" if call == "reset" else "messages of step must be"
        raise ValueError(f"{given} a list of messages or a text, got {_shown(value)}")
    return [_message(message, f"message {i} of {call}", call) for i, message in enumerate(value)]


def _message(value: Any, name: str, call: Literal["reset", "step"]) -> dict[str, str]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be a dict with role and content, got {_shown(value)}")
    unknown = [key for key in value if key not in ("role", "content")]
    if unknown:
        raise ValueError(
            f"{name} has the unknown key {_shown(unknown[0])}; the known keys are role, content"
        )
    missing = [key for key in ("role", "content") if key not in value]
    if missing:
        raise ValueError(f"{name} has no {missing[0]}; write both role and content")
    role = value["role"]
    known = (*ROLES, "assistant") if call == "reset" else ROLES
    if not isinstance(role, str) or role not in known:
        raise ValueError(f"role of {name} must be one of {', '.join(known)}, got {_shown(role)}")
    if role == "system" and call == "step":
        raise ValueError(
            f"role of {name} must be user or tool, got 'system'; only reset may return a system "
            "message"
        )
    return {"role": str(role), "content": _text(value["content"], f"content of {name}")}


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {_shown(value)}; write str(...)")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} must be valid Unicode, but character {error.start} is the lone surrogate "
            f"{value[error.start]!r}; decode the text with errors='replace'"
        ) from None
    return str(value)


def _metrics(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise ValueError(f"metrics must be a dict of numbers, got {_shown(value)}")
    for name in value:
        if not isinstance(name, str):
            raise ValueError(f"names of metrics must be texts, got {_shown(name)}")
        _text(name, "a name of metrics")
    return {str(name): _number(number, f"metric {name!r}") for name, number in value.items()}


def _number(value: Any, name: str) -> float:
    problem = ValueError(f"{name} must be one finite number, got {_shown(value)}")
    if not isinstance(value, Real):
        raise problem
    try:
        number = float(value)
    except OverflowError:
        raise problem from None
    if not math.isfinite(number):
        raise problem
    return number


def _shown(value: Any) -> str:
    """Return the type and the beginning of a value, for an error."""
    kind = type(value).__name__
    try:
        text = repr(value)
    except Exception:  # a user's __repr__, or an integer with thousands of digits
        return kind
    return f"{kind} {text[:LONGEST_VALUE]}{'…' if len(text) > LONGEST_VALUE else ''}"
