"""JSON schemas of tools: derived from a function's type hints and docstring, and used to check the
arguments of a call.

    type hint                     JSON schema
    str, int, float, bool, None   "string", "integer", "number", "boolean", "null"
    Literal[…], an Enum           "enum"
    list[T], dict[str, T]         "array", "object"
    T | None, T | U               a list of types, or "anyOf"
    Any, object                   any value

A description of a parameter is the docstring's (in the style of Google, numpy or ``:param``), or
the text in ``Annotated[T, "text"]``.
"""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

from burnish.errors import DataError

TYPES: dict[Any, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    type(None): "null",
    list: "array",
    dict: "object",
}
EXPRESSIBLE = (
    "str, int, float, bool, None, Any, Literal, an Enum of texts or numbers, list[T], "
    "dict[str, T], and unions of them"
)
LONGEST_SHOWN = 80
"""Characters of a wrong argument that an error quotes."""
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_SECTION = re.compile(r"(args|arguments|params|parameters|other parameters):?", re.I)
_OTHER_SECTION = re.compile(
    r"(returns?|yields?|raises|examples?|notes?|warnings?|see also|references|attributes|todo)"
    r"(:.*)?",
    re.I,
)
_GOOGLE = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_NUMPY = re.compile(r"(\w+(?:\s*,\s*\w+)*)(?:\s*:.*)?$")
_SPHINX = re.compile(r":param\s+(?:[^:]*\s)?(\w+)\s*:\s*(.*)")
_SPHINX_FIELD = re.compile(r":\w+[^:]*:")


class ParsedDocstring(NamedTuple):
    """The parts of a docstring that describe a tool."""

    summary: str
    """The text before the first section."""
    parameters: dict[str, str]
    """Descriptions of parameters, by their names."""


def tool_schema(function: Callable[..., Any], where: str) -> dict[str, Any]:
    """Return the JSON schema of a function, in the form that chat templates expect.

    Raise a DataError, which begins with ``where``, if the schema can't express a parameter, or if
    the function has no docstring.
    """
    name = getattr(function, "__name__", type(function).__name__)
    if not _NAME.fullmatch(name):
        raise DataError(f"{where}: a tool needs a name of letters, digits and _, got {name!r}")
    docstring = inspect.getdoc(function)
    if not docstring or not docstring.strip():
        raise DataError(
            f"{where}: the function {name} has no docstring; write one, because the model reads it"
        )
    about = read_docstring(docstring)
    try:
        parameters = inspect.signature(function).parameters
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as error:  # a hint may be any text, or the function written in C
        raise DataError(
            f"{where}: the type hints of {name} can't be read: {type(error).__name__}: {error}; "
            "import the names that they use at the top of the file"
        ) from None
    unknown = about.parameters.keys() - parameters.keys()
    if unknown:
        raise DataError(
            f"{where}: the docstring of {name} describes the parameter {min(unknown)}, which the "
            "function does not have; correct the name"
        )
    properties = {
        key: _property(parameter, hints, about, f"{where}: parameter {key} of {name}")
        for key, parameter in parameters.items()
    }
    required = [key for key, each in parameters.items() if each.default is inspect.Parameter.empty]
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about.summary,
            "parameters": {"type": "object", "properties": properties, "required": required},
        },
    }


def read_docstring(text: str) -> ParsedDocstring:
    """Split a docstring, without its indentation, into its summary and the descriptions of its
    parameters. Text that is in no known style belongs to the summary."""
    lines = inspect.cleandoc(text).split("\n")
    summary, found = list[str](), dict[str, list[str]]()
    section, is_numpy, names, depth = "summary", False, list[str](), 0
    for number, line in enumerate(lines):
        bare, indent = line.strip(), len(line) - len(line.lstrip())
        following = lines[number + 1].strip() if number + 1 < len(lines) else ""
        is_underlined = bool(bare) and set(following) == {"-"}
        if match := _SPHINX.fullmatch(bare):
            section, is_numpy, names = "sphinx", False, [match[1]]
            found[match[1]] = [match[2]]
        elif not indent and _SECTION.fullmatch(bare) and (is_underlined or bare.endswith(":")):
            section, is_numpy, names, depth = "parameters", is_underlined, [], 0
        elif (not indent and _OTHER_SECTION.fullmatch(bare) and (is_underlined or ":" in bare)) or (
            section != "summary" and _SPHINX_FIELD.match(bare)
        ):
            section, names = "other", []
        elif section == "summary":
            summary.append(line)
        elif section == "sphinx" and names:
            found[names[0]].append(bare)
        elif section == "parameters" and bare and set(bare) != {"-"}:
            depth = depth or indent
            match = (_NUMPY if is_numpy else _GOOGLE).fullmatch(bare)
            is_entry = indent == (0 if is_numpy else depth) and (is_numpy or depth > 0)
            if is_entry and match:
                names = re.split(r"\s*,\s*", match[1])
                for name in names:
                    found[name] = [] if is_numpy else [match[2]]
            elif not indent and not is_numpy:
                section = "other"  # text after the section, not indented
            else:
                for name in names:
                    found[name].append(bare)
    joined = {name: " ".join(filter(None, parts)) for name, parts in found.items()}
    return ParsedDocstring("\n".join(summary).strip(), joined)


