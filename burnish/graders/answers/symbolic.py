"""Exact comparison of algebra, by math-verify's LaTeX parser and sympy; a worker's business.

Only the workers of a ``GraderPool`` load this file: it takes seconds, a comparison may take for
ever, and then its worker is killed. Nothing here evaluates text as code. math-verify is asked for
LaTeX only (its default falls back to sympy's parser, which is Python's eval), and only for text
whose every token ``latex.latex`` knows. Its LaTeX path still sends each number through that
parser, as sympy.Number(text); here numbers become exact fractions first, and the parser is closed.

math-verify's own comparison rounds (0.3333333 is 1/3 to it, and 1/2^99 is 1/2^98), so it is not
used: two expressions are different if they differ at some point, and equal only if sympy proves it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy2
from latex2sympy2_extended.math_normalization import NormalizationConfig
from math_verify import LatexExtractionConfig, parse
from sympy.core.relational import Relational
from sympy.parsing import sympy_parser

from burnish.graders.answers.comparison import Verdict, decide

_AS_IT_IS = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=False, nits=False, boxed="none"
)
_LATEX = [LatexExtractionConfig(boxed_match_priority=-1, normalization_config=_AS_IT_IS)]
_CONSTANTS = {"e": sympy.E, "i": sympy.I}
_POINTS = [(7, 5, 1, 1), (13, 3, 1, 1), (17, 11, -1, -1), (23, 13, 1, -1), (29, 19, -1, 1)]
"""The k-th variable is (p + k) / q with the third sign for even k, with the fourth for odd k."""
_DIGITS, _MOST_DIGITS = 15, 400
_WARM = [
    (r"\frac{\sqrt{8}x}{2.5}+\sin^2 y", r"0.8\sqrt{2}x+1-\cos^2 y"),
    (r"\frac{x(x+1)}{2}", r"\frac{x^{2}+x}{2}"),
    ("(x+1)(x-2)", "x^2-x-2"),
    (r"\sqrt[3]{2}+\frac{\pi}{4}", r"2^{1/3}+0.25\pi"),
    (r"\log_2 8+\ln 2", r"3+\ln(2)"),
    ("2x+3y=6", "4x+6y=12"),
    ("3+4i", "4i+3"),
]
"""What the libraries load and learn at first use they know before any deadline counts."""
GAVE_UP = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What sympy raises on expressions that it can't deal with."""


def reward(answer: str, row: Mapping[str, Any]) -> float:
    """The number of the verdict, for a row with "golds"."""
    return list(Verdict).index(decide(answer, row["golds"], compare_algebra))


def compare_algebra(answer: str, gold: str) -> Verdict:
    """The verdict on two texts of ``latex.latex``."""
    theirs = _expression(gold)
    if theirs is None:
        return Verdict.BAD_GOLD
    ours = _expression(answer)
    if ours is None:
        return Verdict.UNREADABLE
    same = _same if isinstance(theirs, sympy.Expr) else _same_relation
    try:
        equal = same(ours, theirs)
    except GAVE_UP:
        equal = False
    return Verdict.EQUAL if equal else Verdict.DIFFERENT


