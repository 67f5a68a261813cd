"""Prompts as the model reads them, and the room that they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any, Literal

from burnish.errors import DataError
from burnish.model.tokenizer import Tokenizer
from burnish.plan import Room
from burnish.tasks.task import TooLong
from burnish.types import IntArray, Prompt

Messages = Sequence[Mapping[str, Any]]
TODAY = datetime(2026, 1, 1)
"""The date for chat templates that write one: a run resumed tomorrow reads the same prompts."""


class Writer:
    """Writes the prompts of one task; skips or cuts prompts that are too long, and counts them."""

    def __init__(
        self,
        task: str,
        tokenizer: Tokenizer,
        *,
        chat: bool,
        room: Room | None = None,
        long_prompts: Literal["skip", "cut"] = "skip",
    ) -> None:
        """room: for the longest prompt; None if no model bounds it."""
        self._task, self._tokenizer, self._chat = task, tokenizer, chat
        self._room, self._long_prompts = room, long_prompts
        self.too_long = TooLong()

    def write(self, prompt_id: str, asked: str | Messages, reference: Any) -> Prompt:
        text, ids = encode(self._tokenizer, asked, chat=self._chat)
        return Prompt(prompt_id, text, ids, self._task, reference, asked=shown(asked))

    def extend(self, prompt: Prompt, given: str) -> Prompt:
        """The prompt with the beginning of a response after it."""
        given = ("" if prompt.text[-1:].isspace() else " ") + given
        ids = self._tokenizer.encode(prompt.text + given, add_special=not self._chat)
        asked = f"{prompt.asked}{given}"
        return replace(prompt, text=prompt.text + given, token_ids=ids, asked=asked)

    def first_fitting(self, prompts: Iterable[Prompt]) -> Prompt | None:
        """The first prompt that there is room for, or the end of the first prompt if long prompts
        are cut; None if there are no prompts."""
        room, skipped, length = self._room, 0, 0
        for prompt in prompts:
            length = len(prompt.token_ids)
            if room is None or length <= room.tokens:
                return prompt
            if self._long_prompts == "cut":
                self.too_long = self.too_long._replace(cut=self.too_long.cut + 1)
                kept = prompt.token_ids[-room.tokens :]
                return replace(prompt, token_ids=kept, text=self._tokenizer.decode(kept))
            self.too_long = self.too_long._replace(skipped=self.too_long.skipped + 1)
            skipped += 1
        if room is None or not skipped:
            return None
        raise DataError(
            f"{skipped} prompts one after another are too long: the last has {length} tokens, and "
            f"{room.why} leaves {room.tokens}; make room, or set task.long_prompts = 'cut'"
        )


def check_room(prompts: Iterable[tuple[str, Prompt]], room: Room) -> None:
    """Raises if a prompt is too long. Each prompt comes with words for where its row is."""
    lengths = ((where, len(prompt.token_ids)) for where, prompt in prompts)
    long = [(where, length) for where, length in lengths if length > room.tokens]
    if long:
        where, length = long[0]
        others = f" (and {len(long) - 1} others are too long)" if long[1:] else ""
        raise DataError(
            f"{where}: the prompt has {length:,} tokens, and {room.why} leaves {room.tokens:,}"
            f"{others}; shorten it or leave the row out, or make room"
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
