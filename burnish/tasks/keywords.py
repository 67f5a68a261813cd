"""Keyword inclusion: write a sentence that includes the given words.

The seed determines the prompts, whose words come from a list of common words (``words.txt``: lower
case, no word is a prefix of another). Training and validation share no word, so a policy that
scores on validation has learned the task and not the words. With ``validation_words`` = 0, which is
meant for models that learn words from the training prompts alone, they share words but no set of
words.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np

from burnish.errors import ConfigError
from burnish.graders import keywords
from burnish.graders.in_process import InProcess
from burnish.randomness import Purpose, Stream, permutation, uniforms
from burnish.recipe.tasks import KeywordsTask
from burnish.tasks.text import Question, TextTask, repeated_question

WORDS = Path(__file__).with_name("words.txt")
PATIENCE = 1000
"""Give up after this many drawn sets of words that belong to the other part of the split."""
HELD_OUT_SEED = 0
"""Seed of the split and of the validation prompts. It is the same for all runs, so that they can be
compared."""


@lru_cache(maxsize=1)
def word_list() -> tuple[str, ...]:
    """Return all words of ``words.txt``, in the order of the file."""
    return tuple(WORDS.read_text(encoding="ascii").split())


def instruction(words: Sequence[str]) -> str:
    """Return the text of the prompt that asks for a sentence with these words."""
    return f"Write a sentence that includes the words: {', '.join(words)}."


def is_held_out(words: Sequence[str]) -> bool:
    """Return whether a set of words belongs to validation; the order of the words does not matter.
    A hash decides, and one set in five belongs."""
    return crc32(" ".join(sorted(words)).encode()) % 5 == 0


def split_words(config: KeywordsTask) -> tuple[list[str], list[str]]:
    """Return training words and validation words: a random split of ``config.words`` words of the
    list (None: of all words), the same for every seed.

    If no words are held out, the validation words are the training words. Raise a ConfigError if
    there are too few words.
    """
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


def draw_question(
    config: KeywordsTask, words: Sequence[str], seed: int, purpose: Purpose, number: int
) -> Question:
    """Draw distinct words and return the question that asks for a sentence with them.

    ``purpose`` is TRAIN or VALIDATION, and ``number`` the question's index. If ``validation_words``
    is 0, the two purposes have different sets of words; raise a ConfigError if no such set is
    found.
    """
    least, most = config.least, config.most
    for attempt in range(PATIENCE):
        indices = np.arange(most + 1) + attempt * (most + 1)
        draws = uniforms(seed, Stream.TASK, number, purpose, indices)
        count = least + int(draws[0] * (most - least + 1))
        left = list(words)
        drawn = [left.pop(int(draw * len(left))) for draw in draws[1 : count + 1]]
        if config.validation_words or is_held_out(drawn) == (purpose is Purpose.VALIDATION):
            prompt = instruction(drawn)
            row = {"prompt": prompt, "keywords": drawn}
            return Question(f"{purpose.name.lower()}/{number}", prompt, row)
    raise ConfigError(
        f"task.words = {config.words} make too few sets of {least} to {most} words "
        "to train on some and hold out others; raise it"
    )


def make_keywords(config: KeywordsTask, *, seed: int, **how: Any) -> TextTask:
    """Build the keyword task of a recipe.

    A grade has the parts of the keyword reward (``graders/keywords.py``) and the part "ended".
    ``seed`` determines the training prompts. ``how``: further arguments of `TextTask`.
    """
    train, validation = split_words(config)
    held_out = partial(draw_question, config, validation, HELD_OUT_SEED, Purpose.VALIDATION)
    question = partial(draw_question, config, train, seed, Purpose.TRAIN)
    repeated = partial(repeated_question, config.train_prompts, seed, question)
    questions = map(held_out, range(config.validation_prompts))
    grader = InProcess(keywords.REWARDS[config.reward])
    return TextTask(config, question=repeated, held_out=questions, grader=grader, **how)
