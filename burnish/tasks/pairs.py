"""Prompts with written answers, to be learned as they stand: the data of a supervised run.

A row is a JSON object with a "prompt" (text or chat messages) and a text "answer"; GSM8K's rows
call the prompt "question".
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from burnish.config import PairsTask
from burnish.errors import DataError
from burnish.model.tokenizer import Tokenizer
from burnish.tasks.prompts import encode
from burnish.tasks.rows import DataRow, check_prompt, check_text, rows_of, shuffled
from burnish.types import Completion, Finish, Grade, Group, Prompt, SamplingParams

MARKS = re.compile(r"<<[^<>\n]*=[^<>\n]*>>")
"""What GSM8K's authors had a calculator fill in; the text around it says the same."""


class Pairs:
    """Rows as groups of one response each, as if the policy had sampled what is written."""

    def __init__(
        self,
        rows: Sequence[DataRow],
        validation: Sequence[DataRow],
        config: PairsTask,
        *,
        tokenizer: Tokenizer,
        seed: int,
        longest: int,
    ) -> None:
        """longest: tokens that a prompt and its answer may have together."""
        if not tokenizer.end_ids:
            raise DataError("the model's tokenizer names no end token, so no answer could end")
        self.config, self._tokenizer, self._longest = config, tokenizer, longest
        self._seed = seed
        self.rows = [self._group(f"pairs/train/{i}", row) for i, row in enumerate(rows)]
        held_out = enumerate(validation)
        self.validation = [self._group(f"pairs/validation/{i}", row) for i, row in held_out]

    def steps(self, batch: int) -> int:
        return math.ceil(self._seen / batch)

    def batch(self, number: int, size: int) -> list[Group]:
        """The groups of step ``number``, counted from 0: each row once in an epoch, shuffled."""
        places = range(number * size, min((number + 1) * size, self._seen))
        return [self.rows[shuffled(place, len(self.rows), seed=self._seed)] for place in places]

    @property
    def _seen(self) -> int:
        return max(1, round(self.config.epochs * len(self.rows)))

    def _group(self, prompt_id: str, row: DataRow) -> Group:
        config, asked = self.config, row["prompt"]
        if isinstance(asked, str):
            asked = config.prompt.replace("{prompt}", asked)
        text, prompt = encode(self._tokenizer, asked, chat=config.chat)
        written = row["answer"] if config.marks else MARKS.sub("", row["answer"])
        written = config.answer.replace("{answer}", written)
        answer = self._tokenizer.encode(written, add_special=False)
        ids = np.append(answer, np.int32(self._tokenizer.end_ids[0]))
        if len(prompt) + len(ids) > self._longest:
            raise DataError(
                f"{row.where}: prompt and answer are "
                f"{len(prompt) + len(ids)} tokens, the model's context or train.micro_tokens is "
                f"{self._longest}; shorten the row or leave it out"
            )
        completion = Completion(
            request_id=prompt_id,
            sample_index=0,
            token_ids=ids,
            logprobs=np.zeros(len(ids), np.float32),
            versions=np.full(len(ids), -1, np.int32),  # no version of the policy sampled it
            sampled=np.ones(len(ids), bool),
            params=SamplingParams(),
            finish=Finish.STOP,
            stop=int(ids[-1]),
            text=written,
        )
        return Group(0, Prompt(prompt_id, text, prompt, "pairs"), (completion,), (Grade(1.0),))


def make_pairs(
    config: PairsTask,
    *,
    tokenizer: Tokenizer,
    seed: int,
    longest: int,
    rows: Iterable[str | Mapping[str, Any]] | None = None,
) -> Pairs:
    """The pairs that a recipe's section describes; a script's rows come before its file."""
    train, validation = rows_of(config, seed=seed, prompts=rows, check=check_pair)
    return Pairs(train, validation, config, tokenizer=tokenizer, seed=seed, longest=longest)


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
