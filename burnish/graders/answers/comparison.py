"""Whether an answer is the gold answer, in stages: text, numbers, parts, and last of all algebra.

Equality is exact; ``quantity`` has the rules for numbers. Tuples, intervals and matrices are equal
part by part, sets and lists in any order, and x = 5 is 5. x > 3 is the interval (3, ∞), "x = 1 or
x = 2" is the list 1, 2, and a value with ± is the list of both. Other inequalities equal their own
text alone. Only algebra is costly and risky to compare, so the function for it is an argument:
workers pass ``symbolic.compare_algebra``; the process that trains passes none, and learns that it
is needed.
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
MOST_MATCHED = 8
"""Each part of a longer set or list is compared with one part of the other only."""
_UNION = re.compile(rf"{BRACKETS}|∪")
_OR = re.compile(rf"{BRACKETS}|,? or ")
_ORDER = re.compile(rf"{BRACKETS}|[<>≤≥]")
_REVERSED = str.maketrans(">≥", "<≤")
_SEPARATOR = re.compile(r"[,;=∪]| and | or ")
_FIRST_SIGN = re.compile(r"(^|[(\[{⦃,=]) ?±")
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
    """The brackets; "list" for a set as well; ∪; "or" and "and" between statements; for a matrix,
    the lengths of its rows."""
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
    if said and meant and (said[0] or meant[0]):
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
    if gold.kind in ("list", "∪", "or", "and") and "…" not in theirs:
        ours, theirs = sorted(ours, key=_place), sorted(theirs, key=_place)
        if len(theirs) <= MOST_MATCHED and deep >= DEEPEST - 2:
            return _match(ours, theirs, algebra, deep)
    return max(_compare(*pair, algebra, deep) for pair in zip(ours, theirs, strict=True))


def _match(answers: list[str], golds: list[str], algebra: Algebra, deep: int) -> Verdict:
    """Pairs each gold with an answer, first without algebra; the worst gold decides."""
    for compare in (undecided, algebra):
        verdicts = []
        for gold in golds.copy():
            verdict, at = _best(answers, gold, compare, deep)
            if verdict is Verdict.EQUAL:
                del answers[at]
                golds.remove(gold)
            elif verdict is not Verdict.UNDECIDED:
                return verdict
            verdicts.append(verdict)
    return max(verdicts, default=Verdict.EQUAL)


def _best(answers: list[str], gold: str, algebra: Algebra, deep: int) -> tuple[Verdict, int]:
    """The smallest verdict on the answers, and the position of that answer."""
    best = Verdict.BAD_GOLD, 0
    for at, answer in enumerate(answers):
        best = min(best, (_compare(answer, gold, algebra, deep), at))
        if best[0] is Verdict.EQUAL:
            break
    return best


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
    if " or " in text and len(pieces := cut(text.removeprefix("either "), _OR)) > 1:
        return _alternatives(pieces)
    if len(pieces := cut(text, COMMA)) > 1:
        if any(map(_is_order, pieces)):
            return Parts("and", tuple(pieces))
        names = [piece.partition("=")[0].strip() for piece in pieces if "=" in piece]
        if len(set(names)) < 2:
            return Parts("list", _both_signs(pieces))
        in_order = names == sorted(set(names))  # x = 1, y = 2 is (1, 2)
        return Parts("()" if in_order else "=", tuple(pieces))
    if len(pieces := cut(text, _UNION)) > 1:
        return Parts("∪", tuple(pieces))
    items = tuple(cut(text[1:-1], COMMA)) if closes(text) else ()
    if text[:1] == "⦃" and items:
        return Parts("list", _both_signs(items))
    if len(signed := _both_signs([text])) > 1:
        return Parts("list", signed)
    if len(items) < 2:
        return None
    is_tuple = len(items) > 2 and text[0] + text[-1] == "[]"
    return Parts("()" if is_tuple else text[0] + text[-1], items)


def _alternatives(pieces: list[str]) -> Parts:
    """The values of "x = 1 or x = 2", the union of "x < 1 or x > 2", or other statements."""
    if any(map(_is_order, pieces)):
        names = {found[0] if (found := assigned(piece)) else "" for piece in pieces}
        return Parts("∪" if len(names) == 1 and "" not in names else "or", tuple(pieces))
    values = [value for piece in pieces for value in cut(piece, COMMA)]
    names = {value.partition("=")[0].strip() for value in values if "=" in value}
    if len(names) > 1:
        return Parts("or", tuple(pieces))
    statements = not names and all(value.isalpha() or words(value) for value in values)
    return Parts("or", tuple(values)) if statements else Parts("list", _both_signs(values))


def _both_signs(items: Iterable[str]) -> tuple[str, ...]:
    """Two items instead of one with ±; where it stands twice, the signs may be independent."""
    signed: list[str] = []
    for item in items:
        item = item if "±" in item else item.replace("∓", "±")
        if item.count("±") == 1 and item.count("∓") < 2:
            signed.append(_FIRST_SIGN.sub(r"\1", item).replace("±", "+").replace("∓", "-"))
            signed.append(item.replace("±", "-").replace("∓", "+"))
        else:
            signed.append(item)
    return tuple(signed)


def _is_order(text: str) -> bool:
    return not set("<>≤≥").isdisjoint(text)


def _interval(text: str) -> tuple[str, str] | None:
    """The name and the interval of x > 3, 3 < x or 1 < x ≤ 5; None for other inequalities."""
    sides, signs = cut(text, _ORDER), "".join(re.findall("[<>≤≥]", text))
    if not 2 <= len(sides) == len(signs) + 1 <= 3 or any(map(_SEPARATOR.search, sides)):
        return None
    if set(signs) <= set(">≥"):
        sides, signs = sides[::-1], signs[::-1].translate(_REVERSED)
    named = [_NAME.fullmatch(side) is not None for side in sides]
    if named == [True, False]:
        sides, signs = ["-∞", *sides], "<" + signs
    elif named == [False, True]:
        sides, signs = [*sides, "∞"], signs + "<"
    elif len(sides) == 2 or not named[1] or not set(signs) <= set("<≤"):
        return None
    low, name, high = sides
    below, above = quantity(low).value, quantity(high).value
    is_empty = below is not None and above is not None and below >= above
    if not low or not high or is_empty or (len(name) == 1 and name in low + high):
        return None
    return name, "(["[signs[0] == "≤"] + f"{low},{high}" + ")]"[signs[1] == "≤"]


def assigned(text: str) -> tuple[str, str] | None:
    """The name and the value of x = 5, or the interval of x > 3; 5 has no name.

    None for another equation or inequality.
    """
    if _is_order(text):
        return _interval(text)
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
