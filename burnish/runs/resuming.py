"""Settings that a resumed run may change, and things that must be as they were at its start."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from burnish import config
from burnish.config import Overrides, Table
from burnish.errors import ConfigError, RunError
from burnish.schema.recipe import Recipe

FREE = (
    *("train.steps", "validation.every", "checkpoint", "log", "name", "description"),
    *("train.mismatch_mean", "train.mismatch_max"),
    *("selection.max_asked", "selection.on_bound", "mesh"),
    *("engine.python", "engine.url", "engine.deadline"),
)
"""Settings that a resumed run may change: they say how long and how often, when a run stops, or
where its engine is, and alter no result so far."""


def resumed_recipe(path: Path, overrides: Overrides) -> Recipe:
    """A run's recipe with changes; a learning rate goes on to decay as it was planned."""
    file, changes = str(path / "recipe.toml"), config.changed(overrides)
    for key in changes:
        if not any(key == free or key.startswith(f"{free}.") for free in FREE):
            raise ConfigError(
                f"{key} can't change when a run is resumed: it alters the results; "
                f"{', '.join(FREE[:4])} can. Start a new run with `burnish train`"
            )
    before, after = config.load(file), config.load(file, changes)
    if after.train.steps < before.train.steps:
        raise ConfigError(
            f"train.steps can only grow when a run is resumed, from {before.train.steps}, "
            f"got {after.train.steps}"
        )
    if after.decay_steps == before.decay_steps or before.is_supervised:
        return after
    return config.load(file, [changes, f"train.decay_steps={before.decay_steps}"])


def check_reward(path: Path, recipe: Recipe, read: Mapping[str, str], reward: object) -> None:
    """A run whose reward a script gave is given it again, and no other run is given one."""
    if "reward" in read and not callable(reward):
        name = read["reward"].partition(" ")[0]
        raise RunError(
            f"{path} got its reward from a script, as the function {name}; continue it from Python "
            f"with burnish.resume({str(path)!r}, reward={name})"
        )
    own = getattr(recipe.task, "reward", None)
    if "reward" not in read and reward not in (None, own):
        raise ConfigError(
            f"reward can't change when a run is resumed, and {path} has task.reward = {own!r}; "
            "leave it out, or start a new run with `burnish train`"
        )


def check_environment(before: Table, now: Table, *, anyway: bool) -> None:
    """Raises if anything has changed that bit-exactness depends on; ``anyway`` accepts that."""
    changed = differences(config.flat(before), config.flat(now))
    if changed and not anyway:
        raise RunError(
            f"the run began under other conditions ({changed}), so it would not go on "
            "bit for bit; restore them, or resume with --anyway"
        )


def differences(before: Table, now: Table) -> str:
    """The settings that differ, each with both of its values; empty if none does."""
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return "; ".join(f"{key}: {before.get(key)} → {now.get(key)}" for key in keys)
