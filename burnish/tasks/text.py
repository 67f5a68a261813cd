"""The task of a language model: it encodes questions as prompts and grades the texts of responses.

``make_files`` builds a task from rows of data or a script that a user's reward grades. Such a row
is any object with a "prompt": a text or chat messages. The reward sees the whole row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any

from burnish.errors import ConfigError, DataError, ModelError
from burnish.graders.extract import EXTRACTORS
from burnish.graders.pool import Grader, GraderLimits, grade_pairs, make_grader
from burnish.graders.rewards import Reward
from burnish.graders.weighted import Member, WeightedGrader
from burnish.model.tokenizer import Tokenizer
from burnish.recipe.costs import Room
from burnish.recipe.tasks import (
    AnyPart,
    FilesTask,
    GradedTask,
    JudgedTask,
    MathTask,
    PairsTask,
    PreferencesTask,
    PromptsTask,
    QuestionTask,
)
from burnish.tasks.rows import (
    DataRow,
    Rows,
    counted_rows,
    load_rows,
    shuffled,
    tell_split,
)
from burnish.types import Completion, Grade, IntArray, Prompt

Messages = Sequence[Mapping[str, Any]]
SPECIAL = 16
"""Upper bound of the special tokens that a tokenizer adds to a text."""
QUESTION = "{question}"
"""Place of a question, or of a row's prompt, in a template."""
TODAY = datetime(2026, 1, 1)
"""Date for chat templates that write one. It is fixed, so that a resumed run has the same
prompts."""


@dataclass(frozen=True)
class Question:
    """A row of data and the content of the prompt that is made from it."""

    name: str
    """For example train/17; a prompt's id consists of the task's name and this name."""
    content: str | Messages
    """A text or chat messages."""
    row: Mapping[str, Any]
    """The row that the grader sees."""
    hint: str = ""
    """Beginning of a response that the prompt contains; empty if there is no hint."""
    part: str | None = None
    """Kind of question, for metrics by kind; None if there is only one kind."""


class TextTask:
    """Encodes questions with a tokenizer, and grades a response's text together with its row."""

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
        """``question`` returns the question at an index of an endless sequence; the questions
        ``held_out`` become the validation prompts.

        ``room`` is the token limit to which prompts are cut with task.long_prompts = "cut", and has
        no effect otherwise; None if no model limits prompts.
        """
        self.config, self._question = config, question
        self._system: str | None = getattr(config, "system", None)
        self._template = template_of(config)
        self._tokenizer, self.grader = tokenizer, grader
        self._room = room if getattr(config, "long_prompts", "skip") == "cut" else None
        self.validation = [self.write(question) for question in held_out]

    def prompt(self, number: int) -> Prompt:
        return self.write(self._question(number))

    def grade_all(self, pairs: Sequence[tuple[Prompt, Completion]]) -> list[Grade]:
        return grade_pairs(self.grader, pairs, must_end=self.config.must_end)

    def answer(self, prompt: Prompt, response: str) -> str | None:
        """Return the answer in a response, found by the task's answer format; None if there is
        none.

        A task without an answer format returns the whole response without surrounding white space.
        """
        if isinstance(self.config, QuestionTask):
            return EXTRACTORS[self.config.answer_format](response)
        return response.strip()

    def close(self) -> None:
        self.grader.close()

    def write(self, question: Question) -> Prompt:
        """Encode a question as a prompt, with its hint if it has one. With task.long_prompts =
        "cut", the beginning of a prompt that is too long is cut off."""
        config, shown = self.config, plain_text(question.content)
        text, has_special, hint = self._render(question)
        shown += hint
        ids = self._tokenizer.encode(text, add_special=has_special)
        if self._room is not None and len(ids) > self._room.tokens:
            ids = ids[-self._room.tokens :]
            text = self._tokenizer.decode(ids)
        text = self._tokenizer.unmask(text)
        name, row = f"{config.name}/{question.name}", dict(question.row)
        return Prompt(name, text, ids, config.name, row, question.part, shown)

    def _render(self, question: Question) -> tuple[str, bool, str]:
        """Return the model's input as text in which the special tokens of data are masked, whether
        the tokenizer adds its special tokens to it, and the hint with the white space before it."""
        text, has_special = render_prompt(
            self._tokenizer,
            question.content,
            chat=self.config.chat,
            system=self._system,
            template=self._template,
        )
        hint = question.hint and ("" if text[-1:].isspace() else " ") + question.hint
        return text + self._tokenizer.mask(hint), has_special, hint

    def check_room(
        self, room: Room | None, questions: Iterable[tuple[str, Question]], total: int = 0
    ) -> None:
        """Raise a DataError if the prompt of a question has more tokens than ``room`` allows; do
        nothing if ``room`` is None.

        ``questions`` are pairs of the place of a row, as text, and the row's question. ``total`` is
        the number of pairs, for the display of progress.
        """
        if room is None:
            return
        around: str | None = None  # the text that the chat template adds to a text
        for where, question in counted_rows(questions, total, "load", "measuring the prompts"):
            if around is not None and isinstance(question.content, str) and not question.hint:
                text = around + question.content
            else:
                text = self._render(question)[0]
                if isinstance(question.content, str) and not question.hint:
                    around = text.replace(question.content, "", 1)
            if surely_fits(text, room.tokens):
                continue
            length = len(self.write(question).token_ids)
            if length > room.tokens:
                raise DataError(
                    f"{where}: the prompt has {length:,} tokens, and {room.why} leaves "
                    f"{room.tokens:,}; shorten it, leave the row out, or raise the limit"
                )


