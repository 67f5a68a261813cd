"""Tool calls as text: how a model writes them, and how they are read back.

    format    a call                                                             several calls
    hermes    <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>      one after another
    llama     {"name": "add", "parameters": {"a": 1}}                            separated by ";"
    plain     call add {"a": 1}                                                  one per line

A message in the format llama has calls only if it begins with one. In the other formats, text may
surround the calls. Thoughts, up to </think>, contain no calls. This module imports only the
standard library, because the processes of environments import it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

CallFormatName = Literal["hermes", "llama", "plain"]
"""How a model writes calls of tools."""
LONGEST_QUOTE = 100
"""Characters of a malformed call that its error quotes."""
MOST_DIGITS = 1000
"""Longest integer in a call; Python itself refuses integers with more than 4300 digits."""
MOST_LEVELS = 100
"""Levels of nested objects and lists in a call. Templates, which recurse into the arguments, need
several of Python's stack frames for each."""
OPEN, CLOSE = "<tool_call>", "</tool_call>"
PYTHON_TAG = "<|python_tag|>"
WORD = "call "
"""Beginning of a call's line in the format plain."""
_LLAMA_BEGIN = re.compile(r'\{\s*("\w*)?')
_SURROGATE = re.compile("[\ud800-\udfff]")
_LLAMA_CALL = re.compile(r'\{\s*"(name|parameters|arguments|type|function)"')


class ToolCall(NamedTuple):
    """A call that a message contains; ``error`` says why it is malformed."""

    name: str
    arguments: Mapping[str, Any]
    error: str | None = None


class CallFormat(NamedTuple):
    """Functions for one format of calls."""

    read: Callable[[str], list[ToolCall]]
    """Return the calls in an assistant's message, in their order."""
    write: Callable[[Sequence[ToolCall]], str]
    """Return calls as the text of an assistant's message."""
    explain: Callable[[Sequence[Mapping[str, Any]]], str]
    """Return a system message that lists tools, given by their schemas, and explains the format."""
    result: str
    """Template of a tool's result in a user message, for models whose template writes no tools."""
    begin: Callable[[str, bool], int]
    """Return the place in a message without thoughts before which no character belongs to a call;
    with False, the message may continue."""


def read_calls(message: str, name: CallFormatName) -> list[ToolCall]:
    """Return the calls in an assistant's message, in their order. Malformed ones have an error."""
    said = message.rpartition("</think>")[2].partition("<think>")[0]
    return CALL_FORMATS[name].read(said)


def split_calls(message: str, name: CallFormatName) -> tuple[str, list[ToolCall]]:
    """Return the text before the calls in an assistant's message, and the calls. If one of the
    calls is malformed, the message has none: the whole message is text."""
    calls = read_calls(message, name)
    if not calls or any(call.error is not None for call in calls):
        return message, []
    return message[: text_before_calls(message, name, complete=True)], calls


def text_before_calls(message: str, name: CallFormatName, *, complete: bool) -> int:
    """Return the length of the text before the calls in an assistant's message, without white space
    at its end. If the message is not ``complete``, this text stays the same whatever follows."""
    begin = message.rfind("</think>") + len("</think>") if "</think>" in message else 0
    said, thought, _ = message[begin:].partition("<think>")
    place = CALL_FORMATS[name].begin(said, complete or bool(thought))
    if place == len(said):  # thoughts may follow
        return len(message if complete else message.rstrip())
    return len(message[: begin + place].rstrip())


def parse_json(text: str) -> Any:
    """Parse a JSON text as strictly as the arguments of a call. Raise a ValueError, which says what
    is wrong, if it is invalid, nests deeper than `MOST_LEVELS`, or has a lone surrogate or a number
    that is not finite."""
    value, error = _load(text)
    if error is not None:
        raise ValueError(error)
    return value


def calls_of(message: Mapping[str, Any]) -> list[ToolCall]:
    """Return the calls in the field "tool_calls" of a message, as chat templates expect it."""
    functions = [call.get("function", call) for call in message.get("tool_calls") or ()]
    return [ToolCall(each["name"], each.get("arguments") or {}) for each in functions]