def check_arguments(
    function: Callable[..., Any], schema: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call as its function takes them: enums become their members, and
    whole numbers integers. Raise a ValueError that says what is wrong."""
    fields, required = schema["properties"], schema["required"]
    unknown = [name for name in given if name not in fields]
    if unknown:
        known = ", ".join(fields) or "no arguments"
        raise ValueError(f"unknown argument {_quoted(unknown[0])}; it takes {known}")
    missing = [name for name in required if name not in given]
    if missing:
        raise ValueError(f"the argument {missing[0]} is missing")
    hints = typing.get_type_hints(function)
    return {
        name: _member(hints.get(name), _checked(value, fields[name], f"argument {name}"))
        for name, value in given.items()
    }


def _property(
    parameter: inspect.Parameter, hints: Mapping[str, Any], about: ParsedDocstring, where: str
) -> dict[str, Any]:
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
        raise DataError(f"{where}: a tool has no * or ** parameter; list the parameters")
    if parameter.kind is parameter.POSITIONAL_ONLY:
        raise DataError(f"{where}: a call gives arguments by name; remove the / after it")
    if parameter.name not in hints:
        raise DataError(f"{where}: has no type hint; write, for example, {parameter.name}: str")
    hint, described = hints[parameter.name], about.parameters.get(parameter.name, "")
    if typing.get_origin(hint) is typing.Annotated:
        texts = [extra for extra in hint.__metadata__ if isinstance(extra, str)]
        described = described or (texts[0] if texts else "")
    schema = _schema(hint, where)
    if described:
        schema["description"] = described
    default = parameter.default.value if isinstance(parameter.default, Enum) else parameter.default
    if default is not parameter.empty and default is not None:
        try:
            schema["default"] = json.loads(json.dumps(default, allow_nan=False))
        except (TypeError, ValueError):
            raise DataError(
                f"{where}: the default {_quoted(default)} can't be written as JSON; use None"
            ) from None
    return schema


def _schema(hint: Any, where: str) -> dict[str, Any]:
    """Return the schema of a type hint."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or hint is object:
        return {}
    if hint in TYPES:
        return {"type": TYPES[hint]}
    if origin is typing.Annotated:
        return _schema(inner[0], where)
    if origin is typing.Literal and all(type(each) in TYPES for each in inner):
        return _enum(list(inner))
    if inspect.isclass(hint) and issubclass(hint, Enum):
        values = [each.value for each in hint]
        if values and all(type(value) in (str, int, float, bool) for value in values):
            return _enum(values)
    if origin is list:
        return {"type": "array", "items": _schema(inner[0], where)}
    if origin is dict and inner[0] is str:
        return {"type": "object", "additionalProperties": _schema(inner[1], where)}
    if origin in (typing.Union, types.UnionType):
        several = [_schema(each, where) for each in inner]
        if all(each.keys() == {"type"} for each in several):
            return {"type": [each["type"] for each in several]}
        return {"anyOf": several}
    shown = getattr(hint, "__name__", None) if inspect.isclass(hint) else None
    remedy = {tuple: "use list[T]", set: "use list[T]", frozenset: "use list[T]"}
    told = remedy.get(origin or hint, f"use {EXPRESSIBLE}")
    raise DataError(f"{where}: the type {shown or hint} has no JSON schema; {told}")


def _enum(values: list[Any]) -> dict[str, Any]:
    kinds = list(dict.fromkeys(TYPES[type(value)] for value in values))
    return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": values}


def _checked(value: Any, schema: Mapping[str, Any], where: str) -> Any:
    """Return a value of the schema, with whole floats as integers; raise a ValueError if it is not
    of the schema."""
    if "anyOf" in schema:
        for each in schema["anyOf"]:
            try:
                return _checked(value, each, where)
            except ValueError:
                continue
        wanted = " or ".join(_wanted(each) for each in schema["anyOf"])
        raise ValueError(f"{where} must be {wanted}, got {_quoted(value)}")
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if "integer" in kinds and isinstance(value, float) and value.is_integer():
        value = value if "number" in kinds else int(value)
    if kinds and not any(_is_of(value, kind) for kind in kinds):
        raise ValueError(f"{where} must be {_wanted(schema)}, got {_quoted(value)}")
    if "enum" in schema and not any(
        type(value) is type(each) and value == each for each in schema["enum"]
    ):
        raise ValueError(f"{where} must be {_wanted(schema)}, got {_quoted(value)}")
    if isinstance(value, list) and "items" in schema:
        return [_checked(x, schema["items"], f"{where}[{i}]") for i, x in enumerate(value)]
    if isinstance(value, dict) and "additionalProperties" in schema:
        inner = schema["additionalProperties"]
        return {key: _checked(x, inner, f"{where}[{_quoted(key)}]") for key, x in value.items()}
    return value


def _is_of(value: Any, kind: str) -> bool:
    if kind == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    return any(named == kind and type(value) is known for known, named in TYPES.items())


def _wanted(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(
            json.dumps(each, ensure_ascii=False) for each in schema["enum"]
        )
    kinds = schema.get("type", "any value")
    return f"of type {kinds if isinstance(kinds, str) else ' or '.join(kinds)}"


def _member(hint: Any, value: Any) -> Any:
    """Return the values of an enum's type as its members, also in lists, dicts and unions."""
    inner = typing.get_args(hint)
    if inspect.isclass(hint) and issubclass(hint, Enum):
        return next((each for each in hint if each.value == value), value)
    if isinstance(value, list) and inner:
        return [_member(inner[0], each) for each in value]
    if isinstance(value, dict) and len(inner) == 2:
        return {key: _member(inner[1], each) for key, each in value.items()}
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        enums = [each for each in inner if inspect.isclass(each) and issubclass(each, Enum)]
        for each in enums:
            value = _member(each, value)
    return value


def _quoted(value: Any) -> str:
    """Return a value as JSON, for an error; its beginning if it is long."""
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return f"{text[:LONGEST_SHOWN]}{'…' if len(text) > LONGEST_SHOWN else ''}"