@lru_cache(maxsize=1024)
def _expression(text: str) -> Any:
    """The parsed text, its letters real variables; None if it can't be parsed or has no value."""
    found = parse(
        f"${text}$",
        extraction_config=_LATEX,
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
    if not found or not isinstance(found[0], sympy.Expr | Relational):
        return found[0] if found else None
    letters = found[0].atoms(sympy.Symbol)
    meant = {s: _CONSTANTS.get(s.name, sympy.Symbol(s.name, real=True)) for s in letters}
    value = found[0].xreplace(meant).replace(_is_odd_root, _odd_root)
    try:
        value = value.doit() if isinstance(value, sympy.Expr) else value
    except GAVE_UP:
        return None
    return None if value.has(sympy.nan, sympy.zoo) else value


def _is_odd_root(of: Any) -> bool:
    if not (of.is_Pow and of.exp.is_Rational and of.exp.q > 1 and of.exp.q % 2):
        return False
    even = of.exp.p % 2 == 0 and of.base.is_extended_real and not of.base.is_nonnegative
    return bool(of.base.is_negative or even)


def _odd_root(of: Any) -> Any:
    """The real one: the cube root of -8 is -2, and that of x² is never negative."""
    return (
        (-1) ** of.exp.p * (-of.base) ** of.exp if of.base.is_negative else abs(of.base) ** of.exp
    )


def _same(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, sympy.Expr) or ours == theirs:
        return bool(ours == theirs)
    return not _differ(ours, theirs) and _is_zero(ours - theirs)


def _differ(ours: Any, theirs: Any) -> bool:
    """Whether the values differ at some point where both are real numbers, or are numbers; or only
    one is real there, and only one takes absolute values: ln |x| is not ln x."""
    variables = sorted(ours.free_symbols | theirs.free_symbols, key=str)
    for point in _POINTS if variables else _POINTS[:1]:
        at = _at(point, variables)
        left, right = ours.xreplace(at), theirs.xreplace(at)
        real, right_real = (side.evalf(_DIGITS).is_extended_real for side in (left, right))
        if variables and real != right_real and ours.has(sympy.Abs) != theirs.has(sympy.Abs):
            return True
        if ((real and right_real) or not variables) and _is_certainly_not_zero(left - right):
            return True
    return False


def _at(point: tuple[int, int, int, int], variables: Sequence[Any]) -> dict[Any, Any]:
    p, q, *signs = point
    return {v: signs[k % 2] * sympy.Rational(p + k, q) for k, v in enumerate(variables)}


def _is_certainly_not_zero(number: Any) -> bool:
    parts = number.evalf(_DIGITS, maxn=_MOST_DIGITS).as_real_imag()
    return any(part.is_Float and part._prec > 1 and part != 0 for part in parts)


def _is_zero(difference: Any) -> bool:
    """Whether sympy proves it, for positive variables; for all real ones, where an absolute value
    is taken: |x + 2| is x + 2 for the positive."""
    variables = set() if difference.has(sympy.Abs) else difference.free_symbols
    positive = {v: sympy.Symbol(v.name, positive=True) for v in variables}
    difference = difference.xreplace(positive)
    for step in (sympy.expand, sympy.simplify, _in_parts):
        difference = step(difference)
        if difference == 0:
            return True
    return difference.equals(0) is True


def _in_parts(number: Any) -> Any:
    """e^{πi/3} as 1/2 + √3 i/2."""
    complex_number = number.has(sympy.I) and not number.free_symbols
    return sympy.expand(number, complex=True) if complex_number else number


def _same_relation(ours: Any, theirs: Any) -> bool:
    """Whether one is the other times a constant, a positive one between inequalities.

    Without a variable any two would be that: 2 > 1 and 5 > 3.
    """
    (sign, left), (other_sign, right) = _sides(ours), _sides(theirs)
    if sign != other_sign or sign == "" or right == 0 or left == 0:
        return False
    variables = sorted(left.free_symbols | right.free_symbols, key=str)
    if left == right or not variables:
        return bool(variables)
    for point in _POINTS:
        at = _at(point, variables)
        factor = left.xreplace(at) / right.xreplace(at)
        if factor.is_positive or (sign == "=" and factor.is_negative):
            return _same(left, factor * right)
        if factor.is_negative:
            return False
    return False


def _sides(of: Any) -> tuple[str, Any]:
    """ "=" and what is zero, or ">" or "≥" and what is more than zero."""
    if isinstance(of, sympy.Eq):
        return "=", (of.lhs - of.rhs).doit()
    if isinstance(of, sympy.StrictGreaterThan | sympy.StrictLessThan):
        return ">", (of.gts - of.lts).doit()
    if isinstance(of, sympy.GreaterThan | sympy.LessThan):
        return "≥", (of.gts - of.lts).doit()
    return "", sympy.S.Zero


def _exact(_: Any, text: str) -> Any:
    """A number of the parser's, as a fraction."""
    return sympy.Rational(Fraction(text.replace(",", "")))


def _closed(*_: Any) -> Any:
    raise ValueError("a grader evaluates no text")


logging.disable()
warnings.simplefilter("ignore")
latex2sympy2._Latex2Sympy.parse_number = _exact
latex2sympy2.convert_number = lambda text: _exact(None, text)
for ours, theirs in _WARM:
    assert decide(ours, [theirs], compare_algebra) is Verdict.EQUAL
sympy_parser.parse_expr = sympy_parser.eval_expr = _closed
