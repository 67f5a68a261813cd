"""The shape of a normalised answer: something with parts, an equation, words, or a choice."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from burnish.graders.answers.quantity import quantity
from burnish.graders.answers.spelling import BRACKETS, COMMA, closes, cut, normalise

_UNION = re.compile(rf"{BRACKETS}|∪")
_OR = re.compile(rf"{BRACKETS}|,? or ")
_EQUALS = re.compile(rf"{BRACKETS}|=")
_ORDER = re.compile(rf"{BRACKETS}|[<>≤≥]")
_NAME = re.compile(
    r"(?:[A-Za-z]|[A-Z]{2,3}|[A-Za-z]{4,}(?: [A-Za-z]+)*|m? ?\\angle ?[A-Z]+|\\[a-z]+)"
    r"(?:_(?:\w|\{\\?\w+\}))?(?:'+|\^\{-1\})?(?:\([A-Za-z0-9]\))?|\([A-Za-z](?:, ?[A-Za-z])+\)"
    r"|\|[A-Za-z]+\||\[[A-Z]+\]|\\vec ?\{[a-z]\}"
)
_SUM = re.compile(r"[a-z](?: ?\+ ?[a-z])+")
_MATRIX = re.compile(
    r"[\[(]? ?\\begin\{(?:[pbB]?matrix|array\}(?:\{[lcr| ]*)?)\}(?P<body>.*)\\end\{\w+\} ?[\])]?",
    re.DOTALL,
)
_CHOICE = re.compile(r"(?:(?:option|choice) )?\(?([A-J])[).:]*", re.IGNORECASE)
_CHOICE_AND_VALUE = re.compile(r"\(?([A-J])[).:]+ (.*)")
_WORDS = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_][\w ,.:;]*")
_LOOSE_END = re.compile(
    r"[{}�]|\\(?:frac|binom)(?! ?◻◻)|\\sqrt(?! ?(?:\[[^\]]*\])?◻)|[\^_](?![\w◻\\∞π*+'-])"
    r"|^ ?[·/^_=≤≥<>,;)]|[-+·/^_=≤≥<>±,;(] ?$|/ ?0+(?![.0-9])|[-+·/=(] ?[·/=]"
)


class Parts(NamedTuple):
    kind: str
    """Brackets; "list"; "or"; for a matrix, the lengths of its rows."""
    items: tuple[str, ...]
    name: str = ""
    """The variable of an inequality, or the variables of several if they differ."""


def parts(text: str) -> Parts | None:
    """The parts of a list, set, tuple, interval, union, matrix or inequality; None otherwise."""
    matrix = _MATRIX.fullmatch(text)
    if matrix and "\\begin" not in matrix["body"]:
        body = matrix["body"].strip().removesuffix(r"\\")
        rows = [row.split("&") for row in body.split(r"\\")]
        kind = "×".join(str(len(row)) for row in rows)
        return Parts(kind, tuple(normalise(cell) for row in rows for cell in row))
    for separators in (_OR, COMMA):
        pieces = cut(text, separators)
        if len(pieces) > 1:
            return _several(pieces, either=separators is _OR)
    if len(pieces := cut(text, _UNION)) > 1:
        return Parts("or", tuple(pieces))
    if text.count("±") == 1 and text[0] != "⦃":
        return Parts("list", _both_signs(text))
    if closes(text) and text[0] != "{" and "|" not in text:
        items = tuple(sign for item in cut(text[1:-1], COMMA) for sign in _both_signs(item))
        kind = "()" if len(items) != 2 and text[0] != "⦃" else text[0] + text[-1]
        if text[0] == "⦃":
            return Parts("list", items)
        return Parts(kind, items) if len(items) > 1 else None
    return _inequality(text)


def _several(pieces: list[str], *, either: bool) -> Parts:
    """A list of values; x = 1, y = 2 as a tuple; statements of which one or all hold."""
    names = [found[0] for piece in pieces if (found := equation(piece))]
    variables = {order.name for piece in pieces if (order := _inequality(piece))}
    several = len(set(names)) > 1 and len(names) == len(pieces)
    if either and (several or variables or all(words(piece) is not None for piece in pieces)):
        return Parts("or", tuple(pieces), ",".join(sorted(variables)) if len(variables) > 1 else "")
    if several:
        return Parts("()", tuple(sorted(pieces) if len(set(names)) == len(names) else pieces))
    return Parts("list", tuple(sign for piece in pieces for sign in _both_signs(piece)))


def _both_signs(text: str) -> tuple[str, ...]:
    if text.count("±") != 1:
        return (text,)
    return text.replace("±", "+").removeprefix("+"), text.replace("±", "-")


def _inequality(text: str) -> Parts | None:
    """a < x ≤ b, x > a and the like as the interval of x."""
    pieces, signs = cut(text, _ORDER), "".join(re.findall("[<>≤≥]", text))
    if len(pieces) != len(signs) + 1 or len(pieces) not in (2, 3):
        return None
    if signs[0] in ">≥":
        pieces, signs = pieces[::-1], signs[::-1].translate(str.maketrans(">≥", "<≤"))
    if len(pieces) == 2:
        named = _NAME.fullmatch(pieces[0])
        pieces, signs = (["-∞", *pieces], "<" + signs) if named else ([*pieces, "∞"], signs + "<")
    low, name, high = pieces
    if set(signs) - set("<≤") or not _NAME.fullmatch(name):
        return None
    return Parts("(["[signs[0] == "≤"] + ")]"[signs[1] == "≤"], (low, high), name)


def equation(text: str, *, sums: bool = False) -> tuple[str, list[str]] | None:
    """The name and the values of x = 2 + 3 = 5; 2 + 3 = 5 has no name; None for other text.

    sums: m + n counts as a name, for an answer that says again what the question asked for.
    """
    name, *values = cut(text, _EQUALS)
    letters = re.sub(r"\\[a-z]+(?:\{[a-z]{3,}\})?", "", " ".join(values))
    named = _NAME.fullmatch(name) or (sums and _SUM.fullmatch(name))
    if values and named and not (len(name) == 1 and name in letters):
        return name, values
    calculated = values and not re.search("[A-Za-z]", letters + re.sub(r"\\[a-z]+", "", name))
    return ("", [name, *values]) if calculated else None


@lru_cache(maxsize=4096)
def words(text: str) -> str | None:
    """The words of a text answer, case and article aside; None for anything else.

    Two letters that are no name stay as they are: a segment AB is not a product ab.
    """
    if not _WORDS.fullmatch(text):
        return None
    if len(text) == 2 and not (text.islower() or text.istitle()):
        return text
    return re.sub("^(?:the|an?) (?=.)", "", text.casefold())


def choice(text: str, *, gold: bool) -> str | None:
    """The letter of A, (A), "A." or, in a response, "(A) 5"; a gold letter is a capital."""
    found = _CHOICE.fullmatch(text)
    if found is None and not gold:
        found = _CHOICE_AND_VALUE.fullmatch(text)
        if found is not None and quantity(found[2]).value is None:
            return None
    return None if found is None or (gold and found[1].islower()) else found[1].upper()


def well_formed(text: str) -> bool:
    """Whether a normalised text has all its brackets and arguments and is no loose end."""
    if not re.search(r"[^\W_]|[∅∞π…]", text) or text.count(r"\begin") != text.count(r"\end"):
        return False
    if re.search(r"\}\{[-+]?0+\}", text):
        return False
    text = re.sub(r"\\(?:begin|end)\{\w+\}", "", text)
    for _ in range(32):
        text, changed = re.subn(r"\{([^{}]*)\}", lambda m: "◻" if _whole(m[1]) else "�", text)
        if not changed:
            break
    opened, closed = ([text.count(sign) for sign in signs] for signs in ("([⦃", ")]⦄"))
    return sum(opened) == sum(closed) and opened[2] == closed[2] and _whole(text)


def _whole(text: str) -> bool:
    """Whether no argument, operand or bracket is missing, and nothing is divided by zero."""
    return text.strip() != "" and not _LOOSE_END.search(text)
