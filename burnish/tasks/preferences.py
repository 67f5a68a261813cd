"""Preference pairs, from which a reward is learned.

A row is a JSON object with a "prompt" (text or chat messages) and two texts, "chosen" and
"rejected", of which the first is the better response.
"""

from __future__ import annotations

from typing import Any

from burnish.errors import DataError
from burnish.model.tokenizer import Tokenizer
from burnish.schema.tasks import PreferencesTask
from burnish.tasks.pairs import Pairs, written
from burnish.tasks.rows import DataRow, check_prompt, check_text, rows_of
from burnish.tasks.text import encode
from burnish.types import Grade, Group, Prompt

SIDES = ("chosen", "rejected")


def make_preferences(
    config: PreferencesTask, *, tokenizer: Tokenizer, seed: int, context: int, together: int | None
) -> Pairs:
    """The pairs that a recipe's section describes, each a group of two responses.

    ``context`` bounds a prompt with one response, ``together`` a prompt with both; None if nothing
    does.
    """
    if not tokenizer.end_ids:
        raise DataError("the model's tokenizer names no end token, so no response could end")
    train, validation = (
        [write_preference(row, config, tokenizer, context, together) for row in part]
        for part in rows_of(config, seed=seed, check=check_preference)
    )
    return Pairs(train, validation, config.epochs, seed)


def write_preference(
    row: DataRow, config: PreferencesTask, tokenizer: Tokenizer, context: int, together: int | None
) -> Group:
    text, prompt = encode(tokenizer, row["prompt"], chat=config.chat)
    sides = tuple(written(row.where, i, row[side], tokenizer) for i, side in enumerate(SIDES))
    lengths = [len(side.token_ids) for side in sides]
    for length, bound, what in (
        (max(lengths), context, "the longer response"),
        (sum(lengths), together, "both responses"),
    ):
        if bound is not None and len(prompt) + length > bound:
            raise DataError(
                f"{row.where}: the prompt and {what} are {len(prompt) + length} tokens, the "
                f"model's context or train.micro_tokens is {bound}; shorten the row or leave it out"
            )
    return Group(0, Prompt(row.where, text, prompt, "preferences"), sides, (Grade(1.0), Grade(0.0)))


def check_preference(row: Any, where: str) -> DataRow:
    checked = check_prompt(row, where)
    for side in SIDES:
        text = checked.get(side)
        if not isinstance(text, str) or not text.strip():
            got = "none" if text is None else repr(text)[:80]
            raise DataError(f"{where}: a pair needs a text {side!r} that is not empty, got {got}")
        check_text(text, where)
    if checked["chosen"] == checked["rejected"]:
        raise DataError(f"{where}: chosen and rejected are the same text; leave the row out")
    return checked
