"""A function's type hints and docstring become a JSON schema, against which calls are checked."""

import enum
import json
from typing import Annotated, Any, Literal, Optional

import pytest

from burnish.environments.schema import check_arguments, read_docstring, tool_schema
from burnish.errors import DataError


class Unit(enum.Enum):
    KELVIN = "kelvin"
    CELSIUS = "celsius"


def weather(
    city: str,
    days: int = 1,
    unit: Unit = Unit.CELSIUS,
    exact: bool = False,
    share: float = 0.5,
    tags: list[Literal["a", "b"]] | None = None,
    limits: dict[str, float] | None = None,
    note: Optional[str] = None,  # noqa: UP045
    extra: Any = None,
    either: int | list[int] = 0,
):
    """Return the weather.

    It is a forecast.

    Args:
        city: name of the city,
            in English
        days (int): number of days: at most 7
        unit: scale

    Returns:
        A text: of words.
    """


def test_a_schema():
    function = tool_schema(weather, "tools.py")["function"]
    assert function["name"] == "weather"
    assert function["description"] == "Return the weather.\n\nIt is a forecast."
    assert function["parameters"]["required"] == ["city"]
    assert function["parameters"]["properties"] == {
        "city": {"type": "string", "description": "name of the city, in English"},
        "days": {"type": "integer", "description": "number of days: at most 7", "default": 1},
        "unit": {
            "type": "string",
            "enum": ["kelvin", "celsius"],
            "description": "scale",
            "default": "celsius",
        },
        "exact": {"type": "boolean", "default": False},
        "share": {"type": "number", "default": 0.5},
        "tags": {
            "anyOf": [
                {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
                {"type": "null"},
            ]
        },
        "limits": {
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": "number"}},
                {"type": "null"},
            ]
        },
        "note": {"type": ["string", "null"]},
        "extra": {},
        "either": {
            "anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}],
            "default": 0,
        },
    }
    json.dumps(function)


GOOGLE = """Add.

    Args:
        a: the first
        b (int, optional): the second: it
            goes on

    Returns:
        c: the sum
    """
NUMPY = """Add.

    Parameters
    ----------
    a : int
        the first
    b
        the second: it
        goes on

    Returns
    -------
    c : int
        the sum
    """
SPHINX = """Add.

    :param a: the first
    :param int b: the second: it
        goes on
    :return: the sum
    :rtype: int
    """


@pytest.mark.parametrize("text", [GOOGLE, NUMPY, SPHINX], ids=["google", "numpy", "sphinx"])
def test_docstrings(text):
    parsed = read_docstring(text)
    assert parsed.summary == "Add."
    assert parsed.parameters == {"a": "the first", "b": "the second: it goes on"}


def test_docstrings_without_parameters():
    for text in ("Say: hello.", "Add.\n\nNote that a: b.\n", "Return the arguments."):
        assert read_docstring(text) == (text.strip(), {})
    joint = "Add.\n\nParameters\n----------\na, b : int\n    both\n"
    assert read_docstring(joint).parameters == {"a": "both", "b": "both"}


def test_descriptions_may_be_annotations():
    def add(a: Annotated[int, "the first"], b: Annotated[int, "other"] = 2):
        """Add.

        Args:
            b: the second
        """

    fields = tool_schema(add, "f")["function"]["parameters"]["properties"]
    assert [fields[name]["description"] for name in "ab"] == ["the first", "the second"]


def undocumented(a: int): ...


def untyped(a):
    """Do."""


def starred(*a: int):
    """Do."""


def keywords(**a: int):
    """Do."""


def positional(a: int, /):
    """Do."""


def pair(a: tuple[int, int]):
    """Do."""


def custom(a: Unit | object | bytes):
    """Do."""


def keys(a: dict[int, str]):
    """Do."""


def unread(a: "Nowhere"):  # noqa: F821
    """Do."""


def misnamed(a: int):
    """Do.

    Args:
        b: what
    """


