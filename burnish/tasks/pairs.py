"""Data of a supervised run: prompts with the answers that the model should learn.

A row is an object with a "prompt" (text or chat messages) and a text "answer"; GSM8K's rows call
the prompt "question". Without an answer, the last of the prompt's messages is the answer if it is
the assistant's. A row of preference data, from which a reward model learns, has two
texts instead of the answer: "chosen", the better response, and "rejected".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from burnish.errors import DataError
from burnish.model.tokenizer import Tokenizer
from burnish.recipe.tasks import PairsTask, PreferencesTask
from burnish.tasks.rows import (
    MARKS,
    DataRow,
    check_prompt,
    check_text,
    check_trainable,
    counted_rows,
    load_rows,
    shuffled,
    tell_split,
)
from burnish.tasks.text import check_system, render_prompt, surely_fits
from burnish.types import Completion, Finish, Grade, Group, Prompt, SamplingParams

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Pairs:
    """Data of a supervised run. Each row is a ``Group``, like the groups of sampled responses: its
    prompt with one answer, or with a chosen and a rejected response."""

    rows: Sequence[Group]
    validation: Sequence[Group]
    epochs: float
    seed: int

    def steps(self, batch: int) -> int:
        """Return the number of steps over all epochs, with ``batch`` rows per step."""
        return math.ceil(self._seen / batch)

    def batch(self, number: int, size: int) -> list[Group]:
        """Return the groups of step ``number``, counted from 0: ``size`` groups, or fewer in the
        last step. Each epoch has every row once, in a new order."""
        indices = range(number * size, min((number + 1) * size, self._seen))
        return [self.rows[shuffled(index, len(self.rows), seed=self.seed)] for index in indices]

    @property
    def _seen(self) -> int:
        return max(1, round(self.epochs * len(self.rows)))


def make_pairs(
    config: PairsTask | PreferencesTask,
    *,
    tokenizer: Tokenizer,
    seed: int,
    context: int,
    together: int | None = None,
) -> Pairs:
    """Read and check the rows of a supervised recipe. Training rows are encoded when they are used.

    ``context`` is the limit in tokens for a prompt with one response, ``together`` the limit for a
    prompt with all its responses; None if there is no such limit. Raise a DataError if a row is
    invalid or too long, or if no row is left to train on.
    """
    if not tokenizer.end_ids:
        raise DataError("the model's tokenizer names no end token, so no response could end")
    check_system(tokenizer, config.system)
    loaded = load_rows(config, seed=seed, check=CHECKS[config.name])
    check_trainable(*loaded)
    tell_split(*loaded)
    write = partial(
        write_pair, config=config, tokenizer=tokenizer, context=context, together=together
    )
    train, validation = (EncodedRows(rows, write) for rows in loaded)
    bound = context if together is None else min(context, together)
    total = sum(map(len, loaded))
    for row in counted_rows(chain(*loaded), total, "load", "measuring the rows"):
        prompt, _, texts = _render(row, config, tokenizer)
        if not all(surely_fits(text, bound // (1 + len(texts))) for text in (prompt, *texts)):
            write(row)
    return Pairs(train, list(validation), config.epochs, seed)


class EncodedRows(Sequence[Group]):
    """Rows of a supervised run as groups, each encoded when it is used."""

    def __init__(self, rows: Sequence[DataRow], write: Callable[[DataRow], Group]) -> None:
        self._rows, self._write = rows, write

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        return self._write(self._rows[index])


def write_pair(
    row: DataRow,
    config: PairsTask | PreferencesTask,
    tokenizer: Tokenizer,
    context: int,
    together: int | None = None,
) -> Group:
    """Encode a row as a group: its prompt and its responses, the best one first with reward 1, the
    other with 0.

    ``context`` and ``together`` are limits as in `make_pairs`; raise a DataError if the row exceeds
    one.
    """
    text, has_special, texts = _render(row, config, tokenizer)
    prompt = tokenizer.encode(text, add_special=has_special)
    sides = tuple(written(row.where, i, side, tokenizer) for i, side in enumerate(texts))
    lengths = [len(side.token_ids) for side in sides]
    for which, length, bound, setting in (
        ("its longest response", max(lengths), context, "the model's context"),
        ("all its responses", sum(lengths), together, "train.micro_tokens"),
    ):
        if bound is not None and len(prompt) + length > bound:
            raise DataError(
                f"{row.where}: the prompt and {which} are {len(prompt) + length} tokens, and "
                f"{setting} is {bound}; shorten the row or leave it out"
            )
    grades = tuple(Grade(float(i == 0)) for i in range(len(sides)))
    return Group(0, Prompt(row.where, text, prompt, config.name), sides, grades)


def _render(
    row: DataRow, config: PairsTask | PreferencesTask, tokenizer: Tokenizer
) -> tuple[str, bool, list[str]]:
    """Return a row's prompt as the model's input, whether the tokenizer adds its special tokens to
    it, and the texts of the responses."""
    content, texts = row["prompt"], [row[side] for side in SIDES if side in row]
    if isinstance(config, PairsTask):
        if isinstance(content, str):
            content = config.prompt.replace("{prompt}", content)
        texts = [config.answer.replace("{answer}", MARKS.sub("", row["answer"]))]
    text, has_special = render_prompt(tokenizer, content, chat=config.chat, system=config.system)
    return text, has_special, texts


def written(where: str, number: int, text: str, tokenizer: Tokenizer) -> Completion:
    """Encode a text and an end token as a completion that no policy sampled: its log-probabilities
    are 0, and its versions −1.

    ``where`` is its request id, and ``number`` its index among the responses to its prompt.
    """
    tokens = tokenizer.encode(text, add_special=False)
    ids = np.append(tokens, np.int32(tokenizer.end_ids[0]))
    return Completion(
        request_id=where,
        sample_index=number,
        token_ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        versions=np.full(len(ids), -1, np.int32),  # no version of the policy sampled it
        sampled=np.ones(len(ids), bool),
        params=SamplingParams(),
        finish=Finish.STOP,
        stop=int(ids[-1]),
        text=text,
    )


def check_pair(row: Any, where: str) -> DataRow:
    """Check a row with a prompt and an answer; return it with "prompt" and a text "answer", or
    raise a DataError. ``where`` describes the row's place."""
    if isinstance(row, Mapping) and "question" in row and "prompt" not in row:
        row = {**row, "prompt": row["question"]}
    if isinstance(row, Mapping) and row.get("answer") is None and _is_answered(row.get("prompt")):
        *prompt, answer = row["prompt"]
        row = {**row, "prompt": prompt, "answer": answer["content"]}
    return _with_texts(row, where, ["answer"])


def _is_answered(prompt: Any) -> bool:
    """Return whether a prompt is a list of chat messages that ends with the assistant's answer."""
    last = prompt[-1] if isinstance(prompt, list) and len(prompt) > 1 else None
    return isinstance(last, Mapping) and last.get("role") == "assistant" and "content" in last


def check_preference(row: Any, where: str) -> DataRow:
    """Check a row with a prompt and two different texts, "chosen" and "rejected"; return it or
    raise a DataError. ``where`` describes the row's place."""
    checked = _with_texts(row, where, SIDES)
    if checked["chosen"] == checked["rejected"]:
        raise DataError(f"{where}: chosen and rejected are the same text; leave the row out")
    return checked


def _with_texts(row: Any, where: str, names: Sequence[str]) -> DataRow:
    checked = check_prompt(row, where)
    for name in names:
        text = checked.get(name)
        if not isinstance(text, str) or not text.strip():
            got = "none" if text is None else repr(text)[:80]
            raise DataError(
                f"{where}: a row to learn from needs a text {name!r} that is not empty, got {got}; "
                "write one, or leave the row out"
            )
        check_text(text, where)
    return checked


CHECKS = {"pairs": check_pair, "preferences": check_preference}
"""Functions that check a row, by the task's name."""
