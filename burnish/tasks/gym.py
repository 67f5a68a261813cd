"""Questions that the package reasoning-gym generates and scores: math without a download.

A question is determined by the run's seed and by its index in the run. Held-out questions are drawn
first, are the same for every seed, and are never trained on.
"""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path
from typing import Any

from burnish import graders
from burnish.errors import ConfigError, DataError, MissingExtra
from burnish.graders.pool import GraderPool
from burnish.graders.rewards import Source
from burnish.randomness import Purpose, Stream, uniforms
from burnish.recipe.tasks import GymTask
from burnish.tasks.text import Question, TextTask, limits_of, repeated_question

SCORER = Source(
    f"{Path(graders.__file__).with_name('gym.py')}:gym_reward",
    "burnish.graders.gym",
    compares_answers=True,
    late_parts=(("format", 1.0), ("answer", 0.0)),
)
HELD_OUT_SEED = 0
SIZE = 100_000
"""Default number of questions of a generator; some of them may be equal."""
PATIENCE = 100
"""Give up after this many draws per question that is needed."""


def make_gym(config: GymTask, *, seed: int, **how: Any) -> TextTask:
    """Build the task of a recipe whose questions reasoning-gym generates and scores.

    A grade has the parts "format" (an answer was found), "answer" (it has the full score) and
    "ended". ``seed`` determines the training questions. ``how``: further arguments of `TextTask`.
    """
    held_out = hold_out(config)
    dataset = make_dataset(config, seed, Purpose.TRAIN)
    question = partial(draw_new_question, config, dataset, frozenset(held_out))
    repeated = partial(repeated_question, config.train_prompts, seed, question)
    validation = (
        entry_question(config, f"validation/{i}", entry)
        for i, entry in enumerate(held_out.values())
    )
    grader = GraderPool(SCORER, limits_of(config))
    return TextTask(config, question=repeated, held_out=validation, grader=grader, **how)


def entry_question(config: GymTask, name: str, entry: dict[str, Any]) -> Question:
    """Convert an entry of reasoning-gym's dataset to a question with the name ``name``, such as
    train/17."""
    row = {
        "generator": config.generator,
        "settings": config.settings,
        "format": config.answer_format,
        "entry": entry,
    }
    return Question(name, config.template.replace("{question}", entry["question"]), row)


def draw_new_question(
    config: GymTask, dataset: Any, held_out: frozenset[str], number: int
) -> Question:
    """Return the training question at index ``number``, or another one of the dataset if the text
    of that question is in ``held_out``. An index beyond the dataset starts again at its beginning.

    Raise a DataError if all questions of `PATIENCE` attempts are held out.
    """
    size = len(dataset)
    for attempt in range(PATIENCE):
        entry = dataset[(number + attempt * size // PATIENCE) % size]
        if entry["question"] not in held_out:
            return entry_question(config, f"train/{number}", entry)
    raise _too_few(config, "are held out")


def hold_out(config: GymTask) -> dict[str, Any]:
    """Generate the validation entries; return them by the text of their question.

    All questions are different. Raise a DataError if the generator does not make enough of them.
    """
    dataset = make_dataset(config, HELD_OUT_SEED, Purpose.VALIDATION)
    count, found = config.validation_prompts, dict[str, Any]()
    for index in range(min(len(dataset), PATIENCE * count)):
        entry = dataset[index]
        found.setdefault(entry["question"], entry)
        if len(found) == count:
            return found
    raise _too_few(config, f"are {len(found)}")


def _too_few(config: GymTask, how: str) -> DataError:
    return DataError(
        f"all questions of {config.generator} that its settings allow {how}; "
        f"task.validation_prompts = {config.validation_prompts} must leave others to train on: "
        "hold out fewer, or widen task.settings"
    )


def make_dataset(config: GymTask, seed: int, purpose: Purpose) -> Any:
    """Create reasoning-gym's dataset for a seed and a purpose, TRAIN or VALIDATION. Indexing it
    generates an entry: question, answer and metadata.

    Raise MissingExtra if reasoning-gym is not installed, or a ConfigError if it rejects the
    settings.
    """
    try:
        factory = importlib.import_module("reasoning_gym.factory")
    except ImportError:
        raise MissingExtra("gym", f"the generator {config.generator}") from None
    # The package numbers questions by seed + index, so the start values of neighbouring run seeds
    # must lie far apart.
    start = int(uniforms(seed, Stream.TASK, 0, purpose, 0) * 2**31)
    settings = {"size": SIZE, **config.settings}
    try:
        return factory.create_dataset(config.generator, seed=start, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(
            f"task.generator = {config.generator!r} and task.settings do not suit reasoning-gym: "
            f"{error}"
        ) from None
