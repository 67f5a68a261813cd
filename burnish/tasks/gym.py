"""Questions made by the package reasoning-gym, scored by its own scorers: math without a download.

A generator is a function of a seed and a number, so a prompt is a function of the run's seed and
the group's index. Held-out questions are drawn first, the same for every seed, and never trained
on.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from burnish import graders
from burnish.config import GymTask
from burnish.draws import Purpose, Stream, uniforms
from burnish.errors import ConfigError, DataError, MissingExtra
from burnish.graders.extract import EXTRACTORS
from burnish.graders.grader import grade_pairs
from burnish.graders.pool import GraderPool
from burnish.graders.rewards import Source
from burnish.model.tokenizer import Tokenizer
from burnish.plan import Room
from burnish.sections import nearest
from burnish.tasks.files import limits_of
from burnish.tasks.prompts import Writer
from burnish.tasks.task import TooLong
from burnish.types import Completion, Grade, Prompt

SCORER = Source(
    f"{Path(graders.__file__).with_name('gym.py')}:reward",
    "burnish.graders.gym",
    compares_answers=True,
)
HELD_OUT_SEED = 0
SIZE = 100_000
"""Questions of a generator, unless its settings say otherwise; some of them may be equal."""
PATIENCE = 100
"""Draws until a question must be a new one."""


class Gym:
    """One generator's questions; the scorers' workers start with the first grade."""

    def __init__(
        self, config: GymTask, *, tokenizer: Tokenizer, seed: int, room: Room | None = None
    ) -> None:
        """room: for the longest prompt; None if no model bounds it."""
        self.config = config
        self._grader = GraderPool(SCORER, limits_of(config))
        self._writer = Writer(
            "gym", tokenizer, chat=config.chat, room=room, long_prompts=config.long_prompts
        )
        self._size = int(config.settings.get("size", SIZE))
        self._train = make_dataset(config, seed, Purpose.TRAIN)
        self._held_out = self._hold_out()

    def prompt(self, index: int) -> Prompt:
        places = (index + further * self._size // PATIENCE for further in range(PATIENCE))
        entries = (self._train[place % self._size] for place in places)
        others = (entry for entry in entries if entry["question"] not in self._held_out)
        found = self._first_fitting(f"gym/train/{index}", others)
        if found is None:
            raise self._too_few("are held out")
        return found

    @property
    def validation(self) -> list[Prompt]:
        return list(self._held_out.values())

    @property
    def too_long(self) -> TooLong:
        return self._writer.too_long

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        """Parts: format (an answer was found), answer (it has the whole point), ended."""
        return grade_pairs(self._grader, pairs, must_end=self.config.must_end)

    def answer(self, prompt: Prompt, response: str) -> str | None:
        return EXTRACTORS[self.config.answer_format](response)

    def close(self) -> None:
        self._grader.close()

    def _hold_out(self) -> dict[str, Prompt]:
        """Prompts by their question; the next question takes the place of a skipped one."""
        dataset = make_dataset(self.config, HELD_OUT_SEED, Purpose.VALIDATION)
        count = self.config.validation_prompts
        entries = map(dataset.__getitem__, range(min(self._size, PATIENCE * count)))
        wanted: dict[str, Prompt] = {}
        others = (entry for entry in entries if entry["question"] not in wanted)
        while len(wanted) < count:
            found = self._first_fitting(f"gym/validation/{len(wanted)}", others)
            if found is None:
                raise self._too_few(f"are {len(wanted)}")
            wanted[found.reference["entry"]["question"]] = found
        return wanted

    def _first_fitting(self, prompt_id: str, entries: Iterable[Any]) -> Prompt | None:
        template = self.config.template
        return self._writer.first_fitting(
            self._writer.write(
                prompt_id, template.replace("{question}", entry["question"]), self._row(entry)
            )
            for entry in entries
        )

    def _row(self, entry: dict[str, Any]) -> dict[str, Any]:
        return {
            "generator": self.config.generator,
            "settings": self.config.settings,
            "format": self.config.answer_format,
            "entry": entry,
        }

    def _too_few(self, how: str) -> DataError:
        return DataError(
            f"all questions of {self.config.generator} that its settings allow {how}; "
            f"task.validation_prompts = {self.config.validation_prompts} must leave others to "
            "train on: ask for fewer, or widen task.settings"
        )


def make_dataset(config: GymTask, seed: int, purpose: Purpose) -> Any:
    """The package's own object: entries by number."""
    try:
        factory = importlib.import_module("reasoning_gym.factory")
    except ImportError:
        raise MissingExtra("gym", f"the generator {config.generator}") from None
    if config.generator not in factory.DATASETS:
        near = nearest(config.generator, factory.DATASETS)
        raise ConfigError(
            f"task.generator must be one of reasoning-gym's, got {config.generator!r}{near}"
        )
    known = factory.DATASETS[config.generator][1].__dataclass_fields__.keys() - {"seed"}
    for key in config.settings.keys() - known:
        near = nearest(key, known) or f"; it has {', '.join(sorted(known))}"
        raise ConfigError(f"task.settings.{key} is not one of {config.generator}'s{near}")
    # The package numbers questions by seed + index: neighbouring seeds of runs must lie far apart.
    start = int(uniforms(seed, Stream.TASK, 0, purpose, 0) * 2**31)
    try:
        settings = {"size": SIZE, **config.settings, "seed": start}
        return factory.create_dataset(config.generator, **settings)
    except (TypeError, AssertionError, ValueError) as error:
        raise ConfigError(f"task.settings do not suit {config.generator}: {error}") from None
