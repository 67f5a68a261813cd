"""Whether an answer is the gold answer, in stages: text, numbers, parts, and last of all algebra.

Equality is exact; ``quantity`` has the rules for numbers. Tuples, intervals and matrices are equal
part by part, sets and lists in any order, and x = 5 is 5. An inequality equals its own text alone.
Only algebra is costly and risky to compare, so the function for it is an argument: workers pass
``symbolic.compare_algebra``; the process that trains passes none, and learns that it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from enum import IntEnum
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

from burnish.graders.answers.latex import latex
from burnish.graders.answers.quantity import Quantity, quantity
from burnish.graders.answers.spelling import BRACKETS, COMMA, closes, cut, normalise, squeezed

LONGEST = 1_000
"""An answer with more characters is not read."""
MOST_PARTS, DEEPEST = 64, 8
_UNION = re.compile(rf"{BRACKETS}|∪")
_NAME = re.compile(
    r"(?:[A-Za-z]|[A-Z]{2,3}|[A-Za-z]{4,})(?:_\w)?'?(?:\([a-z0-9]\))?|\\[a-z]+"
    r"|\([a-z](?:, ?[a-z])+\)"
)
_MATRIX = re.compile(
    r"[\[(]? ?\\begin\{(?:[pbB]?matrix|array\}(?:\{[lcr| ]*)?)\}(?P<body>.*)\\end\{\w+\} ?[\])]?",
    re.DOTALL,
)
_WORDS = re.compile(r"(?=.*[^\W\d_]{2})[^\W\d_][\w ,.:;]*")


class Verdict(IntEnum):
    """Of several golds the smallest verdict counts, of several parts the largest."""

    EQUAL = 0
    UNDECIDED = 1
    """Algebra has to be compared, and no function for it was given or it took too long."""
    UNREADABLE = 2
    """The answer is missing or can't be parsed."""
    DIFFERENT = 3
    BAD_GOLD = 4
    """The gold answer can't be parsed."""


class Parts(NamedTuple):
    kind: str
    """The brackets; "list" for a set as well; ∪; for a matrix, the lengths of its rows."""
    items: tuple[str, ...]


Algebra = Callable[[str, str], Verdict]
"""Compares an answer with a gold answer, both from ``latex``."""


def undecided(answer: str, gold: str) -> Verdict:
    return Verdict.UNDECIDED


def decide(answer: str | None, golds: Iterable[str], algebra: Algebra = undecided) -> Verdict:
    """The verdict on an answer, if each of the golds is right."""
    return min(_decide(answer, gold, algebra) for gold in golds)


def _decide(answer: str | None, gold: str, algebra: Algebra) -> Verdict:
    if not readable(gold):
        return Verdict.BAD_GOLD
    if answer is None or len(answer) > LONGEST:
        return Verdict.UNREADABLE
    return _compare(normalise(answer), normalise(gold), algebra, DEEPEST)


@lru_cache(maxsize=8192)
def readable(gold: str) -> bool:
    """Whether a gold answer says something and closes its brackets."""
    text = normalise(gold) if len(gold) <= LONGEST else ""
    says_something = re.search(r"[^\W_]|[∅∞π…]", text) is not None
    return says_something and all(
        sum(map(text.count, opening)) == sum(map(text.count, closing))
        for opening, closing in (("([", ")]"), ("{", "}"), ("⦃", "⦄"))
    )


def _compare(answer: str, gold: str, algebra: Algebra, deep: int) -> Verdict:
    if squeezed(answer) == squeezed(gold):
        return Verdict.EQUAL
    ours, theirs = quantity(answer), quantity(gold)
    if ours.value is not None and theirs.value is not None:
        return _verdict(ours.value == theirs.value and ours.same_unit(theirs))
    if deep == 0:
        return Verdict.UNREADABLE
    said, meant = assigned(answer), assigned(gold)
    if "=" in answer + gold and said and meant:
        alike = not said[0] or not meant[0] or said[0] == meant[0]
        return _compare(said[1], meant[1], algebra, deep - 1) if alike else Verdict.DIFFERENT
    left, right = parts(answer), parts(gold)
    if left is None or right is None:
        return Verdict.DIFFERENT if left or right else _compare_leaf(ours, theirs, algebra)
    return _compare_parts(left, right, algebra, deep - 1)


def _compare_parts(answer: Parts, gold: Parts, algebra: Algebra, deep: int) -> Verdict:
    ours, theirs = list(answer.items), list(gold.items)
    if answer.kind != gold.kind or not len(ours) == len(theirs) <= MOST_PARTS:
        return Verdict.DIFFERENT
    if gold.kind in ("list", "∪") and "…" not in theirs:
        ours, theirs = sorted(ours, key=_place), sorted(theirs, key=_place)
    return max(_compare(*pair, algebra, deep) for pair in zip(ours, theirs, strict=True))


def _place(item: str) -> tuple[Fraction, str]:
    """Where a set or list has the item: numbers by their value, other items by their text."""
    return quantity(item).value or Fraction(0), squeezed(item)


def _compare_leaf(answer: Quantity, gold: Quantity, algebra: Algebra) -> Verdict:
    """Text against text, algebra against algebra; anything else is opaque, and its text differs.

    Up to three letters may also be a product of variables.
    """
    said, expected = words(answer.core), words(gold.core)
    if said is not None and expected is not None:
        return _verdict(said == expected)
    if any(text and len(text) > 3 for text in (said, expected)) or not answer.same_unit(gold):
        return Verdict.DIFFERENT
    candidate, target = latex(answer.core), latex(gold.core)
    if target is None:
        return Verdict.DIFFERENT
    if candidate is None:
        return Verdict.UNREADABLE
    return Verdict.EQUAL if candidate == target else algebra(candidate, target)


def parts(text: str) -> Parts | None:
    """The parts of a list, set, tuple, interval, union or matrix; None for other text."""
    matrix = _MATRIX.fullmatch(text)
    if matrix and "\\begin" not in matrix["body"]:
        body = matrix["body"].strip().removesuffix(r"\\")
        rows = [row.split("&") for row in body.split(r"\\")]
        kind = "×".join(str(len(row)) for row in rows)
        return Parts(kind, tuple(normalise(cell) for row in rows for cell in row))
    if text.count("±") == 1:
        return Parts("list", (text.replace("±", "+"), text.replace("±", "-")))
    if len(pieces := cut(text, COMMA)) > 1:
        names = [piece.partition("=")[0].strip() for piece in pieces if "=" in piece]
        in_order = names == sorted(set(names))  # x = 1, y = 2 is (1, 2)
        return Parts("list" if len(set(names)) < 2 else "()" if in_order else "=", tuple(pieces))
    if len(pieces := cut(text, _UNION)) > 1:
        return Parts("∪", tuple(pieces))
    items = tuple(cut(text[1:-1], COMMA)) if closes(text) else ()
    if text[:1] == "⦃" and items:
        return Parts("list", items)
    kind = text[0] + text[-1] if len(items) == 2 else "()"
    return Parts(kind, items) if len(items) > 1 else None


def assigned(text: str) -> tuple[str, str] | None:
    """The name and the value of x = 5; 5 has no name. None for another equation."""
    name, *values = (side.strip() for side in text.split("="))
    if not values:
        return "", text
    letters = re.sub(r"\\[a-z]+(?:\{[a-z]{3,}\})?", "", values[0])
    is_value = len(values) == 1 and (len(name) > 1 or name not in letters)
    return (name, values[0]) if is_value and _NAME.fullmatch(name) else None


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


def _verdict(equal: bool) -> Verdict:
    return Verdict.EQUAL if equal else Verdict.DIFFERENT
