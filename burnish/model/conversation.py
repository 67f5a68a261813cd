"""Conversations as token ids: an opening, the assistant's turns, and the messages between turns.

A conversation grows by appending. Tokens that a policy has sampled are never decoded and tokenized
again, so the learner sees the ids that were sampled, in the context in which they were sampled:

    open(messages)        the messages before the first turn, and the generation prompt
    turn(message)         an assistant's message as it would have been sampled, with its end token
    between(messages)     from the end token of a turn to the next generation prompt

``between`` renders all messages of one step together, after a synthetic user and assistant message,
and keeps the text after that assistant's end token. It therefore does not depend on earlier turns.

Special tokens in the contents of messages are plain text: only the template, and the end of a turn,
write control tokens.

Tools are written by the model's chat template if it writes tools and their calls in a format of
``burnish.calls``. Otherwise the first message lists the tools and explains the format, calls
are part of an assistant's text, and results are messages of the user.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any

import numpy as np

from burnish.calls import CALL_FORMATS, CallFormatName, ToolCall, calls_of, read_calls
from burnish.errors import ModelError
from burnish.model.tokenizer import Tokenizer
from burnish.types import IntArray

Message = Mapping[str, Any]
USER = {"role": "user", "content": "burnish-question"}
ANSWER = {"role": "assistant", "content": "burnish-answer"}
"""Synthetic messages. Their contents are found again in the text of a chat template."""
THOUGHT = {**ANSWER, "content": f"<think>\nburnish-thought\n</think>\n\n{ANSWER['content']}"}
PROBE = ToolCall("burnish_tool", {"burnish_argument": 1})
"""Synthetic call, which tells the format in which a template writes calls."""
PROBE_SCHEMA = {
    "type": "function",
    "function": {
        "name": PROBE.name,
        "description": "burnish",
        "parameters": {"type": "object", "properties": {}},
    },
}


class ConversationFormat:
    """Encodes the parts of conversations as a model's chat template writes them.

    A model without a chat template gets a plain format: each message is its content and a line
    break, and the end token takes the place of an assistant's line break.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        calls: CallFormatName | None = None,
        now: datetime,
    ) -> None:
        """``tools`` are JSON schemas of the functions that the assistant may call, in the format
        ``calls``; None for the format of the model's template, or else that of
        `default_call_format`. ``now`` is the date that a template may insert.

        Raise a ModelError if the tokenizer has no end token.
        """
        if not tokenizer.end_ids:
            raise ModelError("the model's tokenizer names no end token, so no turn could end")
        self._tokenizer, self._now = tokenizer, now
        self._tools: Sequence[Mapping[str, Any]] = ()
        """Tools that the template writes."""
        self._calls: CallFormatName | None = None
        """Format of calls that the template does not write; None if it writes them."""
        self._listing = ""
        """Text that lists the tools which the template does not write."""
        self._ends = {tokenizer.decode([token]): token for token in tokenizer.end_ids}
        self.end_id = tokenizer.end_ids[0]
        """The token that ends a turn: the end token that the template writes after an answer, or
        the model's first one if it writes none."""
        self.inserted_end = np.array([self.end_id], np.int32)
        """The end token as an array, to insert after a turn that the policy did not end with it;
        empty if the chat template writes none."""
        if tools:
            is_own = calls is None or _written_calls(tokenizer, now) == calls
            if is_own and _writes_tools(tokenizer, now):
                self._tools = tools
            else:
                self._calls = calls or default_call_format(tokenizer, now=now)
                self._listing = CALL_FORMATS[self._calls].explain(tools)
        if tokenizer.chat_template is None:
            return
        self._head = self._write([USER])
        text = self._write([USER, ANSWER], generate=False)
        after = text[self._answered(text) :].lstrip()
        self._end = next((end for end in self._ends if after.startswith(end)), "")
        self.end_id = self._ends.get(self._end, self.end_id)
        self.inserted_end = np.array([self.end_id] if self._end else [], np.int32)

    def open(self, messages: Sequence[Message]) -> IntArray:
        """Return the token ids of the messages before the first turn, with the generation prompt.
        They may include turns that were not sampled here, with calls of tools and their results."""
        messages = self._with_listing(self._with_calls(messages))
        if self._tokenizer.chat_template is None:
            return self._tokenizer.encode(self._plain(messages))
        return self._encode(self._write(messages))

    def turn(self, message: Message) -> IntArray:
        """Return the token ids of an assistant's message, as the model would have sampled them
        after the generation prompt, with the end token."""
        if self._calls is not None:
            message = _written(message, self._calls)
        if self._tokenizer.chat_template is None:
            return self._ended(self._encode(self._tokenizer.mask(message["content"])))
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
        messages = self._with_results(messages, self._calls)
        if self._tokenizer.chat_template is None:
            return self._encode(self._plain(messages))
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
        before = list(self._with_results(self._with_listing(before), self._calls))
        messages, following = [*before, turn], self._with_results(following, self._calls)
        context, whole = self._write(before), self._write([*messages, *following])
        spoken = self._tokenizer.mask(turn.get("content") or "")
        if whole.startswith(f"{context}{spoken}{self._end}"):
            return True
        written = self._write(messages, generate=False).rstrip()
        return written.startswith(context) and whole.startswith(written)

    def _rewrites(self, message: Message) -> bool:
        for answer in (ANSWER, THOUGHT):
            further = [answer, *self._with_results([message], self._calls)]
            messages = [*self._with_listing([USER]), *further, *further]
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

    def _with_listing(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Add the list of tools to the system message, or to the first message if the template
        writes no system message."""
        if not self._listing:
            return messages
        first, rest = messages[0], messages[1:]
        joined = {**first, "content": f"{self._listing}\n\n{first['content']}"}
        if first["role"] == "system":
            return [{**first, "content": f"{first['content']}\n\n{self._listing}"}, *rest]
        system = {"role": "system", "content": self._listing}
        if self._tokenizer.chat_template is None:
            return [system, *messages]
        try:
            listing = self._tokenizer.mask(self._listing)
            is_written = listing in self._write([system, *messages])
        except ModelError:
            is_written = False
        return [system, *messages] if is_written else [joined, *rest]

    def _with_calls(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Write calls of tools and their results as texts, unless the template writes them."""
        calls = self._calls
        if not self._tools and any({"tool_calls", "tool_call_id"} & {*m} for m in messages):
            calls = calls or _format_beside(self._tokenizer, self._now)
        if calls is not None:
            messages = [_written(message, calls) for message in messages]
        return self._with_results(messages, calls)

    def _with_results(
        self, messages: Sequence[Message], calls: CallFormatName | None
    ) -> Sequence[Message]:
        """Write successive results of tools into one message of the user, for a template that does
        not write tools. ``calls``: format of the calls; None if the template writes them."""
        if calls is None or self._tokenizer.chat_template is None:
            return messages
        result, written = CALL_FORMATS[calls].result, list[Message]()
        for is_tool, run in groupby(messages, key=lambda message: message["role"] == "tool"):
            if is_tool:
                text = "\n".join(result.format(message["content"]) for message in run)
                written.append({"role": "user", "content": text})
            else:
                written += run
        return written

    def _answered(self, text: str) -> int:
        """Return the place after the synthetic answer in a rendered text. Messages after it may
        contain the same text."""
        place = text.find(ANSWER["content"])
        if place < 0:
            raise ModelError("the model's chat template leaves out the assistant's messages")
        return place + len(ANSWER["content"])

    def _write(self, messages: Sequence[Message], *, generate: bool = True) -> str:
        return self._tokenizer.chat(
            list(map(_parsed, messages)), now=self._now, tools=self._tools, generate=generate
        )

    def _plain(self, messages: Iterable[Message]) -> str:
        return self._tokenizer.mask("".join(f"{message['content']}\n" for message in messages))

    def _encode(self, text: str) -> IntArray:
        return self._tokenizer.encode(text, add_special=False)

    def _ended(self, ids: IntArray) -> IntArray:
        return np.append(ids, np.int32(self.end_id))


def default_call_format(tokenizer: Tokenizer, *, now: datetime) -> CallFormatName:
    """Return the format of the model's calls: the one that its chat template writes, hermes if the
    template writes no tools, and plain without a template.

    Raise a ModelError if the template writes calls in another format.
    """
    if tokenizer.chat_template is None:
        return "plain"
    if not _writes_tools(tokenizer, now):
        return "hermes"
    if found := _written_calls(tokenizer, now):
        return found
    raise ModelError(
        "the model's chat template writes tool calls in a format that burnish can't read; set "
        "task.tool_format = 'hermes': the first message then explains that format"
    )


def _format_beside(tokenizer: Tokenizer, now: datetime) -> CallFormatName | None:
    """Return the format of calls that the model's chat template does not write; None if it writes
    them."""
    if _writes_tools(tokenizer, now):
        return None
    return default_call_format(tokenizer, now=now)


def _written(message: Message, calls: CallFormatName) -> Message:
    """Return a message whose tool calls, if it has any, are a part of its text."""
    if not message.get("tool_calls"):
        return message
    written = CALL_FORMATS[calls].write(calls_of(_parsed(message)))
    parts = [part for part in (message.get("content"), written) if part]
    return {"role": message["role"], "content": "\n".join(parts)}


def _writes_tools(tokenizer: Tokenizer, now: datetime) -> bool:
    """Return whether the model's chat template writes a list of tools."""
    if tokenizer.chat_template is None:
        return False
    given = tokenizer.chat([USER], now=now, tools=[PROBE_SCHEMA])
    return given != tokenizer.chat([USER], now=now)


def _written_calls(tokenizer: Tokenizer, now: datetime) -> CallFormatName | None:
    """Return the format in which a chat template writes calls; None if it writes no tools, or if
    its format is unknown."""
    if not _writes_tools(tokenizer, now):
        return None
    tools, function = [PROBE_SCHEMA], {"name": PROBE.name, "arguments": dict(PROBE.arguments)}
    calls = [{"type": "function", "function": function}]
    call = {"role": "assistant", "content": "", "tool_calls": calls}
    try:
        head = tokenizer.chat([USER], now=now, tools=tools)
        text = tokenizer.chat([USER, call], now=now, tools=tools, generate=False)
    except ModelError:
        return None
    turn = text[len(head) :] if text.startswith(head) else ""
    for end in (tokenizer.decode([token]) for token in tokenizer.end_ids):
        turn = turn.partition(end)[0]
    names: list[CallFormatName] = ["hermes", "llama", "plain"]
    return next((name for name in names if read_calls(turn, name) == [PROBE]), None)


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
