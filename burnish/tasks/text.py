"""The task of a language model: questions become prompts, a grader scores the responses' texts.

``make_files`` asks rows, a file's or a script's, that are graded by the user's own reward. Such a
row is any JSON object with a "prompt": text, or chat messages. The reward sees the whole row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

from burnish.errors import ConfigError, DataError
from burnish.graders.extract import EXTRACTORS
from burnish.graders.pool import Grader, Limits, grade_pairs, make_grader
from burnish.graders.rewards import Reward
from burnish.model.tokenizer import Tokenizer
from burnish.plan import Room
from burnish.schema.tasks import AnyPart, Asked, FilesTask, Graded, JudgedTask, MathTask
from burnish.tasks.rows import DataRow, rows_of, shuffled
from burnish.types import Completion, Grade, IntArray, Prompt

Messages = Sequence[Mapping[str, Any]]
TODAY = datetime(2026, 1, 1)
"""The date for chat templates that write one: a run resumed tomorrow reads the same prompts."""


@dataclass(frozen=True)
class Question:
    """A row of data, and the text or the messages that ask it."""

    name: str
    """Such as train/17; a prompt's id is the task's name and this one."""
    asked: str | Messages
    row: Mapping[str, Any]
    """The grader sees it."""
    hint: str = ""
    """The beginning of a response that the prompt gives away."""
    part: str | None = None
    """A kind of question that metrics tell apart; None if there is one kind."""


class TextTask:
    """Asks questions through a tokenizer and grades by the response's text and the row."""

    def __init__(
        self,
        config: AnyPart,
        *,
        question: Callable[[int], Question],
        held_out: Iterable[Question],
        tokenizer: Tokenizer,
        grader: Grader,
        room: Room | None = None,
    ) -> None:
        """``question`` gives the question at a place of an endless order. ``room`` is for the
        longest prompt; None if no model bounds it."""
        self.config, self._question = config, question
        self._tokenizer, self.grader = tokenizer, grader
        self._room = room if getattr(config, "long_prompts", "skip") == "cut" else None
        self.validation = [self.write(question) for question in held_out]

    def prompt(self, number: int) -> Prompt:
        return self.write(self._question(number))

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        return grade_pairs(self.grader, pairs, must_end=self.config.must_end)

    def answer(self, prompt: Prompt, response: str) -> str | None:
        """The answer as the task wants it said, or the whole text."""
        if isinstance(self.config, Asked):
            return EXTRACTORS[self.config.answer_format](response)
        return response.strip()

    def close(self) -> None:
        self.grader.close()

    def write(self, question: Question) -> Prompt:
        """The prompt of a question; its beginning is cut off if it is too long and that is set."""
        config, asked = self.config, shown(question.asked)
        text, ids = encode(self._tokenizer, question.asked, chat=config.chat)
        if question.hint:
            hint = ("" if text[-1:].isspace() else " ") + question.hint
            text, asked = text + hint, asked + hint
            ids = self._tokenizer.encode(text, add_special=not config.chat)
        if self._room is not None and len(ids) > self._room.tokens:
            ids = ids[-self._room.tokens :]
            text = self._tokenizer.decode(ids)
        name, row = f"{config.name}/{question.name}", dict(question.row)
        return Prompt(name, text, ids, config.name, row, question.part, asked)

    def check_room(self, room: Room | None, questions: Iterable[tuple[str, Question]]) -> None:
        """Raises if a prompt is too long. ``questions`` are pairs: a row's place in words, and the
        question that the row asks."""
        if room is None:
            return
        for where, question in questions:
            length = len(self.write(question).token_ids)
            if length > room.tokens:
                raise DataError(
                    f"{where}: the prompt has {length:,} tokens, and {room.why} leaves "
                    f"{room.tokens:,}; shorten it or leave the row out, or make room"
                )


def encode(tokenizer: Tokenizer, asked: str | Messages, *, chat: bool) -> tuple[str, IntArray]:
    """The model's input as text and ids; chat: a text goes in as one user's message."""
    if isinstance(asked, str) and not chat:
        return asked, tokenizer.encode(asked)
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
    text = tokenizer.chat(messages, now=TODAY)
    return text, tokenizer.encode(text, add_special=False)


def shown(asked: str | Messages) -> str:
    """A question as its writer wrote it; several messages are each put after their role."""
    if isinstance(asked, str):
        return asked
    if len(asked) == 1:
        return str(asked[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in asked)


def ask(row: DataRow, name: str = "") -> Question:
    return Question(name, row["prompt"], row)


def ask_shuffled(rows: Sequence[DataRow], seed: int, number: int) -> Question:
    """Every epoch asks each row once, in an order of its own."""
    place = shuffled(number, len(rows), seed=seed)
    return ask(rows[place], f"train/{place}")


def ask_among(
    count: int | None, seed: int, question: Callable[[int], Question], number: int
) -> Question:
    """One of the first ``count`` questions: in their order, and then every pass in an order of its
    own; None if questions never come again."""
    if count is None or number < count:
        return question(number)
    return question(shuffled(number, count, seed=seed))


def make_files(config: FilesTask, *, seed: int, **how: Any) -> TextTask:
    """The task of a recipe's section."""
    chosen, rows = reward_of(config), rows_of(config, seed=seed)
    return ask_rows(config, rows, make_grader(chosen, limits_of(config)), seed=seed, **how)


def ask_rows(
    config: FilesTask | JudgedTask | MathTask,
    rows: tuple[list[DataRow], list[DataRow]],
    grader: Grader,
    *,
    tokenizer: Tokenizer,
    seed: int,
    room: Room | None = None,
    question: Callable[[int], Question] | None = None,
    longest: Callable[[DataRow], Question] = ask,
) -> TextTask:
    """The task that asks train rows and validation rows. ``question`` gives the train rows; None if
    every epoch asks each of them in an order of its own. ``longest`` is a row's longest question.
    """
    train, validation = rows
    question = question or partial(ask_shuffled, train, seed)
    held_out = [ask(row, f"validation/{i}") for i, row in enumerate(validation)]
    task = TextTask(
        config, question=question, held_out=held_out, tokenizer=tokenizer, grader=grader
    )
    task.check_room(room, ((row.where, longest(row)) for row in (*train, *validation)))
    return task


def reward_of(config: FilesTask) -> Reward | str:
    """A script's reward, or the recipe's."""
    chosen = config.function or config.reward
    if chosen is None:
        raise ConfigError("there is no reward; give --reward FILE.py:NAME or set task.reward")
    return chosen


def limits_of(config: Graded) -> Limits:
    same = config.model_dump(include={"workers", "cpu_seconds", "wall_seconds"})
    return Limits(**same, memory_bytes=config.memory_mb * 2**20)
