"""Prompts from rows, a file's or a script's, graded by the user's own reward.

A row is any JSON object with a "prompt": text, or chat messages. The reward sees the whole row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from burnish.errors import ConfigError
from burnish.graders.grader import make_grader
from burnish.graders.pool import Limits
from burnish.graders.rewards import Reward
from burnish.model.tokenizer import Tokenizer
from burnish.plan import Room
from burnish.schema import FilesTask, Graded
from burnish.tasks.rows import DataRow, rows_of, shuffled
from burnish.tasks.text import Question, TextTask


def ask(row: DataRow, name: str = "") -> Question:
    return Question(name, row["prompt"], row)


def ask_shuffled(rows: Sequence[DataRow], seed: int, number: int) -> Question:
    """Every epoch asks each row once, in an order of its own."""
    place = shuffled(number, len(rows), seed=seed)
    return ask(rows[place], f"train/{place}")


def ask_all(rows: Sequence[DataRow]) -> Iterator[Question]:
    return (ask(row, f"validation/{i}") for i, row in enumerate(rows))


def make_files(
    config: FilesTask, *, tokenizer: Tokenizer, seed: int, room: Room | None = None
) -> TextTask:
    """The task of a recipe's section."""
    chosen = reward_of(config)
    rows, validation = rows_of(config, seed=seed)
    task = TextTask(
        config,
        question=partial(ask_shuffled, rows, seed),
        held_out=ask_all(validation),
        tokenizer=tokenizer,
        grader=make_grader(chosen, limits_of(config)),
    )
    task.check_room(room, ((row.where, ask(row)) for row in (*rows, *validation)))
    return task


def reward_of(config: FilesTask) -> Reward | str:
    """A script's reward, or the recipe's."""
    chosen = config.function or config.reward
    if chosen is None:
        raise ConfigError("there is no reward; give --reward FILE.py:NAME or set task.reward")
    return chosen


def limits_of(config: Graded) -> Limits:
    return Limits(
        workers=config.workers,
        cpu_seconds=config.cpu_seconds,
        wall_seconds=config.wall_seconds,
        memory_bytes=config.memory_mb * 2**20,
    )
