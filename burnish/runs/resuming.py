"""Rules for resuming: which settings may change, and which inputs must be unchanged."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from burnish.errors import BurnishError, ConfigError, RunError
from burnish.recipe.load import (
    Overrides,
    Table,
    explain_errors,
    flatten,
    format_toml,
    load_recipe,
    parse_overrides,
)
from burnish.recipe.objective.objective import ObjectiveConfig, as_argument
from burnish.recipe.objective.piece import name_of
from burnish.recipe.recipe import Recipe
from burnish.recipe.tasks import WeightedReward
from burnish.runs.checkpoints import latest
from burnish.runs.directory import ENVIRONMENT, STARTED, load_json, read_recipe

FREE = (
    *("train.steps", "validation.every", "checkpoint", "log", "name", "description"),
    *("train.mismatch_mean", "train.mismatch_max", "rollout.max_errors"),
    *("validation.patience", "validation.min_delta"),
    *("selection.max_asked", "selection.on_bound", "mesh"),
    *("engine.python", "engine.url", "engine.deadline"),
)
"""Settings that may change when a run is resumed: durations, intervals, stop conditions and the
location of the engine. None of them affects the results of the steps so far."""


def command_to_resume(
    path: Path,
    *,
    from_checkpoint: str | None = None,
    anyway: bool = False,
    changes: Table | None = None,
) -> str:
    """Return the shell command that continues a run, or the Python call if the run's rewards or its
    objective have Python functions, which the command line can't pass.

    ``from_checkpoint`` is the name of a checkpoint, None for the last. ``anyway`` accepts a changed
    environment. ``changes`` are overrides by their full names.
    """
    if functions := _function_arguments(path):
        given = [repr(str(path)), *functions]
        given += [] if from_checkpoint is None else [f"from_checkpoint={from_checkpoint!r}"]
        given += ["anyway=True"] * anyway + [f"overrides={dict(changes or {})!r}"] * bool(changes)
        return f"burnish.resume({', '.join(given)})"
    shown = str(path)
    words = ["burnish", "resume", f"./{shown}" if shown.startswith("-") else shown]
    words += [] if from_checkpoint is None else ["--from", from_checkpoint]
    words += ["--anyway"] * anyway
    for key, value in (changes or {}).items():
        words += ["--set", f"{key}={format_toml({'x': value}).removeprefix('x = ').strip()}"]
    return shlex.join(words)


def _function_arguments(path: Path) -> list[str]:
    """Return the arguments of `burnish.resume` that pass a run's Python functions, its rewards and
    the functions of its objective, again; an empty list if it has none."""
    try:
        read = load_json(path / ENVIRONMENT).get("inputs", {})
    except (OSError, ValueError):
        return []
    names = {key: str(value).partition(" ")[0] for key, value in read.items()}
    names = {key: name if name.isidentifier() else "FUNCTION" for key, name in names.items()}
    several = [name for key, name in names.items() if key.startswith("reward.")]
    own = {key: name for key, name in names.items() if key.startswith("objective.")}
    found = [f"reward={names['reward']}"] if "reward" in names else []
    found += [f"reward=[{', '.join(several)}]"] if several else []
    return [*found, as_argument(own)] if own else found


def resumed_recipe(path: Path, overrides: Overrides) -> Recipe:
    """Return the recipe of the run in the directory ``path`` with ``overrides`` applied.

    Raise a ``RunError`` if there is no run, and a ``ConfigError`` if an override sets a setting
    that is not in ``FREE``, or lowers train.steps. A higher train.steps does not stretch the decay
    of the learning rate: the rate still reaches its lowest value after the gradient step that was
    planned before, and stays there.
    If that value is 0 for all steps that a higher train.steps adds, a ``ConfigError`` is raised.
    Functions from a script may take the place of their names in the objective. The validation
    metric may change as long as the run has no checkpoint, whose score is a value of the metric.
    """
    read_recipe(path)  # raises if there is no run
    file, changes = str(path / "recipe.toml"), parse_overrides(overrides)
    before = load_recipe(file)
    free = FREE if latest(path) else (*FREE, "validation.metric", "validation.goal")
    recorded = flatten(before.objective.model_dump(), "objective.")
    for key, value in changes.items():
        is_passed = callable(value) and key in before.objective.functions
        is_same = key in recorded and recorded[key] == value
        if not (is_passed or is_same or any(key == f or key.startswith(f"{f}.") for f in free)):
            raise ConfigError(
                f"{key} can't change when a run is resumed: it alters the results; "
                f"{', '.join(free)} can. Start a new run with `burnish train`"
            )
    after = load_recipe(file, changes)
    if after.train.steps < before.train.steps:
        raise ConfigError(
            f"train.steps can only grow when a run is resumed, from {before.train.steps}, "
            f"got {after.train.steps}"
        )
    if before.is_supervised:
        return after
    if after.decay_steps != before.decay_steps:
        after = load_recipe(file, [changes, f"train.decay_steps={before.decay_steps}"])
    added = after.gradient_steps - before.gradient_steps
    if added and after.idle_steps >= added:
        more = {"train.steps": after.train.steps}
        if before.train.decay_steps is not None:
            more["train.decay_steps"] = after.gradient_steps
        raise ConfigError(
            f"train.steps can't grow to {after.train.steps}: the learning rate of train.schedule = "
            f"'{before.train.schedule}' is 0 after gradient step {before.steps_to_lowest}, so the "
            "further steps would change nothing; start a new run whose learning rate falls later: "
            f"{_new_run(path, more)}"
        )
    return after


def _new_run(path: Path, changes: Table) -> str:
    """Return the command that starts a new run from the recipe of the run at ``path``."""
    words = ["burnish", "train", str(path / "recipe.toml")]
    return shlex.join(words + [w for key in changes for w in ("--set", f"{key}={changes[key]}")])


def check_functions_passed(path: Path, objective: ObjectiveConfig) -> None:
    """Raise a RunError if a function of the ``objective`` of the run at ``path`` was not passed to
    resume it."""
    functions = objective.functions
    missing = {setting: name for setting, name in functions.items() if isinstance(name, str)}
    if missing:
        names = {setting: name_of(function) for setting, function in functions.items()}
        raise RunError(
            f"{' and '.join(missing)} of {path} is the Python function "
            f"{' and '.join(missing.values())}; continue the run from Python with "
            f"burnish.resume({str(path)!r}, {as_argument(names)})"
        )


def check_reward(path: Path, own: str | None, read: Mapping[str, str], reward: object) -> None:
    """Check the ``reward`` that was passed to resume the run at ``path``; None if none was passed.

    Raise a RunError if the run's reward was a Python function and no function was passed, or a
    ConfigError if it was not, and a reward other than ``own`` was passed. ``own`` is the run's
    task.reward; None if the recipe does not set it. ``read`` has the hashes of the run's inputs;
    the key of a function is "reward".
    """
    if "reward" in read and not callable(reward):
        name = read["reward"].partition(" ")[0]
        raise RunError(
            f"the reward of {path} is the Python function {name}; continue the run from Python "
            f"with burnish.resume({str(path)!r}, reward={name})"
        )
    if "reward" not in read and reward not in (None, own):
        raise ConfigError(
            f"reward can't change when a run is resumed, and {path} has task.reward = {own!r}; "
            "omit it, or start a new run with `burnish train`"
        )


def attach_functions(
    path: Path,
    recorded: Sequence[WeightedReward],
    read: Mapping[str, str],
    given: Sequence[Mapping[str, Any]],
) -> list[WeightedReward]:
    """Return the ``recorded`` rewards of a run to resume, with the functions of ``given``, which
    are the tables of the rewards that were passed.

    Raise a RunError if a function is missing, or a ConfigError if another reward was passed or a
    table is invalid. ``read`` has the hashes of the run's inputs; the key of a function is
    "reward.NAME".
    """
    try:
        passed = {one.name: one for one in map(WeightedReward.model_validate, given)}
    except ValidationError as error:
        raise ConfigError(f"reward: {explain_errors(error, [])}") from None
    names = [one.name for one in recorded if f"reward.{one.name}" in read]
    if missing := [name for name in names if name not in passed or not passed[name].function]:
        raise RunError(
            f"the rewards of {path} include the Python functions {', '.join(names)}, and "
            f"{', '.join(missing)} was not passed; continue the run from Python with "
            f"burnish.resume({str(path)!r}, reward=[{', '.join(names)}])"
        )
    files = {one.name: one.reward for one in recorded if one.name not in names}
    for name, one in passed.items():
        if name not in names and (name not in files or files[name] != one.reward):
            raise ConfigError(
                f"reward can't change when a run is resumed, and {path} has the rewards "
                f"{', '.join(one.name for one in recorded)}; omit {name}, or start a new run with "
                "`burnish train`"
            )
    return [
        one.model_copy(update={"function": passed[one.name].function}) if one.name in names else one
        for one in recorded
    ]


@contextmanager
def naming_directory(before: Table) -> Iterator[None]:
    """Add a note to a BurnishError of the block if the run was started in another directory: the
    relative paths of its recipe then lead to other files. ``before`` is the content of the run's
    environment.json."""
    try:
        yield
    except BurnishError as error:
        started = before.get(STARTED, {}).get("directory")
        if started not in (None, str(Path.cwd())):
            error.add_note(f"the run was started in {started}; run the command there")
        raise


def check_environment(before: Table, now: Table, *, anyway: bool) -> None:
    """Raise a ``RunError`` if machine, packages or inputs have changed since the run was started,
    because results would not be bit-exact; do nothing if ``anyway``. The command line, the host and
    the git commit may differ."""
    compared = [{k: v for k, v in table.items() if k != STARTED} for table in (before, now)]
    changed = differences(*map(flatten, compared))
    if changed and not anyway:
        raise RunError(
            f"the environment of the run has changed ({changed}), so it would not continue "
            "bit for bit; restore it, or resume with --anyway"
        )


def differences(before: Table, now: Table) -> str:
    """Compare two flat tables. Return "key: before → now" for each key whose values differ, joined
    by "; ", or an empty string if no values differ. A missing key counts as None."""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return "; ".join(f"{key}: {before.get(key)} → {now.get(key)}" for key in keys)
