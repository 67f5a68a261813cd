"""Conversations of the chat API as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

from burnish.calls import CallFormatName
from burnish.model.conversation import ConversationFormat, default_call_format
from burnish.model.tokenizer import Tokenizer
from burnish.types import IntArray

Messages = Sequence[Mapping[str, Any]]
TOOL_LISTS = 64
"""Number of lists of tools whose formats are kept."""


class ChatPrompts:
    """Encodes conversations with a model's chat template, and lists their tools as the template
    does, or as the format of calls needs it."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        encode_chat: Callable[[Messages], IntArray],
        *,
        calls: CallFormatName | None = None,
        now: datetime,
    ) -> None:
        """``encode_chat`` encodes a conversation without tools. ``calls``: how the model writes
        calls; None for the format of the model's template, or else `default_call_format`. ``now``
        is the date that a template may insert."""
        self._tokenizer, self._encode_chat, self._given = tokenizer, encode_chat, calls
        self._now = now
        self._format_of = lru_cache(TOOL_LISTS)(self._make_format)

    @property
    def call_format(self) -> CallFormatName:
        """How the model writes calls. Raise a ModelError if the model's template writes calls in a
        format that burnish can't read."""
        return self._given or default_call_format(self._tokenizer, now=self._now)

    def encode(self, messages: Messages, tools: Sequence[Mapping[str, Any]] = ()) -> IntArray:
        """Return the token ids of a conversation with a list of tools, up to the start of the next
        answer. Raise a ModelError if the chat template rejects it."""
        if not tools and not any(m["role"] == "tool" or "tool_calls" in m for m in messages):
            return self._encode_chat(messages)
        return self._format_of(json.dumps(tools)).open(messages)

    def _make_format(self, tools: str) -> ConversationFormat:
        return ConversationFormat(
            self._tokenizer, json.loads(tools), calls=self._given, now=self._now
        )