def encode_prompt(
    tokenizer: Tokenizer, content: str | Messages, *, chat: bool, system: str | None = None
) -> tuple[str, IntArray]:
    """Return the model's input as text and as token ids. Arguments as in `render_prompt`, but
    special tokens in a text that is used unchanged are control tokens."""
    text, has_special = render_prompt(tokenizer, content, chat=chat, system=system, template=None)
    return tokenizer.unmask(text), tokenizer.encode(text, add_special=has_special)


def render_prompt(
    tokenizer: Tokenizer,
    content: str | Messages,
    *,
    chat: bool,
    system: str | None = None,
    template: str | None = QUESTION,
) -> tuple[str, bool]:
    """Return the model's input as text, and whether the tokenizer adds its special tokens to it.
    Special tokens in the content are masked, so that `Tokenizer.encode` encodes them as text.

    Messages are formatted with the chat template. A text is formatted as a single user message if
    ``chat`` is true, and is used unchanged otherwise. ``system`` is the content of a system message
    before them, and None for no system message; a text that is used unchanged gets none.
    ``template`` is the recipe's text with {question} that a text which is used unchanged begins and
    ends with: special tokens there are control tokens. None: they are in the whole text.
    """
    if isinstance(content, str) and not chat:
        return content if template is None else _masked(tokenizer, content, template), True
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    if system is not None:
        messages = [{"role": "system", "content": system}, *messages]
    return tokenizer.chat(messages, now=TODAY), False


def template_of(config: AnyPart | PairsTask | PreferencesTask) -> str | None:
    """Return the template of `render_prompt` for a task; None if its rows may contain control
    tokens."""
    if isinstance(config, QuestionTask):
        return config.template
    if isinstance(config, PromptsTask) and config.special_tokens == "control":
        return None
    return (
        config.prompt.replace("{prompt}", QUESTION) if isinstance(config, PairsTask) else QUESTION
    )


def _masked(tokenizer: Tokenizer, text: str, template: str) -> str:
    """Return a text with special tokens masked that are not from its template."""
    before, after = template.partition(QUESTION)[0], template.rpartition(QUESTION)[2]
    inner = text[len(before) : len(text) - len(after)]
    if f"{before}{inner}{after}" != text:
        return tokenizer.mask(text)
    return before + tokenizer.mask(inner) + after


def surely_fits(text: str, tokens: int) -> bool:
    """Return whether a text has so few bytes that it can't have more than ``tokens`` tokens.

    False does not mean that it has more. Bytes count four times, because a normalizer may write one
    character as several.
    """
    return 4 * len(text.encode()) + SPECIAL <= tokens


def check_system(tokenizer: Tokenizer, system: str | None) -> None:
    """Raise a ModelError if the model's chat template does not write the message ``system``; do
    nothing if it is None."""
    if system is None:
        return
    asked = {"role": "user", "content": "?"}
    try:
        text = tokenizer.chat([{"role": "system", "content": system}, asked], now=TODAY)
        reason = (
            None
            if tokenizer.mask(system).strip() in text
            else "its chat template leaves the message out"
        )
    except ModelError as error:
        reason = str(error).partition(";")[0]
    if reason is not None:
        raise ModelError(
            f"task.system needs a model whose chat template has a system message: {reason}; remove "
            "task.system, and write its text into the prompts"
        )