def infinite(a: float = float("inf")):
    """Do."""


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (undocumented, "the function undocumented has no docstring; write one"),
        (untyped, "parameter a of untyped: has no type hint; write, for example, a: str"),
        (starred, r"parameter a of starred: a tool has no \* or \*\* parameter; list"),
        (keywords, r"parameter a of keywords: a tool has no \* or \*\* parameter; list"),
        (positional, "parameter a of positional: a call gives arguments by name; remove the /"),
        (pair, r"parameter a of pair: the type tuple\[int, int\] has no JSON schema; use list"),
        (custom, "parameter a of custom: the type bytes has no JSON schema; use str, int"),
        (keys, r"the type dict\[int, str\] has no JSON schema; use str, .* dict\[str, T\]"),
        (unread, "the type hints of unread can't be read: NameError: .*; import the names"),
        (misnamed, "describes the parameter b, which the function does not have; correct"),
        (infinite, "the default Infinity can't be written as JSON; use None"),
        (lambda a: a, "a tool needs a name of letters, digits and _, got '<lambda>'"),
    ],
)
def test_what_a_schema_cannot_express(function, said):
    with pytest.raises(DataError, match=rf"^tools\.py: .*{said}"):
        tool_schema(function, "tools.py")


def checked(**given):
    schema = tool_schema(weather, "")["function"]["parameters"]
    return check_arguments(weather, schema, given)


def test_arguments_that_are_of_the_schema():
    given = {"city": "Ulm", "days": 3, "exact": True, "share": 1, "tags": ["a"], "note": None}
    assert checked(**given) == given
    assert checked(city="Ulm", unit="kelvin") == {"city": "Ulm", "unit": Unit.KELVIN}
    days = checked(city="Ulm", days=3.0, either=[1.0, 2], limits={"x": 2})
    assert days == {"city": "Ulm", "days": 3, "either": [1, 2], "limits": {"x": 2}}
    assert [type(value) for value in (days["days"], *days["either"])] == [int, int, int]
    assert checked(city="Ulm", extra={"any": [None]})["extra"] == {"any": [None]}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "the argument city is missing"),
        ({"city": "Ulm", "where": 1}, 'unknown argument "where"; it takes city, days, unit'),
        ({"city": 3}, "argument city must be of type string, got 3"),
        ({"city": None}, "argument city must be of type string, got null"),
        ({"city": "Ulm", "days": "3"}, 'argument days must be of type integer, got "3"'),
        ({"city": "Ulm", "days": 2.5}, "argument days must be of type integer, got 2.5"),
        ({"city": "Ulm", "days": True}, "argument days must be of type integer, got true"),
        ({"city": "Ulm", "exact": 1}, "argument exact must be of type boolean, got 1"),
        ({"city": "Ulm", "unit": "F"}, 'unit must be one of "kelvin", "celsius", got "F"'),
        ({"city": "Ulm", "note": 3}, "argument note must be of type string or null, got 3"),
        ({"city": "Ulm", "tags": ["c"]}, "argument tags must be of type array or of type null"),
        ({"city": "Ulm", "limits": {"x": "y"}}, "limits must be of type object or of type null"),
        ({"city": ["x" * 1000]}, 'got \\["x{70,78}…$'),
    ],
)
def test_arguments_that_are_not(given, said):
    with pytest.raises(ValueError, match=said):
        checked(**given)


def test_elements_are_named():
    def total(values: list[int], names: dict[str, int]):
        """Add."""

    schema = tool_schema(total, "")["function"]["parameters"]
    with pytest.raises(
        ValueError, match=r"argument values\[1\] must be of type integer, got \"x\""
    ):
        check_arguments(total, schema, {"values": [1, "x"], "names": {}})
    with pytest.raises(ValueError, match=r'argument names\["k"\] must be of type integer'):
        check_arguments(total, schema, {"values": [], "names": {"k": None}})
