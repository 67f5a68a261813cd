"""Bodies of requests to the endpoint, with the field names of the OpenAI API.

A field that the engine does not implement exactly is rejected, because it would have no effect.
Fields that clients send by default are accepted with the value that has no effect.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from burnish.recipe.base import Section, nearest
from burnish.types import SamplingParams

MOST_SAMPLES = 128
"""Maximum number of responses to one request."""
MAX_TOKENS = ("max_tokens", "max_completion_tokens")
"""Names of the field for the maximum number of tokens of a response."""
NEUTRAL: dict[str, Any] = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
"""Fields that only have the value without an effect, which clients send by default."""
IGNORED = ("user", *NEUTRAL)
"""Fields of OpenAI's API that are accepted and have no effect. The name of a user is one."""
Text = Annotated[str, Field(min_length=1, max_length=1000)]
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


class Message(Section):
    """One message of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str

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


class SamplingFields(Section):
    """The fields of all requests. A field that is null has its default value, and a field that is
    not listed is rejected."""

    model: str
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(256, ge=1, validation_alias=AliasChoices(*MAX_TOKENS))
    n: int = Field(1, ge=1, le=MOST_SAMPLES)
    seed: int = Field(0, ge=0, lt=2**63)
    stop: list[Text] = Field([], max_length=16)
    stream: Literal[False] = False

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, given: Any) -> Any:
        """Remove fields that are null or have no effect, and expand a single text to a list."""
        if not isinstance(given, dict):
            return given
        known = {*cls.model_fields, *MAX_TOKENS, *IGNORED}
        table = {k: v for k, v in given.items() if v is not None or k not in known}
        table.pop("user", None)
        for name in NEUTRAL.keys() & table.keys():
            if table[name] != NEUTRAL[name]:
                raise PydanticCustomError(
                    "neutral",
                    "{name} must be {neutral}: other values are not supported; leave the field out",
                    {"name": name, "neutral": json.dumps(NEUTRAL[name])},
                )
            del table[name]
        texts = {k: [v] for k, v in table.items() if k in ("stop", "prompt") and type(v) is str}
        return table | texts

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters of the request."""
        return SamplingParams(
            self.temperature,
            self.top_p,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop),
            seed=self.seed,
        )


class ChatRequest(SamplingFields):
    """Body of a request to /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)


class CompletionRequest(SamplingFields):
    """Body of a request to /v1/completions: one prompt, or several."""

    prompt: list[str] = Field(min_length=1, max_length=MOST_SAMPLES)
    """The texts to continue. A request may have a single text instead of a list."""


def explain_request_errors(error: ValidationError, fields: Sequence[str]) -> str:
    """Return an error message with one line per problem in ``error``, without duplicates.
    ``fields``: names of the request's fields, among which a similar one is suggested for an unknown
    field."""
    return "\n".join(dict.fromkeys(_explain(problem, fields) for problem in error.errors()))


def _explain(problem: Any, fields: Sequence[str]) -> str:
    where = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].replace("Input should", "must").replace("should", "must")
    if problem["type"] == "missing":
        return f"the field {where!r} is missing"
    if problem["type"] == "extra_forbidden":
        if where in MAX_TOKENS:
            return (
                f"unsupported field {where!r} beside {MAX_TOKENS[0]!r}; send one, as they are equal"
            )
        known = [*fields, *MAX_TOKENS[1:]]
        listed = nearest(where, known) or f"; the fields are {', '.join(known)}"
        return f"unsupported field {where!r}{listed}"
    if where == "stream":
        got = json.dumps(problem["input"])
        return f"stream must be false, got {got}: streaming is not supported yet; set it to false"
    if problem["type"] == "neutral":  # the message names the field
        return f"{message}, got {_SHORT.repr(problem['input'][problem['ctx']['name']])}"
    return f"{where} {message}, got {_SHORT.repr(problem['input'])}".strip()