def encode_chat(tokenizer: Tokenizer, messages: Messages) -> IntArray:
    """Return the token ids of a conversation, up to the start of the next answer. Without a chat
    template, its text consists of the contents of all messages, whatever their roles, each followed
    by a line break."""
    if tokenizer.chat_template is not None:
        return encode_prompt(tokenizer, messages, chat=True)[1]
    text = "".join(f"{message['content']}\n" for message in messages)
    return tokenizer.encode(tokenizer.mask(text))


def plain_text(content: str | Messages) -> str:
    """Return a prompt's content as text without a chat template, for display. Several messages are
    labelled with their roles."""
    if isinstance(content, str):
        return content
    if len(content) == 1:
        return str(content[0]["content"])
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in content)


def row_question(row: DataRow, name: str = "") -> Question:
    """Return the question of a row, whose content is the row's prompt."""
    return Question(name, row["prompt"], row)


def shuffled_question(rows: Sequence[DataRow], seed: int, number: int) -> Question:
    """Return the question of the row at index ``number`` of an endless sequence, in which every
    epoch has each row once, in a new order. Raise a DataError if there are no rows."""
    if not rows:
        raise DataError("no row is left to train on; give other rows, or hold out fewer")
    index = shuffled(number, len(rows), seed=seed)
    return row_question(rows[index], f"train/{index}")


def repeated_question(
    count: int | None, seed: int, question: Callable[[int], Question], number: int
) -> Question:
    """Return the question at index ``number`` of an endless sequence that repeats the first
    ``count`` questions: in order in the first epoch, shuffled in every later one. ``count`` is None
    if questions are not repeated."""
    if count is None or number < count:
        return question(number)
    return question(shuffled(number, count, seed=seed))


def make_files(config: FilesTask, *, seed: int, **how: Any) -> TextTask:
    """Build a task with rows that are read from data or passed by a script, and start its graders.

    The user's own reward or a built-in one grades the responses. ``seed``: for the choice of
    held-out rows and the order of training rows. ``how``: other arguments of `make_rows_task`.
    """
    chosen, limits = rewards_of(config), limits_of(config)
    rows = load_rows(config, seed=seed)
    graders = [make_grader(reward, limits) for reward in chosen]
    grader: Grader = graders[0]
    if config.rewards is not None:
        weights = [(one.name, one.weight) for one in config.rewards]
        pairs = zip(weights, graders, strict=True)
        grader = WeightedGrader([Member(*weight, scorer) for weight, scorer in pairs])
    return make_rows_task(config, rows, grader, seed=seed, **how)


def make_rows_task(
    config: FilesTask | JudgedTask | MathTask,
    rows: tuple[Sequence[DataRow], Sequence[DataRow]],
    grader: Grader,
    *,
    tokenizer: Tokenizer,
    seed: int,
    room: Room | None = None,
    question: Callable[[int], Question] | None = None,
    longest: Callable[[DataRow], Question] = row_question,
) -> TextTask:
    """Build a task from training and validation rows; raise a DataError if a prompt is longer than
    ``room`` (None: no limit).

    ``question`` returns the training question at an index; None if every epoch has each row once,
    in a new order. ``longest`` returns the longest question of a row, for the length check.
    """
    train, validation = rows
    check_system(tokenizer, config.system)
    if isinstance(train, Rows) and isinstance(validation, Rows):
        tell_split(train, validation, config.validation_rows)
    question = question or partial(shuffled_question, train, seed)
    held_out = [row_question(row, f"validation/{i}") for i, row in enumerate(validation)]
    task = TextTask(
        config, question=question, held_out=held_out, tokenizer=tokenizer, grader=grader
    )
    questions = ((row.where, longest(row)) for row in chain(train, validation))
    task.check_room(room, questions, len(train) + len(validation))
    return task


def rewards_of(config: FilesTask) -> list[Reward | str]:
    """Return the task's rewards: functions that a script has passed, or texts such as
    "FILE.py:NAME". Raise a ConfigError if there is none, or if a function is missing."""
    if config.rewards is None:
        chosen = config.function or config.reward
        if chosen is None:
            raise ConfigError("there is no reward; give --reward FILE.py:NAME or set task.reward")
        return [chosen]
    found = [(one.name, one.function or one.reward) for one in config.rewards]
    for name, reward in found:
        if reward is None:
            raise ConfigError(
                f"task.rewards has no function for {name!r}; set its reward to FILE.py:NAME, or "
                "pass the function from Python"
            )
    return [reward for _, reward in found if reward is not None]


def limits_of(config: GradedTask) -> GraderLimits:
    """Return the limits of graders that a task's settings give."""
    same = config.model_dump(include={"workers", "cpu_seconds", "wall_seconds"})
    return GraderLimits(**same, memory_bytes=config.memory_mb * 2**20)
