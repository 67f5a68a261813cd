"""The shape of a normalised answer: something with parts, an equation, or words."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

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
_MATRIX = re.compile(
    r"[\[(]? ?\\begin\{(?:[pbB]?matrix|array\}(?:\{[lcr| ]*)?)\}(?P<body>.*)\\end\{\w+\} ?[\])]?",
    re.DOTALL,
)
_WORDS = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_][\w ,.:;]*")
_LOOSE_END = re.compile(
    r"\{ ?\}|\\(?:frac|binom) ?(?!\{)|\\(?:frac|binom) ?\{[^{}]*\}(?!\{)|\\sqrt ?(?![\[{])"
    r"|[\^_](?! ?[\w{\\∞π*+'-])|^ ?[·/^_=≤≥<>,;)]|[-+·/^_=≤≥<>±,;(] ?$"
    r"|/ ?0+(?![.0-9])|\}\{[-+]?0+\}|[-+·/=(] ?[·/=*]"
)


class Parts(NamedTuple):
    kind: str
    """Brackets; "list"; "or", with all variables but one; for a matrix, its rows' lengths."""
    items: tuple[str, ...]
    name: str = ""
    """The variable of an inequality."""


def parts(text: str) -> Parts | None:
    """The parts of a list, set, tuple, interval, union, matrix or inequality; None otherwise."""
    matrix = _MATRIX.fullmatch(text)
    if matrix and "\\begin" not in matrix["body"]:
        body = matrix["body"].strip().removesuffix(r"\\")
        rows = [row.split("&") for row in body.split(r"\\")]
        kind = "×".join(str(len(row)) for row in rows)
        return Parts(kind, tuple(normalise(cell) for row in rows for cell in row))
    if text.count("±") == 1:
        return Parts("list", (text.replace("±", "+"), text.replace("±", "-")))
    for separators in (_OR, COMMA):
        pieces = cut(text, separators)
        if len(pieces) > 1:
            return _several(pieces, either=separators is _OR)
    if len(pieces := cut(text, _UNION)) > 1:
        return Parts("or", tuple(pieces))
    if not closes(text) or text[0] == "{" or "|" in text:
        return _inequality(text)
    items = tuple(cut(text[1:-1], COMMA))
    if text[0] == "⦃":
        return Parts("list", items)
    kind = text[0] + text[-1] if len(items) == 2 else "()"
    return Parts(kind, items) if len(items) > 1 else None


def _several(pieces: list[str], *, either: bool) -> Parts:
    """Pieces may be values, x = 1 and y = 2, or statements of which one holds ("or") or all."""
    names = {found[0] for piece in pieces if (found := equation(piece)) and found[0]}
    variables = {order.name for piece in pieces if (order := _inequality(piece))}
    several = len(names) > 1
    if either and (several or variables or all(words(piece) is not None for piece in pieces)):
        return Parts("or" + ",".join(sorted(variables)[1:]), tuple(pieces))
    if several:
        return Parts("()", tuple(sorted(pieces) if len(names) == len(pieces) else pieces))
    return Parts("list", tuple(pieces))


def _inequality(text: str) -> Parts | None:
    """The interval of x in a < x ≤ b, x > a and the like; None for other text."""
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


def equation(text: str) -> tuple[str, list[str]] | None:
    """The name and the values of x = 2 + 3 = 5; 2 + 3 = 5 and 5 have no name.

    None for an equation between expressions with variables.
    """
    name, *values = cut(text, _EQUALS)
    if not values:
        return "", [text]
    letters = re.sub(r"\\[a-z]+(?:\{[a-z]{3,}\})?", "", " ".join(values))
    if _NAME.fullmatch(name) and not (len(name) == 1 and name in letters):
        return name, values
    calculated = not re.search("[A-Za-z]", letters + re.sub(r"\\[a-z]+", "", name))
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


def well_formed(text: str) -> bool:
    """Whether a normalised text closes its brackets, has its operands, and divides by no zero."""
    if not re.search(r"[^\W_]|[∅∞π…]", text) or _LOOSE_END.search(text):
        return False
    pairs = (("{", "}"), ("⦃", "⦄"), (r"\begin", r"\end"))
    opened, closed = (sum(map(text.count, brackets)) for brackets in ("([", ")]"))
    return opened == closed and all(text.count(left) == text.count(right) for left, right in pairs)
