"""Prompts with written answers, to be learned as they stand: the data of a supervised run.

A row is a JSON object with a "prompt" (text or chat messages) and a text "answer"; GSM8K's rows
call the prompt "question". A row of preferences, from which a reward is learned, has two texts in
place of the answer: "chosen", which is the better response, and "rejected".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from burnish.errors import DataError
from burnish.model.tokenizer import Tokenizer
from burnish.schema.tasks import PairsTask, PreferencesTask
from burnish.tasks.rows import MARKS, DataRow, check_prompt, check_text, rows_of, shuffled
from burnish.tasks.text import encode
from burnish.types import Completion, Finish, Grade, Group, Prompt, SamplingParams

SIDES = ("chosen", "rejected")


@dataclass(frozen=True)
class Pairs:
    """Rows as groups of one or two responses, as if the policy had sampled what is written."""

    rows: list[Group]
    validation: list[Group]
    epochs: float
    seed: int

    def steps(self, batch: int) -> int:
        return math.ceil(self._seen / batch)

    def batch(self, number: int, size: int) -> list[Group]:
        """The groups of step ``number``, counted from 0: each row once in an epoch, shuffled."""
        places = range(number * size, min((number + 1) * size, self._seen))
        return [self.rows[shuffled(place, len(self.rows), seed=self.seed)] for place in places]

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
    """The rows that a recipe's section describes.

    ``context`` bounds a prompt with one response, ``together`` a prompt with all its responses;
    None if nothing does.
    """
    if not tokenizer.end_ids:
        raise DataError("the model's tokenizer names no end token, so no response could end")
    train, validation = (
        [write_pair(row, config, tokenizer, context, together) for row in part]
        for part in rows_of(config, seed=seed, check=CHECKS[config.name])
    )
    return Pairs(train, validation, config.epochs, seed)


def write_pair(
    row: DataRow,
    config: PairsTask | PreferencesTask,
    tokenizer: Tokenizer,
    context: int,
    together: int | None = None,
) -> Group:
    """The prompt of a row with the responses that are written for it, the best one first."""
    asked, texts = row["prompt"], [row[side] for side in SIDES if side in row]
    if isinstance(config, PairsTask):
        asked = config.prompt.replace("{prompt}", asked) if isinstance(asked, str) else asked
        texts = [config.answer.replace("{answer}", MARKS.sub("", row["answer"]))]
    text, prompt = encode(tokenizer, asked, chat=config.chat)
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


def written(where: str, number: int, text: str, tokenizer: Tokenizer) -> Completion:
    """A text with its end token, as if the policy had sampled it; ``number`` is its place among the
    responses to its prompt."""
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
    if isinstance(row, Mapping) and "question" in row and "prompt" not in row:
        row = {**row, "prompt": row["question"]}
    return _with_texts(row, where, ["answer"])


def check_preference(row: Any, where: str) -> DataRow:
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
"""Checks of a row by the task's name."""
