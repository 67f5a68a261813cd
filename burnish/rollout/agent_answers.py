"""Requests of agents as the server passes them on, and their answers: rendered by the model's chat
template, and read back from sampled tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from burnish.calls import CallFormatName
from burnish.engine.endpoint.messages import assistant_message
from burnish.model.conversation import ConversationFormat, default_call_format
from burnish.model.tokenizer import Tokenizer
from burnish.rollout.histories import Draft, EpisodeRecord, History
from burnish.rollout.turns import turn_text
from burnish.types import Completion, Finish

SAMPLING = ("temperature", "top_p", "seed")
"""Sampling settings of a request that a recipe overrides."""
UNNAMED = ("call", "retry", "retry_key", "arrived")
"""Fields in which repeated requests differ."""
MOST_FORMATS = 100
"""Sets of tools whose format is kept."""


class AnsweredChoice(NamedTuple):
    """One choice of an answer."""

    raw: str
    """The sampled text, with a stop string."""
    message: Mapping[str, Any]
    """The assistant's message."""
    reply: Mapping[str, Any]
    """The choice as the server sends it."""
    prompt_tokens: int = 0
    """Number of tokens of the prompt; 0 for further choices of the same prompt."""
    completion_tokens: int = 0


class AgentAnswers:
    """Reads the requests of agents, and writes their answers."""

    def __init__(
        self, tokenizer: Tokenizer, call_format: CallFormatName | None, *, now: datetime
    ) -> None:
        """``call_format`` is the format of tool calls; None for the format of the model's chat
        template. ``now`` is the date that a template may insert."""
        self._tokenizer, self._call_format, self._now = tokenizer, call_format, now
        self._formats: dict[str, ConversationFormat] = {}
        self._read_format: CallFormatName | None = call_format

    def body_key(self, fields: Mapping[str, Any]) -> str:
        """Return a text that is equal for repeated requests."""
        named = {key: value for key, value in fields.items() if key not in UNNAMED}
        return json.dumps(named, sort_keys=True)

    def choices(self, fields: Mapping[str, Any]) -> int:
        """Return the number of choices that a request asks for."""
        prompts = len(fields["prompt"]) if fields["kind"] == "text" else 1
        return prompts * int(fields.get("n") or 1)

    def overridden(self, fields: Mapping[str, Any]) -> list[str]:
        """Return the sampling settings of a request that the recipe overrides."""
        return [name for name in SAMPLING if fields.get(name) is not None]

    def most_tokens(self, fields: Mapping[str, Any]) -> int | None:
        """Return the maximum length of a choice; None if the request has none."""
        most = fields.get("max_tokens")
        return None if most is None else int(most)

    def stops(self, own: tuple[str, ...], fields: Mapping[str, Any]) -> tuple[str, ...]:
        """Return the stop strings of an answer: the recipe's, and the request's."""
        return tuple(dict.fromkeys([*own, *(fields.get("stop") or ())]))

    def draft(self, record: EpisodeRecord, fields: Mapping[str, Any], choice: int) -> Draft:
        """Return the place of a choice in an episode's record. Raise a ModelError if the chat
        template rejects the messages, or writes tool calls in a format that can't be read."""
        trace = fields.get("trace")
        if fields["kind"] == "text":
            text = fields["prompt"][choice // int(fields.get("n") or 1)]
            return record.draft_text(self._tokenizer.encode(text), trace)
        self._calls(fields)  # before the answer is sampled
        tools = tuple(fields.get("tools") or ())
        history = History(tuple(fields["messages"]), tools, trace)
        return record.draft(history, self._format(tools))

    def _format(self, tools: Sequence[Mapping[str, Any]]) -> ConversationFormat:
        """Return the format of conversations with these tools."""
        key = json.dumps(tools, sort_keys=True)
        if key not in self._formats:
            if len(self._formats) >= MOST_FORMATS:
                self._formats.clear()
            self._formats[key] = ConversationFormat(
                self._tokenizer, tools, calls=self._call_format, now=self._now
            )
        return self._formats[key]

    def _calls(self, fields: Mapping[str, Any]) -> CallFormatName | None:
        """Return the format in which an answer's calls are read; None if it has none."""
        if not fields.get("tools") or fields.get("tool_choice") == "none":
            return None
        if self._read_format is None:
            self._read_format = default_call_format(self._tokenizer, now=self._now)
        return self._read_format

    def choice(
        self, draft: Draft, completion: Completion, fields: Mapping[str, Any], index: int
    ) -> AnsweredChoice:
        """Return a choice that was sampled at ``draft``."""
        ids, stop = completion.token_ids[draft.start :], completion.stop
        raw = turn_text(self._tokenizer, ids, stop)
        text = raw.removesuffix(stop) if isinstance(stop, str) else raw
        reply: dict[str, Any] = {"text": text}
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if fields["kind"] != "text":
            name = f"{draft.sequence.number}_{draft.start}"
            message = assistant_message(text, self._calls(fields), name)
            reply["message"] = message
        reason = "tool_calls" if "tool_calls" in message else "stop"
        reply["finish_reason"] = "length" if completion.finish is Finish.LENGTH else reason
        reply["logprobs"] = None
        if fields.get("logprobs"):
            tokens = (self._tokenizer.decode([token]) for token in ids.tolist())
            values = completion.logprobs[draft.start :].tolist()
            pairs = zip(tokens, values, strict=True)
            reply["logprobs"] = [{"token": token, "logprob": value} for token, value in pairs]
        is_first = index % int(fields.get("n") or 1) == 0
        return AnsweredChoice(raw, message, reply, draft.length if is_first else 0, len(ids))

    def no_choice(self) -> AnsweredChoice:
        """Return a choice without tokens, which no limit leaves room for."""
        message = {"role": "assistant", "content": ""}
        reply = {"text": "", "message": message, "finish_reason": "length", "logprobs": None}
        return AnsweredChoice("", message, reply)

    def reply(self, choices: Sequence[AnsweredChoice]) -> dict[str, Any]:
        """Return the answer to a request as the server expects it."""
        return {
            "choices": [choice.reply for choice in choices],
            "prompt_tokens": sum(choice.prompt_tokens for choice in choices),
            "completion_tokens": sum(choice.completion_tokens for choice in choices),
        }