def _read_hermes(text: str) -> list[ToolCall]:
    calls, place = [], text.find(OPEN)
    while place >= 0:
        begin = place + len(OPEN)
        call, end = _read_object(text, begin, ("arguments",))
        if call.error is None and not re.compile(rf"\s*{CLOSE}").match(text, end):
            call = _malformed(f"a call must end with {CLOSE} after its JSON object", text[begin:])
        if call.error is not None:
            end = text.find(CLOSE, begin)
            end = len(text) if end < 0 else end
        calls.append(call)
        place = text.find(OPEN, end)
    return calls


def _read_llama(text: str) -> list[ToolCall]:
    text = text.strip()
    is_tagged = text.startswith(PYTHON_TAG)
    text = text.removeprefix(PYTHON_TAG).lstrip()
    if not (is_tagged or _LLAMA_CALL.match(text)):
        return []
    calls, place = [], 0
    while place < len(text):
        call, place = _read_object(text, place, ("parameters", "arguments"))
        calls.append(call)
        rest = text[place:].lstrip("; \n\t")
        if call.error is None and rest and not rest.startswith("{"):
            calls.append(_malformed("only ';' and another call may follow a call", rest))
        if call.error is not None or not rest.startswith("{"):
            break
        place = len(text) - len(rest)
    return calls or [_malformed("a JSON object must follow the tag", text)]


def _read_plain(text: str) -> list[ToolCall]:
    lines = [line.strip() for line in text.split("\n")]
    return [_read_line(line) for line in lines if line.startswith(WORD) or line == WORD.strip()]


def _read_line(line: str) -> ToolCall:
    name, _, given = line[len(WORD) :].strip().partition(" ")
    if not name or name.startswith("{"):
        return _malformed('a call is written as: call NAME {"ARGUMENT": VALUE}', line)
    arguments, error = _load(given.strip() or "{}")
    if error is None and not isinstance(arguments, dict):
        error = "the arguments must be a JSON object"
    if error is not None:
        return _malformed(error, given)._replace(name=name)
    return ToolCall(name, arguments)


def _read_object(text: str, begin: int, keys: Sequence[str]) -> tuple[ToolCall, int]:
    """Read the JSON object of a call, whose arguments have one of the ``keys``; return the call and
    the place after the object."""
    while begin < len(text) and text[begin].isspace():
        begin += 1
    try:
        value, end = _DECODER.raw_decode(text, begin)
        _check(value)
    except (ValueError, RecursionError) as error:
        return _malformed(_said(error), text[begin:]), len(text)
    form = f'{{"name": NAME, "{keys[0]}": {{"ARGUMENT": VALUE}}}}'
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return _malformed(f"a call is written as {form}", text[begin:end]), end
    given = [value[key] for key in keys if key in value]
    if not given or not isinstance(given[0], dict):
        said = f'"{keys[0]}" must be a JSON object, as in {form}'
        return _malformed(said, text[begin:end])._replace(name=value["name"]), end
    return ToolCall(value["name"], given[0]), end


def _load(text: str) -> tuple[Any, str | None]:
    try:
        value = _DECODER.decode(text)
        _check(value)
    except (ValueError, RecursionError) as error:
        return None, _said(error)
    return value, None


def _check(value: Any, levels: int = MOST_LEVELS) -> None:
    """Raise a ValueError if a JSON value has more than this number of nested levels, or a text that
    can't be written as UTF-8."""
    if isinstance(value, str):
        if not value.isascii() and _SURROGATE.search(value):
            raise ValueError("a text contains half of a surrogate pair (\\ud800 to \\udfff)")
    elif isinstance(value, dict | list):
        if not levels:
            raise ValueError(f"it has more than {MOST_LEVELS} levels of objects and lists")
        for item in value:
            _check(item, levels - 1)
        if isinstance(value, dict):
            for item in value.values():
                _check(item, levels - 1)


