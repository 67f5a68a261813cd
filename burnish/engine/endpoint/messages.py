"""Messages and tools of the chat API, and the assistant's message for a sampled text.

This module imports no torch, because the process of a server imports it.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from burnish.calls import CallFormatName, parse_json, split_calls
from burnish.recipe.base import Section

UNUSED: dict[str, Any] = {"refusal": None, "audio": None, "function_call": None, "annotations": []}
"""Fields of an assistant's message that clients send back without content."""
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class CalledFunction(Section):
    """The function of a call, and its arguments as a JSON text."""

    name: str
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _check_object(cls, given: str) -> str:
        try:
            wrong = "" if isinstance(parse_json(given), dict) else "it is another value"
        except ValueError as error:
            wrong = str(error)
        if wrong:
            rule = "must be the text of a JSON object ({wrong})"
            raise PydanticCustomError("arguments", rule, {"wrong": wrong})
        return given


class MessageCall(Section):
    """A call in an assistant's message."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolFunction(Section):
    """What the model learns about a function."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments; None for a function without arguments."""
    strict: Literal[False] | None = None
    """Only false or null, because the model writes arguments without constraints."""


class ToolSchema(Section):
    """A tool that the model may call."""

    type: Literal["function"]
    function: ToolFunction


class Message(Section):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    """None only beside tool calls."""
    name: str | None = None
    """Passed to the chat template, as is ``reasoning_content``."""
    reasoning_content: str | None = None
    tool_calls: list[MessageCall] | None = Field(None, min_length=1)
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_unused(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        unused = {name for name, empty in UNUSED.items() if given.get(name) in (None, empty)}
        table = {name: value for name, value in given.items() if name not in unused}
        return table if table.get("tool_calls") != [] else table | {"tool_calls": None}

    @field_validator("content", mode="before")
    @classmethod
    def _join(cls, given: Any) -> Any:
        """Join a list of parts of type "text" to one text."""
        if not isinstance(given, list):
            return given
        texts = list[str]()
        for part in given:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind != "text" or set(part) != {"type", "text"} or type(part["text"]) is not str:
                raise PydanticCustomError(
                    "part",
                    'must be a text or parts {"type": "text", "text": …}; send only text',
                )
            texts.append(part["text"])
        return "".join(texts)

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        rules = {
            "the content is missing": self.content is not None or self.tool_calls is not None,
            "only the role 'assistant' has tool_calls": (
                self.role == "assistant" or self.tool_calls is None
            ),
            "the role 'tool', and no other, has a tool_call_id": (
                (self.role == "tool") == (self.tool_call_id is not None)
            ),
        }
        for rule, holds in rules.items():
            if not holds:
                raise PydanticCustomError("message", "is invalid: {rule}", {"rule": rule})
        return self


def assistant_message(text: str, call_format: CallFormatName | None, name: str) -> dict[str, Any]:
    """Return the message for a sampled text, without its stop string and end token.

    With ``call_format``, the calls in the text become "tool_calls", whose ids are ``call_NAME_0``,
    ``call_NAME_1`` and so on, and "content" is the text before the first call, or None if there is
    none. If one of the calls is malformed, or with ``call_format`` None, the whole text is the
    content.
    """
    content, calls = (text, []) if call_format is None else split_calls(text, call_format)
    if not calls:
        return {"role": "assistant", "content": text}
    written = [
        {
            "id": f"call_{name}_{number}",
            "type": "function",
            "function": {
                "name": call.name,
                "arguments": json.dumps(dict(call.arguments), ensure_ascii=False),
            },
        }
        for number, call in enumerate(calls)
    ]
    return {"role": "assistant", "content": content or None, "tool_calls": written}
