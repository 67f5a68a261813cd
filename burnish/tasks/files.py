"""Prompts from rows, a file's or a script's, graded by the user's own reward.

A row is any JSON object with a "prompt": text, or chat messages. The reward sees the whole row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from burnish.config import FilesTask, Graded, MathTask
from burnish.errors import ConfigError
from burnish.graders.grader import Grader, grade_pairs, make_grader
from burnish.graders.pool import Limits
from burnish.graders.rewards import Reward
from burnish.model.tokenizer import Tokenizer
from burnish.plan import Room
from burnish.tasks.prompts import Writer, check_room
from burnish.tasks.rows import DataRow, rows_of, shuffled
from burnish.tasks.task import TooLong
from burnish.types import Completion, Grade, Prompt


class Files:
    """Rows as a task: shuffled anew for each epoch, with a validation set apart."""

    too_long = TooLong()
    """A row that is too long is refused before the run."""

    def __init__(
        self,
        rows: Sequence[DataRow],
        validation: Sequence[DataRow],
        config: FilesTask | MathTask,
        *,
        tokenizer: Tokenizer,
        grader: Grader,
        seed: int,
    ) -> None:
        """config: how prompts are written and responses scored; its files were read before."""
        self.rows = rows
        self.validation_rows = validation
        self.config = config
        self._writer = Writer(config.name, tokenizer, chat=config.chat)
        self._grader = grader
        self._seed = seed

    def prompt(self, index: int) -> Prompt:
        number = shuffled(index, len(self.rows), seed=self._seed)
        return self._prompt(f"train/{number}", self.rows[number])

    @property
    def validation(self) -> list[Prompt]:
        return [self._prompt(f"validation/{i}", row) for i, row in enumerate(self.validation_rows)]

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        return grade_pairs(self._grader, pairs, must_end=self.config.must_end)

    def answer(self, prompt: Prompt, response: str) -> str | None:
        """The whole text: nobody but the reward knows what counts in it."""
        return response.strip()

    def close(self) -> None:
        self._grader.close()

    def _prompt(self, name: str, row: DataRow) -> Prompt:
        return self._writer.write(f"{self.config.name}/{name}", row["prompt"], dict(row))


def make_files(
    config: FilesTask,
    *,
    tokenizer: Tokenizer,
    seed: int,
    prompts: Iterable[str | Mapping[str, Any]] | None = None,
    reward: Reward | str | None = None,
    room: Room | None = None,
) -> Files:
    """The task of a recipe's section; prompts and reward replace the recipe's if they are given.

    room: for the longest prompt; None if no model bounds it.
    """
    chosen = reward_of(config, reward)
    rows, validation = rows_of(config, seed=seed, prompts=prompts)
    if room is not None:
        writer = Writer(config.name, tokenizer, chat=config.chat)
        every = (*rows, *validation)
        check_room(((row.where, writer.write("", row["prompt"], row)) for row in every), room)
    grader = make_grader(chosen, limits_of(config))
    return Files(rows, validation, config, tokenizer=tokenizer, grader=grader, seed=seed)


def reward_of(config: FilesTask, reward: Reward | str | None) -> Reward | str:
    """A script's reward, or the recipe's."""
    chosen = config.reward if reward is None else reward
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
