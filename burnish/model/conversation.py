"""Conversations as token ids: an opening, the assistant's turns, and the messages between turns.

A conversation grows by appending. Tokens that a policy has sampled are never decoded and tokenized
again, so the learner sees the ids that were sampled, in the context in which they were sampled:

    open(messages)        the messages before the first turn, and the generation prompt
    turn(message)         an assistant's message as it would have been sampled, with its end token
    between(messages)     from the end token of a turn to the next generation prompt

``between`` renders all messages of one step together, after a synthetic user and assistant message,
and keeps the text after that assistant's end token. It therefore does not depend on earlier turns.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import numpy as np

from burnish.errors import ModelError
from burnish.model.tokenizer import Tokenizer
from burnish.types import IntArray

Message = Mapping[str, Any]
USER = {"role": "user", "content": "burnish-question"}
ANSWER = {"role": "assistant", "content": "burnish-answer"}
"""Synthetic messages. Their contents are found again in the text of a chat template."""
THOUGHT = {**ANSWER, "content": f"<think>\nburnish-thought\n</think>\n\n{ANSWER['content']}"}


class ConversationFormat:
    """Encodes the parts of conversations as a model's chat template writes them.

    A model without a chat template gets a plain format: each message is its content and a line
    break, and the end token takes the place of an assistant's line break.
    """

    def __init__(
        self, tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = (), *, now: datetime
    ) -> None:
        """``tools`` are JSON schemas of the functions that the assistant may call, and ``now`` is
        the date that a template may insert.

        Raise a ModelError if the tokenizer has no end token, or if there are tools and the model's
        template does not write them.
        """
        if not tokenizer.end_ids:
            raise ModelError("the model's tokenizer names no end token, so no turn could end")
        self._tokenizer, self._tools, self._now = tokenizer, tools, now
        self._ends = {tokenizer.decode([token]): token for token in tokenizer.end_ids}
        self.end_id = tokenizer.end_ids[0]
        """The token that ends a turn: the end token that the template writes after an answer, or
        the model's first one if it writes none."""
        self.inserted_end = np.array([self.end_id], np.int32)
        """The end token as an array, to insert after a turn that the policy did not end with it;
        empty if the chat template writes none."""
        if tokenizer.chat_template is None:
            if tools:
                raise ModelError("this model has no chat template, so it can't write tools")
            return
        if tools and self._write([USER]) == tokenizer.chat([USER], now=now):
            raise ModelError("the model's chat template does not write tools")
        self._head = self._write([USER])
        text = self._write([USER, ANSWER], generate=False)
        after = text[self._answered(text) :].lstrip()
        self._end = next((end for end in self._ends if after.startswith(end)), "")
        self.end_id = self._ends.get(self._end, self.end_id)
        self.inserted_end = np.array([self.end_id] if self._end else [], np.int32)

    def open(self, messages: Sequence[Message]) -> IntArray:
        """Return the token ids of the messages before the first turn, with the generation
        prompt."""
        if self._tokenizer.chat_template is None:
            return self._tokenizer.encode(_plain(messages))
        return self._encode(self._write(messages))

    def turn(self, message: Message) -> IntArray:
        """Return the token ids of an assistant's message, as the model would have sampled them
        after the generation prompt, with the end token."""
        if self._tokenizer.chat_template is None:
            return self._ended(self._encode(message["content"]))
        text = self._write([USER, message], generate=False)
        if not text.startswith(self._head):
            raise ModelError(
                "the model's chat template does not begin an assistant's message with its "
                "generation prompt, so burnish can't tell which tokens the model would sample"
            )
        body = text[len(self._head) :]
        cut = body.rfind(self._end) if self._end else len(body.rstrip())
        return self._ended(self._encode(body[:cut]))

    def between(self, messages: Sequence[Message]) -> IntArray:
        """Return the token ids that follow the end token of a turn: the messages of one step and
        the next generation prompt."""
        if self._tokenizer.chat_template is None:
            return self._encode(_plain(messages))
        text = self._write([USER, ANSWER, *messages])
        start = self._answered(text)
        if self._end:
            start = text.index(self._end, start) + len(self._end)
        return self._encode(text[start:])

    def rewrites(self, roles: Iterable[str]) -> list[str]:
        """Return those of the ``roles`` whose messages make the template write earlier turns
        differently, for example without their thoughts. It compares token ids. A role that the
        template rejects is left out."""
        if self._tokenizer.chat_template is None:
            return []
        return [role for role in roles if self._rewrites({"role": role, "content": "."})]

    def appends(self, messages: Sequence[Message], following: Sequence[Message]) -> bool:
        """Return whether a conversation that ends with an assistant's turn is only continued by the
        messages that follow: the template still writes everything before them as it was when the
        turn was sampled, and the turn as it was sampled or as the template writes a last turn."""
        if self._tokenizer.chat_template is None:
            return True
        *before, turn = messages
        context, whole = self._write(before), self._write([*messages, *following])
        if whole.startswith(f"{context}{turn.get('content') or ''}{self._end}"):
            return True
        written = self._write(messages, generate=False).rstrip()
        return written.startswith(context) and whole.startswith(written)

    def _rewrites(self, message: Message) -> bool:
        for answer in (ANSWER, THOUGHT):
            messages = [USER, answer, message, answer, message]
            try:
                whole = self._encode(self._write(messages))
            except ModelError:
                return False
            turn, after = self.turn(answer), self.between([message])
            turn = turn if self._end else turn[:-1]
            parts = [self.open([USER]), turn, after, turn, after]
            if not np.array_equal(np.concatenate(parts), whole):
                return True
        return False

    def _answered(self, text: str) -> int:
        """Return the place after the synthetic answer in a rendered text."""
        place = text.rfind(ANSWER["content"])
        if place < 0:
            raise ModelError("the model's chat template leaves out the assistant's messages")
        return place + len(ANSWER["content"])

    def _write(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        return self._tokenizer.chat(
            list(map(_parsed, messages)), now=self._now, tools=self._tools, generate=generate
        )

    def _encode(self, text: str) -> IntArray:
        return self._tokenizer.encode(text, add_special=False)

    def _ended(self, ids: IntArray) -> IntArray:
        return np.append(ids, np.int32(self.end_id))


def _plain(messages: Iterable[Message]) -> str:
    return "".join(f"{message['content']}\n" for message in messages)


def _parsed(message: Message) -> Message:
    """Return a message with the arguments of its tool calls as objects, as chat templates expect
    them; OpenAI's API writes them as JSON texts."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    parsed = []
    for call in calls:
        function = call.get("function", call)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        parsed.append({"type": "function", "function": {**function, "arguments": arguments}})
    return {**message, "content": message.get("content") or "", "tool_calls": parsed}
