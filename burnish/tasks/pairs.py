"""Prompts with written answers, to be learned as they stand: the data of a supervised run.

A row is a JSON object with a "prompt" (text or chat messages) and a text "answer"; GSM8K's rows
call the prompt "question".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from burnish.errors import DataError
from burnish.model.tokenizer import Tokenizer
from burnish.schema.tasks import PairsTask
from burnish.tasks.rows import MARKS, DataRow, check_prompt, check_text, rows_of, shuffled
from burnish.tasks.text import encode
from burnish.types import Completion, Finish, Grade, Group, Prompt, SamplingParams


@dataclass(frozen=True)
class Pairs:
    """Rows as groups of one response each, as if the policy had sampled what is written."""

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


def make_pairs(config: PairsTask, *, tokenizer: Tokenizer, seed: int, longest: int) -> Pairs:
    """The pairs that a recipe's section describes.

    longest: tokens that a prompt and its answer may have together.
    """
    if not tokenizer.end_ids:
        raise DataError("the model's tokenizer names no end token, so no answer could end")
    train, validation = (
        [write_pair(row, config, tokenizer, longest) for row in part]
        for part in rows_of(config, seed=seed, check=check_pair)
    )
    return Pairs(train, validation, config.epochs, seed)


def write_pair(row: DataRow, config: PairsTask, tokenizer: Tokenizer, longest: int) -> Group:
    asked = row["prompt"]
    if isinstance(asked, str):
        asked = config.prompt.replace("{prompt}", asked)
    text, prompt = encode(tokenizer, asked, chat=config.chat)
    answer = config.answer.replace("{answer}", MARKS.sub("", row["answer"]))
    completion = written(row.where, 0, answer, tokenizer)
    length = len(prompt) + len(completion.token_ids)
    if length > longest:
        raise DataError(
            f"{row.where}: prompt and answer are {length} tokens, the model's "
            f"context or train.micro_tokens is {longest}; shorten the row or leave it out"
        )
    return Group(0, Prompt(row.where, text, prompt, "pairs"), (completion,), (Grade(1.0),))


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
    checked = check_prompt(row, where)
    answer = checked.get("answer")
    if not isinstance(answer, str) or not answer.strip():
        got = "none" if answer is None else repr(answer)[:80]
        raise DataError(
            f"{where}: a row to learn from needs a text 'answer' that is not empty, got {got}; "
            "write one, or leave the row out"
        )
    check_text(answer, where)
    return checked
