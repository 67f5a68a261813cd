"""Keyword inclusion: write a sentence that includes the given words.

Prompts are made from the seed and the project's own list of common words (``words.txt``: lower
case, no word begins another). Training and validation never share a word, so a policy that scores
on validation has learned the task, not the words. If ``validation_words`` is 0, for models that see
words in training alone, they share words but no set of words.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from burnish.draws import Purpose, Stream, permutation, uniforms
from burnish.errors import ConfigError
from burnish.graders import keywords
from burnish.graders.pool import InProcess
from burnish.schema.tasks import KeywordsTask
from burnish.tasks.text import Question, TextTask, ask_among

WORDS = Path(__file__).with_name("words.txt")
PATIENCE = 1000
"""Draws until a set of words must be on the right side."""
HELD_OUT_SEED = 0
"""The split and the validation prompts are the same whatever a run's seed, so that runs compare."""


@lru_cache(maxsize=1)
def word_list() -> tuple[str, ...]:
    return tuple(WORDS.read_text(encoding="ascii").split())


def instruction(words: Sequence[str]) -> str:
    return f"Write a sentence that includes the words: {', '.join(words)}."


def is_held_out(words: Sequence[str]) -> bool:
    """One set of words in five, whatever their order."""
    return crc32(" ".join(sorted(words)).encode()) % 5 == 0


def split_words(config: KeywordsTask) -> tuple[list[str], list[str]]:
    """The words to train on and those to validate on, the same for every seed."""
    words = word_list()
    order = permutation(HELD_OUT_SEED, Stream.TASK, 0, Purpose.SPLIT, len(words))[: config.words]
    held_out = round(config.validation_words * len(order))
    train = [words[i] for i in sorted(order[held_out:])]
    validation = [words[i] for i in sorted(order[:held_out])] or train
    fewest = min(len(train), len(validation))
    if len(order) < (config.words or 0) or fewest < config.most:
        raise ConfigError(
            f"task.words must be at most {len(words)} and leave task.most = {config.most} "
            f"words to train on and to hold out, got {config.words}, which leaves {fewest}"
        )
    return train, validation


def ask(
    config: KeywordsTask, words: Sequence[str], seed: int, purpose: Purpose, number: int
) -> Question:
    """The question for a set of different words that is drawn for TRAIN or for VALIDATION."""
    least, most = config.least, config.most
    for attempt in range(PATIENCE):
        place = np.arange(most + 1) + attempt * (most + 1)
        draws = uniforms(seed, Stream.TASK, number, purpose, place)
        count = least + int(draws[0] * (most - least + 1))
        left = list(words)
        drawn = [left.pop(int(draw * len(left))) for draw in draws[1 : count + 1]]
        if config.validation_words or is_held_out(drawn) == (purpose is Purpose.VALIDATION):
            asked = instruction(drawn)
            row = {"prompt": asked, "keywords": drawn}
            return Question(f"{purpose.name.lower()}/{number}", asked, row)
    raise ConfigError(
        f"task.words = {config.words} make too few sets of {least} to {most} words "
        "to train on some and hold out others; raise it"
    )


def make_keywords(config: KeywordsTask, *, seed: int, **how: Any) -> TextTask:
    """The task of a recipe's section. Grades have the reward's own parts (``graders/keywords.py``)
    and the part ended."""
    train, validation = split_words(config)
    held_out = partial(ask, config, validation, HELD_OUT_SEED, Purpose.VALIDATION)
    question = partial(ask, config, train, seed, Purpose.TRAIN)
    among = partial(ask_among, config.train_prompts, seed, question)
    asked = map(held_out, range(config.validation_prompts))
    grader = InProcess(keywords.REWARDS[config.reward])
    return TextTask(config, question=among, held_out=asked, grader=grader, **how)
