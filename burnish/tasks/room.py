"""What becomes of a prompt that is too long, where a task makes any number of prompts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Literal

from burnish.errors import DataError
from burnish.model.tokenizer import Tokenizer
from burnish.plan import Room
from burnish.types import Prompt


def fitting(
    prompts: Iterable[Prompt],
    room: Room | None,
    how: Literal["skip", "cut"],
    tokenizer: Tokenizer,
) -> Prompt | None:
    """The first of the prompts that there is room for, or the end of the first; None if there are
    no prompts.

    Its ``meta`` says how many were "skipped" for it, or how many tokens were "cut". ``room`` is
    None if no model bounds the prompts.
    """
    skipped, length = 0, 0
    for prompt in prompts:
        length = len(prompt.token_ids)
        if room is None or length <= room.tokens:
            return replace(prompt, meta=prompt.meta | {"skipped": skipped}) if skipped else prompt
        if how == "cut":
            kept = prompt.token_ids[-room.tokens :]
            meta = prompt.meta | {"cut": length - len(kept)}
            return replace(prompt, token_ids=kept, text=tokenizer.decode(kept), meta=meta)
        skipped += 1
    if room is None or not skipped:
        return None
    raise DataError(
        f"{skipped} prompts one after another are too long: the last has {length} tokens, and "
        f"{room.why} leaves {room.tokens}; make room, or set task.long_prompts = 'cut'"
    )