def _said(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "the JSON object is nested too deeply"
    if isinstance(error, json.JSONDecodeError):
        return f"the JSON object is invalid: {error.msg}"
    return f"the JSON object is invalid: {error}"


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _integer(digits: str) -> int:
    if len(digits) > MOST_DIGITS:
        raise ValueError(f"an integer has more than {MOST_DIGITS} digits")
    return int(digits)


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


_DECODER = json.JSONDecoder(parse_constant=_no_constant, parse_int=_integer, parse_float=_number)


def _malformed(error: str, text: str) -> ToolCall:
    quote = text.strip()
    quote = f"{quote[:LONGEST_QUOTE]}{'…' if len(quote) > LONGEST_QUOTE else ''}"
    return ToolCall("", {}, f"{error}; got: {quote or 'nothing'}")


def _begin_hermes(text: str, complete: bool) -> int:
    place = text.find(OPEN)
    if place >= 0:
        return place
    return len(text) if complete else len(text) - overlap(text, OPEN)


def _begin_llama(text: str, complete: bool) -> int:
    said = text.lstrip()
    is_call = said.startswith(PYTHON_TAG) or _LLAMA_CALL.match(said)
    if not is_call and not complete:
        is_call = PYTHON_TAG.startswith(said) or _LLAMA_BEGIN.fullmatch(said)
    return len(text) - len(said) if is_call else len(text)


def _begin_plain(text: str, complete: bool) -> int:
    place = 0
    for line in text.split("\n"):
        is_last = place + len(line) == len(text)
        may_become_one = is_last and not complete and WORD.startswith(line.lstrip())
        if line.strip().startswith(WORD) or may_become_one:
            return place
        place += len(line) + 1
    return len(text)


def overlap(text: str, sought: str) -> int:
    """Return the length of the longest end of a text with which a proper part of ``sought``
    begins."""
    longest = min(len(text), len(sought) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(sought[:n])), 0)


def _json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _write_hermes(calls: Sequence[ToolCall]) -> str:
    objects = [{"name": call.name, "arguments": call.arguments} for call in calls]
    return "\n".join(f"{OPEN}\n{_json(each)}\n{CLOSE}" for each in objects)


def _write_llama(calls: Sequence[ToolCall]) -> str:
    return "; ".join(_json({"name": call.name, "parameters": call.arguments}) for call in calls)


def _write_plain(calls: Sequence[ToolCall]) -> str:
    return "\n".join(f"{WORD}{call.name} {_json(call.arguments)}" for call in calls)


def _explain_hermes(tools: Sequence[Mapping[str, Any]]) -> str:
    """The words of Qwen's template, which many models have learned."""
    listed = "\n".join(map(_json, tools))
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        "You are provided with function signatures within <tools></tools> XML tags:\n"
        f"<tools>\n{listed}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        f"{OPEN}{CLOSE} XML tags:\n"
        f'{OPEN}\n{{"name": <function-name>, "arguments": <args-json-object>}}\n{CLOSE}'
    )


def _explain_llama(tools: Sequence[Mapping[str, Any]]) -> str:
    """The words of Llama 3's template."""
    listed = "\n\n".join(_json(tool, 4) for tool in tools)
    return (
        "Given the following functions, please respond with a JSON for a function call with its "
        "proper arguments that best answers the given prompt.\n\n"
        'Respond in the format {"name": function name, "parameters": dictionary of argument name '
        f"and its value}}. Do not use variables.\n\n{listed}"
    )


def _explain_plain(tools: Sequence[Mapping[str, Any]]) -> str:
    """Few words, because a model without a template may have a short context."""
    lines = ["To call a tool, write a line: call NAME {ARGUMENTS}"]
    for tool in tools:
        function = tool.get("function", tool)
        fields = function.get("parameters", {}).get("properties")
        fields = fields if isinstance(fields, Mapping) else {}
        shown = ", ".join(f'"{name}": {_kind(field)}' for name, field in fields.items())
        about = function.get("description", "").partition("\n")[0]
        lines.append(f"{function['name']} {{{shown}}} {about}".rstrip())
    return "\n".join(lines)


def _kind(field: Any) -> str:
    """Return the type of an argument by its JSON schema, which may have any form."""
    schema = field if isinstance(field, Mapping) else {}
    if isinstance(schema.get("enum"), list):
        return "|".join(map(_json, schema["enum"]))
    kind = schema.get("type")
    return "|".join(map(str, kind)) if isinstance(kind, list) else str(kind or "any")


CALL_FORMATS: Mapping[CallFormatName, CallFormat] = {
    "hermes": CallFormat(
        _read_hermes,
        _write_hermes,
        _explain_hermes,
        "<tool_response>\n{}\n</tool_response>",
        _begin_hermes,
    ),
    "llama": CallFormat(_read_llama, _write_llama, _explain_llama, "{}", _begin_llama),
    "plain": CallFormat(_read_plain, _write_plain, _explain_plain, "{}", _begin_plain),
}
"""The formats by their names."""
