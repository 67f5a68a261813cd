"""Whether an answer is the gold answer, in stages: text, numbers, parts, and last of all algebra.

Equality is exact; ``quantity`` has the rules for numbers. Tuples, intervals and matrices are equal
part by part, sets and lists in any order; an interval may be written as an inequality, and x = 5 as
5. Only algebra is costly and risky to compare, so what does it is an argument: workers pass
``symbolic.compare_algebra``; the process that trains passes none, and learns that it is needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum
from functools import lru_cache

from burnish.graders.answers import structure
from burnish.graders.answers.latex import latex
from burnish.graders.answers.quantity import Quantity, quantity
from burnish.graders.answers.spelling import COMMA, closes, cut, normalise, squeezed
from burnish.graders.answers.structure import Parts

LONGEST = 1_000
"""Characters of an answer that is looked at."""
MOST_PARTS, DEEPEST = 64, 8
_CONDITION = re.compile(r"([a-zA-Z])(?: ?∈ ?ℝR)? ?[|:] ?(?=[^|:]*\1)([^|:]*[<>≤≥≠][^|:]*)")


class Verdict(StrEnum):
    """In the order in which one of several golds decides."""

    EQUAL = "equal"
    UNDECIDED = "undecided"
    """Algebra has to be compared and nothing was given that does it, or it took too long."""
    BAD_GOLD = "bad gold"
    """The gold answer can't be parsed."""
    DIFFERENT = "different"
    UNREADABLE = "unreadable"
    """The answer can't be parsed."""


_WORST_LAST = [Verdict.EQUAL, Verdict.UNDECIDED, Verdict.UNREADABLE, Verdict.DIFFERENT]
_WORST_LAST += [Verdict.BAD_GOLD]
Algebra = Callable[[str, str], Verdict]
"""Compares an answer with a gold answer, both from ``latex``."""


def undecided(answer: str, gold: str) -> Verdict:
    return Verdict.UNDECIDED


def decide(answer: str, golds: Iterable[str], algebra: Algebra = undecided) -> Verdict:
    """The verdict on an answer, if each of the golds is right."""
    order = list(Verdict)
    return min((_decide(answer, gold, algebra) for gold in golds), key=order.index)


def _decide(answer: str, gold: str, algebra: Algebra) -> Verdict:
    if not readable(gold):
        return Verdict.BAD_GOLD
    if len(answer) > LONGEST:
        return Verdict.UNREADABLE
    return _compare(normalise(answer), normalise(gold), algebra, DEEPEST)


@lru_cache(maxsize=8192)
def readable(gold: str) -> bool:
    """Whether a gold answer can be parsed, as far as its text tells."""
    if len(gold) > LONGEST:
        return False
    text = normalise(gold)
    if text[:1].isalpha():
        plain = (structure.words(text) or structure.choice(text, gold=True)) is not None
    else:
        plain = quantity(text).value is not None
    return plain or structure.well_formed(text)


def _compare(answer: str, gold: str, algebra: Algebra, deep: int) -> Verdict:
    answer, gold = (_plainly(text, alone=deep == DEEPEST) for text in (answer, gold))
    if squeezed(answer) == squeezed(gold):
        return Verdict.EQUAL
    ours, theirs = quantity(answer), quantity(gold)
    if ours.value is not None and theirs.value is not None:
        return _verdict(ours.equals(theirs))
    letter = structure.choice(gold, gold=True)
    if letter is not None:
        return _verdict(structure.choice(answer, gold=False) == letter)
    if deep == 0:
        return Verdict.UNREADABLE
    left, right = structure.parts(answer), structure.parts(gold)
    if left is not None and right is not None:
        return _compare_parts(left, right, algebra, deep - 1)
    pairs = _without_names(answer, left, gold, right)
    if pairs is not None:
        return _worst([_compare(*pair, algebra, deep) for pair in pairs])
    several = left or right
    if several is None or several.name:
        return _compare_leaf(answer, gold, algebra)
    return Verdict.DIFFERENT


