"""Comparison of an answer with a gold answer, in stages: text, numbers, parts, and finally algebra.

Equality is exact; ``quantity`` has the rules for numbers. Tuples, intervals and matrices are
compared part by part, sets and lists in any order, and x = 5 equals 5. x > 3 is the interval
(3, ∞), "x = 1 or x = 2" is the list 1, 2, and a value with ± is the list of both values. Any other
inequality equals only its own text. Comparing algebra is slow and may not terminate, so the
function for it is an argument: workers pass ``symbolic.compare_algebra``; the training process
passes none, and gets UNDECIDED if algebra has to be compared.
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
from burnish.graders.answers.spelling import BRACKETS, COMMA, closes, normalise, split_at, squeezed

LONGEST = 1_000
"""Largest number of characters of an answer; longer answers are unreadable."""
MOST_PARTS, DEEPEST = 64, 8
"""Largest number of parts, and largest nesting depth, that are compared."""
MOST_MATCHED = 8
"""Largest set or list whose parts are matched in all pairings. The parts of larger ones are sorted
and compared in order."""
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
    """Result of a comparison. The smallest verdict of several gold answers counts, and the largest
    verdict of several parts."""

    EQUAL = 0
    UNDECIDED = 1
    """Algebra has to be compared, and there is no function for it or it timed out."""
    UNREADABLE = 2
    """The answer is missing or can't be parsed."""
    DIFFERENT = 3
    BAD_GOLD = 4
    """The gold answer can't be parsed."""


class AnswerParts(NamedTuple):
    """The parts of an answer, and the kind of their combination."""

    kind: str
    """Parts of different kinds are never equal. The kind is a pair of brackets, such as "()" for
    tuples and open intervals; "list" for lists and sets; "∪" for unions; "or" or "and" for
    statements; "=" for assignments to several names that are not sorted; or the lengths of a
    matrix's rows, such as "3×3" for two rows."""
    items: tuple[str, ...]


Algebra = Callable[[str, str], Verdict]
"""Compares an answer with a gold answer, both results of ``latex``."""


def undecided(answer: str, gold: str) -> Verdict:
    """Return UNDECIDED: the ``algebra`` of a process that does not compare algebra."""
    return Verdict.UNDECIDED


def decide(answer: str | None, golds: Iterable[str], algebra: Algebra = undecided) -> Verdict:
    """Return the verdict on an answer (None if it is missing), given several gold answers, any of
    which is right. Without ``algebra``, it is UNDECIDED if algebra has to be compared."""
    return min(_decide(answer, gold, algebra) for gold in golds)


def _decide(answer: str | None, gold: str, algebra: Algebra) -> Verdict:
    if not readable(gold):
        return Verdict.BAD_GOLD
    if answer is None or len(answer) > LONGEST:
        return Verdict.UNREADABLE
    return _compare(normalise(answer), normalise(gold), algebra, DEEPEST)


