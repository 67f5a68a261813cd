"""Bodies of requests to the endpoint, with the field names of the OpenAI API.

A field that the engine does not implement exactly is rejected, because it would have no effect.
Fields that clients send by default are accepted with the value that has no effect.
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Self

from pydantic import AliasChoices, Field, ValidationError, field_validator, model_validator
from pydantic_core import PydanticCustomError

from burnish.engine.endpoint.messages import Message, ToolSchema
from burnish.recipe.base import Section, nearest
from burnish.types import SamplingParams

MOST_SAMPLES = 128
"""Maximum number of responses to one request."""
MAX_TOKENS = ("max_tokens", "max_completion_tokens")
"""Names of the field for the maximum number of tokens of a response."""
NEUTRAL: dict[str, Any] = {"presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {}}
"""Fields that only have the value without an effect, which clients send by default."""
CHAT_NEUTRAL: dict[str, Any] = {
    "top_logprobs": 0,
    "response_format": {"type": "text"},
    "parallel_tool_calls": True,
}
"""Further ones of /v1/chat/completions."""
Text = Annotated[str, Field(min_length=1, max_length=1000)]
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 80


class StreamOptions(Section):
    """What a stream has beside the text."""

    include_usage: bool = False
    """Whether a last chunk without choices has the number of tokens."""


class SamplingFields(Section):
    """The fields of all requests. A field that is null has its default value, and a field that is
    not listed is rejected."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL
    """Fields that only have one value, which has no effect."""

    model: str
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    max_tokens: int = Field(256, ge=1, validation_alias=AliasChoices(*MAX_TOKENS))
    n: int = Field(1, ge=1, le=MOST_SAMPLES)
    seed: int = Field(0, ge=0, lt=2**63)
    stop: list[Text] = Field([], max_length=16)
    stream: bool = False
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def _normalize(cls, given: Any) -> Any:
        """Remove fields that are null or have no effect, and expand a single text to a list."""
        if not isinstance(given, dict):
            return given
        known = {*cls.model_fields, *MAX_TOKENS, *cls.neutral, "user"}
        table = {k: v for k, v in given.items() if v is not None or k not in known}
        table.pop("user", None)
        for name in cls.neutral.keys() & table.keys():
            if table[name] != cls.neutral[name]:
                raise PydanticCustomError(
                    "neutral",
                    "{name} must be {neutral}: other values are not supported; leave the field out",
                    {"name": name, "neutral": json.dumps(cls.neutral[name])},
                )
            del table[name]
        texts = {k: [v] for k, v in table.items() if k in ("stop", "prompt") and type(v) is str}
        return table | texts

    @model_validator(mode="after")
    def _check_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options needs stream = true")
        return self

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

    @property
    def has_logprobs(self) -> bool:
        """Whether the response has the log-probabilities of its tokens."""
        given = getattr(self, "logprobs", None)
        return given is not None and given is not False  # 0 is the value of /v1/completions

    @property
    def has_usage(self) -> bool:
        """Whether the last chunk of a stream has the number of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(SamplingFields):
    """Body of a request to /v1/chat/completions."""

    neutral: ClassVar[Mapping[str, Any]] = NEUTRAL | CHAT_NEUTRAL

    messages: list[Message] = Field(min_length=1)
    tools: list[ToolSchema] = Field([], max_length=128)
    tool_choice: str = "auto"
    """"auto": the model may call tools; "none": calls in the response are text."""
    logprobs: bool = False

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _check_choice(cls, given: Any) -> Any:
        if given not in ("auto", "none"):
            raise PydanticCustomError(
                "tool_choice",
                'must be "auto" or "none"; other choices would need constrained sampling',
            )
        return given

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len({*names}) < len(names):
            raise PydanticCustomError("tools", "tools must have different names")
        known = set[str]()
        for index, message in enumerate(self.messages):
            known |= {call.id for call in message.tool_calls or ()}
            if message.tool_call_id is not None and message.tool_call_id not in known:
                raise PydanticCustomError(
                    "tool_call_id",
                    "messages.{index}.tool_call_id must be the id of a call in an earlier message",
                    {"index": index},
                )
        return self

    @property
    def canonical_messages(self) -> list[dict[str, Any]]:
        """The messages without absent fields; all contents are texts."""
        return [message.model_dump(exclude_none=True) for message in self.messages]

    @property
    def canonical_tools(self) -> list[dict[str, Any]]:
        """The schemas of the tools, without absent fields."""
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


class CompletionRequest(SamplingFields):
    """Body of a request to /v1/completions: one prompt, or several."""

    prompt: list[str] = Field(min_length=1, max_length=MOST_SAMPLES)
    """The texts to continue. A request may have a single text instead of a list."""
    logprobs: int | None = None
    """0: the response has the log-probabilities of its tokens."""

    @field_validator("logprobs")
    @classmethod
    def _check_logprobs(cls, given: int | None) -> int | None:
        if given:
            raise PydanticCustomError(
                "logprobs", "must be 0, which returns the sampled tokens without alternatives"
            )
        return given

    @model_validator(mode="after")
    def _check_count(self) -> Self:
        if len(self.prompt) * self.n > MOST_SAMPLES:
            raise PydanticCustomError(
                "count",
                "one request may have {most} responses, got {prompts} prompts with n = {n}; send "
                "several requests",
                {"most": MOST_SAMPLES, "prompts": len(self.prompt), "n": self.n},
            )
        return self


def explain_request_errors(error: ValidationError, fields: Sequence[str]) -> str:
    """Return an error message with one line per problem in ``error``, without duplicates.
    ``fields``: names of the request's fields, among which a similar one is suggested for an unknown
    field."""
    return "\n".join(dict.fromkeys(_explain(problem, fields) for problem in error.errors()))


def wrong_field(error: ValidationError) -> str | None:
    """Return the path of the first field that is wrong, such as messages.0.role; None if the body
    as a whole is."""
    problem = error.errors()[0]
    name = problem.get("ctx", {}).get("name") or problem["type"]
    path = ".".join(str(part) for part in problem["loc"])
    return path or (name if name in {*NEUTRAL, *CHAT_NEUTRAL, "stream_options", "tools"} else None)


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
        known = [*fields, *MAX_TOKENS[1:]] if where in (problem["loc"][-1],) else []
        listed = nearest(where, known) or (f"; the fields are {', '.join(known)}" if known else "")
        return f"unsupported field {where!r}{listed}"
    if problem["type"] == "neutral":  # the message names the field
        return f"{message}, got {_SHORT.repr(problem['input'][problem['ctx']['name']])}"
    if not where:  # the message names the field or fields
        return str(message)
    return f"{where} {message}, got {_SHORT.repr(problem['input'])}".strip()
