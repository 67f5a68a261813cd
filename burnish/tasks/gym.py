"""Questions made by the package reasoning-gym, scored by its own scorers: math without a download.

A generator is a function of a seed and a number, so a question is a function of the run's seed and
its place in the run. Held-out questions are drawn first, the same for every seed, and never trained
on.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

from burnish import graders
from burnish.draws import Purpose, Stream, uniforms
from burnish.errors import ConfigError, DataError, MissingExtra
from burnish.graders.pool import GraderPool
from burnish.graders.rewards import Source
from burnish.schema.tasks import GymTask
from burnish.tasks.text import Question, TextTask, ask_among, limits_of

SCORER = Source(
    f"{Path(graders.__file__).with_name('gym.py')}:reward",
    "burnish.graders.gym",
    compares_answers=True,
    late_parts=(("format", 1.0), ("answer", 0.0)),
)
HELD_OUT_SEED = 0
SIZE = 100_000
"""Questions of a generator, unless its settings say otherwise; some of them may be equal."""
PATIENCE = 100
"""Draws until a question must be a new one."""


def make_gym(config: GymTask, *, seed: int, **how: Any) -> TextTask:
    """The task of a recipe's section. Grades have the parts format (an answer was found), answer
    (it has the whole point) and ended."""
    held_out = hold_out(config)
    dataset = make_dataset(config, seed, Purpose.TRAIN)
    question = partial(ask_new, config, dataset, frozenset(held_out))
    among = partial(ask_among, config.train_prompts, seed, question)
    asked = (ask(config, f"validation/{i}", e) for i, e in enumerate(held_out.values()))
    grader = GraderPool(SCORER, limits_of(config))
    return TextTask(config, question=among, held_out=asked, grader=grader, **how)


def ask(config: GymTask, name: str, entry: dict[str, Any]) -> Question:
    row = {
        "generator": config.generator,
        "settings": config.settings,
        "format": config.answer_format,
        "entry": entry,
    }
    return Question(name, config.template.replace("{question}", entry["question"]), row)


def ask_new(config: GymTask, dataset: Any, held_out: frozenset[str], number: int) -> Question:
    """A question that is not held out."""
    size = len(dataset)
    for further in range(PATIENCE):
        entry = dataset[(number + further * size // PATIENCE) % size]
        if entry["question"] not in held_out:
            return ask(config, f"train/{number}", entry)
    raise _too_few(config, "are held out")


def hold_out(config: GymTask) -> dict[str, Any]:
    """The entries that are held out, by their question."""
    dataset = make_dataset(config, HELD_OUT_SEED, Purpose.VALIDATION)
    count, found = config.validation_prompts, dict[str, Any]()
    for place in range(min(len(dataset), PATIENCE * count)):
        entry = dataset[place]
        found.setdefault(entry["question"], entry)
        if len(found) == count:
            return found
    raise _too_few(config, f"are {len(found)}")


def _too_few(config: GymTask, how: str) -> DataError:
    return DataError(
        f"all questions of {config.generator} that its settings allow {how}; "
        f"task.validation_prompts = {config.validation_prompts} must leave others to train on: "
        "ask for fewer, or widen task.settings"
    )


def make_dataset(config: GymTask, seed: int, purpose: Purpose) -> Any:
    """The package's own object: entries by number."""
    try:
        factory = importlib.import_module("reasoning_gym.factory")
    except ImportError:
        raise MissingExtra("gym", f"the generator {config.generator}") from None
    # The package numbers questions by seed + index: neighbouring seeds of runs must lie far apart.
    start = int(uniforms(seed, Stream.TASK, 0, purpose, 0) * 2**31)
    settings = {"size": SIZE, **config.settings}
    try:
        return factory.create_dataset(config.generator, seed=start, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"task.generator = {config.generator!r} and task.settings do not suit reasoning-gym: "
            f"{error}"
        ) from None