def _plainly(text: str, *, alone: bool) -> str:
    """All reals as an interval, a set that is said by a condition as that; a single thing without
    its braces, unless it is in another set, or nothing."""
    if text.lower() in ("ℝr", "all real numbers"):
        return "(-∞,∞)"
    if text[:1] != "⦃" or not closes(text):
        return text
    inside = text[1:-1].strip()
    said = _CONDITION.fullmatch(inside)
    if said:
        return said[2]
    single = alone and len(cut(inside, COMMA)) == 1 and inside[:1] not in ("∅", "⦃", "")
    return inside if single and "±" not in inside else text if inside else "∅"


def _without_names(
    answer: str, left: Parts | None, gold: str, right: Parts | None
) -> list[tuple[str, str]] | None:
    """What has to be equal where one of them has a "x =", or both have the same; None otherwise."""
    ours = structure.equation(answer) if left is None else None
    theirs = structure.equation(gold) if right is None else None
    if theirs is not None and structure.TOTAL.fullmatch(theirs[0]):
        theirs = None
    if ours is not None and theirs is not None and ours[0] and theirs[0]:
        if squeezed(ours[0]) != squeezed(theirs[0]):
            return None
    elif (ours is None and "=" in answer) or (theirs is None and "=" in gold) or ours is theirs:
        return None
    golds = [gold] if theirs is None else theirs[1]
    return [(each, golds[-1]) for each in ([answer] if ours is None else ours[1])]


def _compare_parts(answer: Parts, gold: Parts, algebra: Algebra, deep: int) -> Verdict:
    kinds = {answer.kind, gold.kind}
    coordinates = kinds == {"list", "()"} and "," in (answer.name or gold.name)
    fits = len(kinds) == 1 or kinds == {"list", "⦃⦄"} or coordinates
    ours, theirs = list(answer.items), list(gold.items)
    if kinds == {"⦃⦄"}:
        ours, theirs = list(dict.fromkeys(ours)), list(dict.fromkeys(theirs))
    both = kinds <= {"or", "and"} or (answer.name and gold.name)
    named_apart = both and answer.name != gold.name
    if not fits or named_apart or len(ours) != len(theirs) or len(ours) > MOST_PARTS:
        return Verdict.DIFFERENT
    if kinds <= {"⦃⦄", "list", "or", "and"} and "…" not in (*ours, *theirs):
        return _compare_unordered(ours, theirs, algebra, deep)
    return _worst([_compare(*pair, algebra, deep) for pair in zip(ours, theirs, strict=True)])


def _compare_unordered(
    answers: list[str], golds: Sequence[str], algebra: Algebra, deep: int
) -> Verdict:
    """Equality is transitive, so any equal pair may be taken; what is left over decides."""
    left_over = []
    for gold in golds:
        verdicts = [_compare(answer, gold, algebra, deep) for answer in answers]
        if Verdict.EQUAL in verdicts:
            del answers[verdicts.index(Verdict.EQUAL)]
        else:
            left_over.append(min(verdicts, key=_WORST_LAST.index))
    return _worst(left_over)


def _worst(verdicts: Sequence[Verdict]) -> Verdict:
    return max(verdicts, key=_WORST_LAST.index, default=Verdict.EQUAL)


def _compare_leaf(answer: str, gold: str, algebra: Algebra) -> Verdict:
    """Text against text, algebra against algebra; anything else is opaque, and its text differs."""
    ours, theirs = quantity(answer), quantity(gold)
    said = structure.words(answer)
    if theirs.value is None:
        expected = structure.words(gold)
        if expected is not None and (said is not None or not structure.may_be_product(gold)):
            return _verdict(said == expected)
    if not ours.same_unit(theirs):
        return Verdict.DIFFERENT
    target = _latex(theirs)
    plain_words = ours.value is None and said is not None and not structure.may_be_product(answer)
    if target is None or plain_words:
        return Verdict.DIFFERENT
    candidate = _latex(ours)
    if candidate is None:
        return Verdict.UNREADABLE
    return Verdict.EQUAL if candidate == target else algebra(candidate, target)


def _latex(of: Quantity) -> str | None:
    if of.value is None:
        return latex(of.core)
    top, bottom = of.value
    short = max(abs(top), bottom) < 10**200
    return f"\\frac{{{top}}}{{{bottom}}}" if short else None


def _verdict(equal: bool) -> Verdict:
    return Verdict.EQUAL if equal else Verdict.DIFFERENT
