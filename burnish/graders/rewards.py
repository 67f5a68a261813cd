"""A reward is a function of (response text, row) that returns a number or a dict of parts.

An ``async def`` is awaited; many of its calls run at the same time. A function that ``batched``
marks takes a list of responses and a list of their rows, and returns a list of results.

A dict has the key "reward" and optionally other parts, all of them numbers. Its "status" may be
"unparsed" for a response that could not be parsed, which scores 0. Its "correct" is True, False, or
None if the reward has no notion of correctness; without it, a reward of at least 1 is correct.
Anything else that a function does is an error of the grader: a counted failure with a message,
never a reward of 0. Workers import this file, so it does not import numpy.

A script that calls ``burnish.train`` at its top level, without a main guard, must not do so again
in a worker. A worker therefore runs only the definitions of a running script.
"""

from __future__ import annotations

import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

from burnish.console.text import printable
from burnish.errors import DataError
from burnish.graders import keywords
from burnish.graders.questions import QUESTION_REWARDS
from burnish.machine.scripts import definitions, names_set, stands_alone

Reward = Callable[[str, Mapping[str, Any]], Any]
"""A function that grades one response or, if it is batched, lists of responses and rows."""
AnyReward = TypeVar("AnyReward", bound=Callable[..., Any])
Style = Literal["single", "batched", "async"]
"""How a reward is called: with one response, with a list of responses, or concurrently."""
Cause = Literal["exception", "value", "wall", "cpu", "memory", "exit"]
"""Why there is no grade: the reward raised, returned a value against the rules, exceeded a limit,
or ended its worker."""


