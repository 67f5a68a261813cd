"""Keyword inclusion: write a sentence that includes the given words.

Prompts are made from the seed and the project's own list of common words (``words.txt``: lower
case, no word begins another). Training and validation never share a word, so a policy that scores
on validation has learned the task, not the words. If ``validation_words`` is 0, for models that see
words in training alone, they share words but no set of words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path
from zlib import crc32

import numpy as np

from burnish.config import KeywordsTask
from burnish.draws import Purpose, Stream, permutation, uniforms
from burnish.errors import ConfigError
from burnish.graders import keywords
from burnish.graders.grader import InProcess, grade_pairs
from burnish.model.tokenizer import Tokenizer
from burnish.plan import Room
from burnish.tasks.prompts import Writer
from burnish.tasks.task import TooLong
from burnish.types import Completion, Grade, Prompt

WORDS = Path(__file__).with_name("words.txt")
PATIENCE = 1000
"""Draws until a set of words must be on the right side."""
TRIED = 100
"""Sets of words until one of them must make a prompt that is not too long."""
HELD_OUT_SEED = 0
"""The split and the validation prompts are the same whatever a run's seed, so that runs compare."""


@lru_cache(maxsize=1)
def word_list() -> tuple[str, ...]:
    return tuple(WORDS.read_text(encoding="ascii").split())


def instruction(words: Sequence[str]) -> str:
    return f"Write a sentence that includes the words: {', '.join(words)}."


def _held_out(words: Sequence[str]) -> bool:
    """One set of words in five, whatever their order."""
    return crc32(" ".join(sorted(words)).encode()) % 5 == 0


class Keywords:
    """Any number of prompts; the grader is a plain text search in this process."""

    def __init__(
        self, config: KeywordsTask, *, tokenizer: Tokenizer, seed: int, room: Room | None = None
    ) -> None:
        """room: for the longest prompt; None if no model bounds it."""
        self.config = config
        self._seed = seed
        self._writer = Writer(
            "keywords", tokenizer, chat=config.chat, room=room, long_prompts=config.long_prompts
        )
        self._grader = InProcess(keywords.REWARDS[config.reward])
        words = word_list()
        order = permutation(HELD_OUT_SEED, Stream.TASK, 0, Purpose.SPLIT, len(words))
        order = order[: config.words]
        held_out = round(config.validation_words * len(order))
        self.words = [words[i] for i in sorted(order[held_out:])]
        self.validation_words = [words[i] for i in sorted(order[:held_out])] or self.words
        fewest = min(len(self.words), len(self.validation_words))
        if len(order) < (config.words or 0) or fewest < config.most:
            raise ConfigError(
                f"task.words must be at most {len(words)} and leave task.most = {config.most} "
                f"words to train on and to hold out, got {config.words}, which leaves {fewest}"
            )

    def prompt(self, index: int) -> Prompt:
        return self._prompt(f"train/{index}", self._draw(index, validation=False))

    def validation_prompt(self, index: int) -> Prompt:
        return self._prompt(f"validation/{index}", self._draw(index, validation=True))

    @property
    def validation(self) -> list[Prompt]:
        return [self.validation_prompt(i) for i in range(self.config.validation_prompts)]

    @property
    def too_long(self) -> TooLong:
        return self._writer.too_long

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        """Parts: the reward's own (see ``graders/keywords.py``), and "ended"."""
        return grade_pairs(self._grader, pairs, must_end=self.config.must_end)

    def answer(self, prompt: Prompt, response: str) -> str | None:
        """The whole text."""
        return response.strip()

    def close(self) -> None:
        """Nothing to end."""

    def _draw(self, index: int, *, validation: bool) -> Iterator[list[str]]:
        """Sets of different words; the first set that there is room for makes the prompt."""
        least, most = self.config.least, self.config.most
        purpose = Purpose.VALIDATION if validation else Purpose.TRAIN
        seed = HELD_OUT_SEED if validation else self._seed
        for attempt in range(PATIENCE):
            place = np.arange(most + 1) + attempt * (most + 1)
            draws = uniforms(seed, Stream.TASK, index, purpose, place)
            count = least + int(draws[0] * (most - least + 1))
            words = list(self.validation_words if validation else self.words)
            drawn = [words.pop(int(draw * len(words))) for draw in draws[1 : count + 1]]
            if self.config.validation_words or _held_out(drawn) == validation:
                yield drawn
        raise ConfigError(
            f"task.words = {self.config.words} make too few sets of {least} to {most} words "
            "to train on some and hold out others; raise it"
        )

    def _prompt(self, name: str, drawn: Iterator[list[str]]) -> Prompt:
        found = self._writer.first_fitting(
            self._writer.write(f"keywords/{name}", instruction(words), self._row(words))
            for words in islice(drawn, TRIED)
        )
        assert found is not None, "draws end with an error"
        return found

    def _row(self, words: list[str]) -> dict[str, object]:
        return {"prompt": instruction(words), "keywords": words}
