"""Whether an answer is the gold answer, in stages: text, numbers, parts, and last of all algebra.

Equality is exact; ``quantity`` has the rules for numbers. Tuples, intervals and matrices are equal
part by part, sets and lists in any order; an interval may be written as an inequality, and x = 5 as
5. Only algebra is costly and risky to compare, so the function for it is an argument: workers pass
``symbolic.compare_algebra``; the process that trains passes none, and learns that it is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from functools import lru_cache

from burnish.graders.answers import structure
from burnish.graders.answers.latex import latex
from burnish.graders.answers.quantity import Quantity, quantity
from burnish.graders.answers.spelling import normalise, squeezed
from burnish.graders.answers.structure import Parts

LONGEST = 1_000
"""An answer with more characters is not read."""
MOST_PARTS, DEEPEST = 64, 8


class Verdict(IntEnum):
    """In the order in which the best of several golds, and the worst of several parts, decides."""

    EQUAL = 0
    UNDECIDED = 1
    """Algebra has to be compared, and no function for it was given or it took too long."""
    UNREADABLE = 2
    """The answer is missing or can't be parsed."""
    DIFFERENT = 3
    BAD_GOLD = 4
    """The gold answer can't be parsed."""


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
    """Whether a gold answer can be parsed, as far as its text tells."""
    text = normalise(gold) if len(gold) <= LONGEST else ""
    plain = structure.words(text) is not None or quantity(text).value is not None
    return plain or structure.well_formed(text)


def _compare(answer: str, gold: str, algebra: Algebra, deep: int) -> Verdict:
    if squeezed(answer) == squeezed(gold):
        return Verdict.EQUAL
    ours, theirs = quantity(answer), quantity(gold)
    if ours.value is not None and theirs.value is not None:
        return _verdict(ours.value == theirs.value and ours.same_unit(theirs))
    if deep == 0:
        return Verdict.UNREADABLE
    left, right = structure.parts(answer), structure.parts(gold)
    if left is not None and right is not None:
        return _compare_parts(left, right, algebra, deep - 1)
    said, meant = structure.equation(answer), structure.equation(gold)
    if said and meant and "=" in answer + gold and _agree(said[0], meant[0]):
        return max(_compare(value, meant[1][-1], algebra, deep - 1) for value in said[1])
    return Verdict.DIFFERENT if left or right else _compare_leaf(ours, theirs, algebra)


def _compare_parts(answer: Parts, gold: Parts, algebra: Algebra, deep: int) -> Verdict:
    ours, theirs = list(answer.items), list(gold.items)
    alike = answer.kind == gold.kind and len(ours) == len(theirs) <= MOST_PARTS
    if not alike or not _agree(answer.name, gold.name):
        return Verdict.DIFFERENT
    if gold.kind in ("list", "or") and "…" not in theirs:
        return _compare_unordered(ours, theirs, algebra, deep)
    return max(_compare(*pair, algebra, deep) for pair in zip(ours, theirs, strict=True))


def _compare_unordered(
    answers: list[str], golds: Sequence[str], algebra: Algebra, deep: int
) -> Verdict:
    """Equality is transitive, so any equal pair may be taken; the golds left over decide."""
    left_over = [Verdict.EQUAL]
    for gold in golds:
        verdicts = [_compare(answer, gold, algebra, deep) for answer in answers]
        best = min(verdicts)
        if best is Verdict.EQUAL:
            del answers[verdicts.index(best)]
        else:
            left_over.append(best)
    return max(left_over)


def _compare_leaf(answer: Quantity, gold: Quantity, algebra: Algebra) -> Verdict:
    """Text against text, algebra against algebra; anything else is opaque, and its text differs.

    Up to three letters may also be a product of variables.
    """
    said, expected = structure.words(answer.core), structure.words(gold.core)
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


def _agree(name: str, other: str) -> bool:
    """Whether two names of a variable, each of them empty if there is none, can be one."""
    return not name or not other or squeezed(name) == squeezed(other)


def _verdict(equal: bool) -> Verdict:
    return Verdict.EQUAL if equal else Verdict.DIFFERENT