def none(response: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Built-in reward "none": 0 for every response, neither correct nor wrong. It is for rows that
    are trained on with a reward model or a teacher."""
    return {"reward": 0.0, "correct": None}


BUILT_IN: dict[str, Reward] = {**keywords.REWARDS, **QUESTION_REWARDS, "none": none}
LONGEST_MESSAGE = 300
ONE_RESPONSE = (
    "a reward takes one response and its row; if it takes lists of them, mark it with "
    "@burnish.batched"
)
"""Remedy for a reward that returns a list and is not batched."""
AT_ONCE = 64
"""Maximum number of concurrent calls of an async reward in one worker."""
FULL = 1 - 1e-6
"""Least reward of a correct response if the reward does not return "correct": 1 up to rounding."""


class Source(NamedTuple):
    """Where a worker finds a reward."""

    spec: str
    """A name in ``BUILT_IN``, or FILE.py:NAME."""
    module: str = "burnish_reward"
    """Module name of the file. From a running script, "__main__", a worker runs only the imports,
    functions, classes and constants."""
    compares_answers: bool = False
    """Whether this is one of burnish's own comparisons of answers. They take seconds to load, so
    they are loaded once, before workers are forked. A response on which they time out scores 0."""
    late_parts: tuple[tuple[str, float], ...] = ()
    """(name, value) pairs: the parts of the grade of a response on which a comparison times out."""

    @property
    def file_and_name(self) -> tuple[Path, str]:
        """The file and the name in a ``spec`` of the form FILE.py:NAME."""
        file, _, name = self.spec.rpartition(":")
        return Path(file), name


class Outcome(NamedTuple):
    """The result of grading a response as a worker sends it; the pool converts it to a ``Grade``.
    It needs neither numpy nor enums.

    ``status`` is "scored", "unparsed", "timeout" or "error". With "error", ``reward`` is NaN and
    ``message`` says what failed.
    """

    status: str
    reward: float
    parts: dict[str, float]
    message: str | None
    correct: bool | None = None
    says_correct: bool = False
    """Whether the reward itself returned ``correct``."""
    cause: Cause | None = None
    """Why there is no grade; None if there is one."""


def batched(reward: AnyReward) -> AnyReward:
    """Mark a reward as batched, and return it; usually a decorator.

    A batched reward takes a list of responses and a list of rows, and returns a list with one
    result per response.
    """
    reward.batched = True  # type: ignore[attr-defined]
    return reward


def style_of(reward: Reward) -> Style:
    """Return how a reward is called: "single", "batched" or "async".

    A batched reward is "batched" even if it is an ``async def``.
    """
    function = reward.func if isinstance(reward, partial) else reward
    if getattr(function, "batched", False):
        return "batched"
    return "async" if _is(inspect.iscoroutinefunction, reward) else "single"


def _is(kind: Callable[[Any], bool], reward: Reward) -> bool:
    """Return whether the reward, or the method that calls it if it is an object, is of a kind."""
    return kind(reward) or kind(getattr(reward, "__call__", None))  # noqa: B004


def score(reward: Reward, response: str, row: Mapping[str, Any]) -> Outcome:
    """Call the reward and check its result by the rules at the top of this file.

    An exception, or a result that breaks the rules, gives an outcome with the status "error". A
    MemoryError is raised, and so are exceptions such as KeyboardInterrupt that no reward should
    catch.
    """
    return _checked(lambda: _read_one(reward(response, row)))


def _checked(grade: Callable[[], Outcome]) -> Outcome:
    try:
        return grade()
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        return raised(error)


def score_batch(
    reward: Reward,
    responses: Sequence[str],
    rows: Sequence[Mapping[str, Any]],
    run: Callable[[Any], Any],
) -> list[Outcome]:
    """Call a batched reward and check its results like ``score``; return one outcome per response.

    ``run`` runs the coroutine of a reward that is an ``async def`` and returns its result. An
    exception, or a result that is not a list with one item per response, gives each response an
    outcome with the status "error".
    """
    call: Callable[[Any, Any], Any] = reward
    try:
        found = call(list(responses), list(rows))
        if inspect.iscoroutine(found):
            found = run(found)
        values = _listed(found)
    except MemoryError:
        raise
    except (Exception, SystemExit) as error:
        return [raised(error)] * len(responses)
    if values is None or len(values) != len(responses):
        got = type(found).__name__ if values is None else str(len(values))
        said = f"a batched reward must return a list of {len(responses)} results, one per response"
        return [_failed(f"{said}, got {got}")] * len(responses)
    return [_checked(partial(_read, value)) for value in values]


def _listed(found: Any) -> list[Any] | None:
    """Return a batched reward's results as a list; None if they are not a list or the like: a text,
    a mapping or a single value."""
    if hasattr(found, "tolist"):  # an array or a tensor
        found = found.tolist()
    is_list = isinstance(found, Iterable) and not isinstance(found, str | bytes | Mapping)
    return list(found) if is_list else None


async def score_async(
    reward: Reward, response: str, row: Mapping[str, Any], seconds: float
) -> Outcome:
    """Await a reward for at most ``seconds``, and check its result like ``score``. A timeout gives
    an outcome with the status "error"."""
    import asyncio

    try:
        async with asyncio.timeout(seconds) as limit:
            value = await reward(response, row)
    except MemoryError:
        raise
    except (Exception, SystemExit, asyncio.CancelledError) as error:
        return late(seconds) if limit.expired() else raised(error)
    return _checked(partial(_read_one, value))


async def score_concurrently(
    reward: Reward,
    items: Sequence[tuple[str, Mapping[str, Any]]],
    seconds: float,
    done: Callable[[int, Outcome], None],
) -> None:
    """Grade items with an async reward, at most `AT_ONCE` at a time, each for at most ``seconds``.

    ``done`` is called with the index and the outcome of each item as soon as it is graded. Calls
    begin in the order of the items.
    """
    import asyncio

    free = asyncio.Semaphore(AT_ONCE)

    async def grade(index: int, item: tuple[str, Mapping[str, Any]]) -> None:
        async with free:
            outcome = await score_async(reward, *item, seconds)
        done(index, outcome)

    await asyncio.gather(*(grade(*numbered) for numbered in enumerate(items)))


def late(seconds: float) -> Outcome:
    """Return the outcome, an error, of a call that exceeded its wall-clock limit of ``seconds``."""
    return _failed(f"took more than {seconds:g} s (task.wall_seconds)", "wall")


def raised(error: BaseException) -> Outcome:
    """Return the outcome, also an error, of a call that raised ``error``; the message names the
    line."""
    said = "".join(traceback.format_exception_only(error)).strip()[:LONGEST_MESSAGE]
    frames = traceback.extract_tb(error.__traceback__, limit=-1)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    return _failed(said + where, "exception")


def _read_one(value: Any) -> Outcome:
    """Read what a call with one response returned. A list, as other trainers' rewards return it,
    gets a message of its own."""
    outcome = _read(value)
    if outcome.cause == "value" and isinstance(value, list):
        return _failed(f"{outcome.message}; {ONE_RESPONSE}")
    return outcome


def _read(value: Any) -> Outcome:
    if inspect.iscoroutine(value):
        value.close()
        return _failed("reward must be one finite number, got a coroutine; write async def")
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
    right = None if correct is None else bool(correct)
    return Outcome(status, total, numbers, None, right, says_correct)


def _failed(message: str, cause: Cause = "value") -> Outcome:
    return Outcome("error", math.nan, {}, printable(message), cause=cause)


def find_source(reward: str | Reward) -> Source | None:
    """Return where a worker can load this reward; None for a function that only this process has.

    Such functions are lambdas, closures, methods, functions that were typed into a prompt or
    changed since they were loaded, and functions of a running script that depend on its other
    statements. Raise a DataError for a text that is neither FILE.py:NAME nor a built-in name.
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


def check_reward_source(reward: str) -> None:
    """Raise a DataError if the file of ``reward``, FILE.py:NAME, is missing, can't be parsed, or
    does not define the function; a built-in name is accepted. The file is not executed."""
    source = find_source(reward)
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


def load_reward(source: Source) -> Reward:
    """Load a reward and return its function.

    The reward's file is executed as a new module, which replaces ``source.module`` in
    ``sys.modules``; of a running script, only the definitions are executed. The file's directory is
    appended to ``sys.path``. Raise a DataError if the file can't be loaded or has no suitable
    function.
    """
    if source.spec in BUILT_IN:
        return BUILT_IN[source.spec]
    check_reward_source(source.spec)
    path, name = source.file_and_name
    sys.path.append(str(path.parent))  # last, so that files beside the reward hide no library
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
    check_signature(reward, source.spec)
    return reward


def check_signature(reward: Reward, name: str) -> None:
    """Raise a DataError if the reward is not a function that can be called with a response and its
    row, or if it yields instead of returning. ``name`` names it in the error."""
    if not callable(reward):
        raise DataError(
            f"reward {name}: must be a function, got {type(reward).__name__}; name a function"
        )
    if _is(inspect.isasyncgenfunction, reward) or _is(inspect.isgeneratorfunction, reward):
        kind = "an async generator" if _is(inspect.isasyncgenfunction, reward) else "a generator"
        raise DataError(
            f"reward {name}: must return its result, but it is {kind} because it contains yield; "
            "write return in place of yield"
        )
    try:
        signature = inspect.signature(reward)
    except (TypeError, ValueError):  # written in C
        return
    given = ("responses", "rows") if style_of(reward) == "batched" else ("response", "row")
    try:
        signature.bind(*given)
    except TypeError as error:
        called = getattr(reward, "__name__", "score")
        word = called if called.isidentifier() else "score"
        defined = f"lambda {str(signature)[1:-1]}" if called == "<lambda>" else f"{word}{signature}"
        remedy = f"write def {word}({', '.join(given)})"
        if given[0] == "response":
            remedy += (
                ", for one response and its row; a function of lists, as TRL's are, needs "
                f"@burnish.batched and is def {word}(responses, rows)"
            )
        raise DataError(
            f"reward {name}: must take two arguments, {' and '.join(given)}, but it is defined as "
            f"{defined} ({error}); {remedy}"
        ) from None


def _unloadable(source: Source, error: BaseException) -> DataError:
    said = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename) == source.file_and_name[0]]
    where = f" (line {own[-1].lineno})" if own else ""
    remedy = "correct the file"
    if isinstance(error, ModuleNotFoundError) and error.name:
        remedy = f"install the package that provides {error.name}, or correct the import"
    return DataError(f"reward {source.spec}: the file can't be loaded: {said}{where}; {remedy}")