@lru_cache(maxsize=8192)
def readable(gold: str) -> bool:
    """Return whether a gold answer has content, balanced brackets and a permitted length."""
    text = normalise(gold) if len(gold) <= LONGEST else ""
    has_content = re.search(r"[^\W_]|[∅∞π…]", text) is not None
    return has_content and all(
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
    given, wanted = assigned(answer), assigned(gold)
    if given and wanted and (given[0] or wanted[0]):
        alike = not given[0] or not wanted[0] or given[0] == wanted[0]
        return _compare(given[1], wanted[1], algebra, deep - 1) if alike else Verdict.DIFFERENT
    left, right = parts(answer), parts(gold)
    if left is None or right is None:
        return Verdict.DIFFERENT if left or right else _compare_leaf(ours, theirs, algebra)
    return _compare_parts(left, right, algebra, deep - 1)


def _compare_parts(answer: AnswerParts, gold: AnswerParts, algebra: Algebra, deep: int) -> Verdict:
    ours, theirs = list(answer.items), list(gold.items)
    if answer.kind != gold.kind or not len(ours) == len(theirs) <= MOST_PARTS:
        return Verdict.DIFFERENT
    if gold.kind in ("list", "∪", "or", "and") and "…" not in theirs:
        ours, theirs = sorted(ours, key=_place), sorted(theirs, key=_place)
        if len(theirs) <= MOST_MATCHED and deep >= DEEPEST - 2:
            return _match(ours, theirs, algebra, deep)
    return max(_compare(*pair, algebra, deep) for pair in zip(ours, theirs, strict=True))


def _match(answers: list[str], golds: list[str], algebra: Algebra, deep: int) -> Verdict:
    """Pair each gold part with an equal part of the answer, first without algebra, then with it.

    Paired parts are removed from both lists. Returns EQUAL if all parts are paired, otherwise a
    verdict on a part that is not.
    """
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
    """Compare one gold part with all answers; return the smallest verdict and its answer's
    index."""
    best = Verdict.BAD_GOLD, 0
    for at, answer in enumerate(answers):
        best = min(best, (_compare(answer, gold, algebra, deep), at))
        if best[0] is Verdict.EQUAL:
            break
    return best


def _place(item: str) -> tuple[Fraction, str]:
    """Return the sort key of an item of a set or list: its value (0 if it is not a number), then
    its text."""
    return quantity(item).value or Fraction(0), squeezed(item)


def _compare_leaf(answer: Quantity, gold: Quantity, algebra: Algebra) -> Verdict:
    """Compare two answers that have no parts, as words or as algebraic expressions.

    Return DIFFERENT if only one of them is words, if their units differ, or if the gold answer is
    not an expression; return UNREADABLE if only the answer is not an expression. A word of up to
    three letters may also be a product of variables.
    """
    given, wanted = words(answer.core), words(gold.core)
    if given is not None and wanted is not None:
        return _verdict(given == wanted)
    if any(text and len(text) > 3 for text in (given, wanted)) or not answer.same_unit(gold):
        return Verdict.DIFFERENT
    candidate, target = latex(answer.core), latex(gold.core)
    if target is None:
        return Verdict.DIFFERENT
    if candidate is None:
        return Verdict.UNREADABLE
    return Verdict.EQUAL if candidate == target else algebra(candidate, target)


def parts(text: str) -> AnswerParts | None:
    """Return the parts of a normalised list, set, tuple, interval, union, matrix, value with ±, or
    several statements; None for other text."""
    matrix = _MATRIX.fullmatch(text)
    if matrix and "\\begin" not in matrix["body"]:
        body = matrix["body"].strip().removesuffix(r"\\")
        rows = [row.split("&") for row in body.split(r"\\")]
        kind = "×".join(str(len(row)) for row in rows)
        return AnswerParts(kind, tuple(normalise(cell) for row in rows for cell in row))
    if " or " in text and len(pieces := split_at(text.removeprefix("either "), _OR)) > 1:
        return _alternatives(pieces)
    if len(pieces := split_at(text, COMMA)) > 1:
        if any(map(_is_order, pieces)):
            return AnswerParts("and", tuple(pieces))
        names = [piece.partition("=")[0].strip() for piece in pieces if "=" in piece]
        if len(set(names)) < 2:
            return AnswerParts("list", _both_signs(pieces))
        in_order = names == sorted(set(names))  # x = 1, y = 2 is (1, 2)
        return AnswerParts("()" if in_order else "=", tuple(pieces))
    if len(pieces := split_at(text, _UNION)) > 1:
        return AnswerParts("∪", tuple(pieces))
    items = tuple(split_at(text[1:-1], COMMA)) if closes(text) else ()
    if text[:1] == "⦃" and items:
        return AnswerParts("list", _both_signs(items))
    if len(signed := _both_signs([text])) > 1:
        return AnswerParts("list", signed)
    if len(items) < 2:
        return None
    is_tuple = len(items) > 2 and text[0] + text[-1] == "[]"
    return AnswerParts("()" if is_tuple else text[0] + text[-1], items)


def _alternatives(pieces: list[str]) -> AnswerParts:
    """Return the parts of alternatives that "or" separates: a list of values ("x = 1 or x = 2"), a
    union of intervals ("x < 1 or x > 2"), or other statements."""
    if any(map(_is_order, pieces)):
        names = {found[0] if (found := assigned(piece)) else "" for piece in pieces}
        return AnswerParts("∪" if len(names) == 1 and "" not in names else "or", tuple(pieces))
    values = [value for piece in pieces for value in split_at(piece, COMMA)]
    names = {value.partition("=")[0].strip() for value in values if "=" in value}
    if len(names) > 1:
        return AnswerParts("or", tuple(pieces))
    statements = not names and all(value.isalpha() or words(value) for value in values)
    return (
        AnswerParts("or", tuple(values)) if statements else AnswerParts("list", _both_signs(values))
    )


def _both_signs(items: Iterable[str]) -> tuple[str, ...]:
    """Replace each item that has one ± by two items, with + and with −. An item with two ± stays,
    because the signs may be independent."""
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
    """Return name and interval of an inequality: x > 3 gives ("x", "(3,∞)"), and 1 < x ≤ 5 gives
    ("x", "(1,5]"). Return None for other inequalities."""
    sides, signs = split_at(text, _ORDER), "".join(re.findall("[<>≤≥]", text))
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
    """Return ("x", "5") for x = 5, ("x", "(3,∞)") for x > 3, and ("", text) for a plain value.

    Return None for other equations and inequalities.
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
    """Return an answer that consists of words, in lower case and without a leading article; None
    for other answers.

    Two letters keep their case unless they are lower case or title case: a segment AB is not a
    product ab.
    """
    if not _WORDS.fullmatch(text):
        return None
    if len(text) == 2 and not (text.islower() or text.istitle()):
        return text
    return re.sub("^(?:the|an?) (?=.)", "", text.casefold())


def _verdict(equal: bool) -> Verdict:
    return Verdict.EQUAL if equal else Verdict.DIFFERENT
