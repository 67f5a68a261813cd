"""Exact comparison of algebra in a worker, with math-verify's LaTeX parser and sympy.

Only the workers of a ``GraderPool`` import this file: the import takes seconds, and a comparison
may not terminate, in which case its worker is killed. No text is evaluated as code: the parser
receives only text whose tokens ``latex.latex`` knows. By default it would pass numbers to sympy's
parser, which calls Python's eval; here numbers become exact fractions instead, and sympy's parser
is disabled.

math-verify's comparison is not used, because it rounds: 0.3333333 would equal 1/3, and 1/2^99 would
equal 1/2^98. Two expressions differ if their values at some point differ, and are equal only if
sympy proves it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import sympy
from latex2sympy2_extended import latex2sympy2
from sympy.core import random as sympy_random
from sympy.parsing import sympy_parser

from burnish.graders.answers.comparison import Verdict, decide

_CONFIG = latex2sympy2.ConversionConfig(lowercase_symbols=False)
_IMAGINARY = {sympy.Symbol("i", real=True): sympy.I}
_POINTS = [sympy.Rational(37, 29), sympy.Rational(61, 43)]
"""Points at which two expressions are evaluated to find out whether they differ: the values of the
first variable; each further variable is larger by 1."""
_DIGITS, _MOST_DIGITS = 15, 400
_WARM = [
    (r"\frac{\sqrt{8}x}{2.5}+\sin^2 y", r"0.8\sqrt{2}x+1-\cos^2 y"),
    ("(x+1)(x-2)", "x^2-x-2"),
    (r"\log_2 8+\ln 2+3i", r"3+\ln(2)+3i"),
    ("2x+3y=6", "4x+6y=12"),
]
"""Comparisons that load all parts of the libraries before the first timeout starts."""
GAVE_UP = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""Exceptions that sympy raises on expressions that it can't handle."""


def symbolic_reward(answer: str, row: Mapping[str, Any]) -> float:
    """Compare an answer with the gold answers in row["golds"]; return the ``Verdict`` as a number,
    because a worker returns a reward.

    sympy evaluates expressions at random points. The points are the same for every comparison, or
    its duration, and so a timeout, would depend on the comparisons before it.
    """
    sympy_random.seed(0)
    return decide(answer, row["golds"], compare_algebra)


def compare_algebra(answer: str, gold: str) -> Verdict:
    """Return the verdict on an answer, given a gold answer; both are results of ``latex.latex``.

    The verdict is EQUAL only if sympy proves it, and DIFFERENT also if sympy fails on the
    expressions. It is BAD_GOLD if the gold answer, or UNREADABLE if the answer, can't be parsed or
    is undefined.
    """
    theirs = _expression(gold)
    if theirs is None:
        return Verdict.BAD_GOLD
    ours = _expression(answer)
    if ours is None:
        return Verdict.UNREADABLE
    same = _same if isinstance(theirs, sympy.Expr) else _same_equation
    try:
        equal = same(ours, theirs)
    except GAVE_UP:
        equal = False
    return Verdict.EQUAL if equal else Verdict.DIFFERENT


@lru_cache(maxsize=1024)
def _expression(text: str) -> Any:
    """Parse LaTeX into a sympy expression or equation. The letter i is the imaginary unit;
    variables are real. Return None if the text can't be parsed, or if the result contains an
    undefined value such as 0/0 or 1/0."""
    try:
        found = latex2sympy2.latex2sympy(
            text, is_real=True, normalization_config=None, conversion_config=_CONFIG
        )
        value = found.xreplace(_IMAGINARY).doit()
    except Exception:  # the parser raises this class itself
        return None
    return None if value.has(sympy.nan, sympy.zoo) else value


def _same(ours: Any, theirs: Any) -> bool:
    if not isinstance(ours, sympy.Expr) or ours == theirs:
        return bool(ours == theirs)
    difference = ours - theirs
    a_number = difference.has(sympy.I) and not difference.free_symbols
    difference = sympy.expand(difference, complex=a_number)
    if difference == 0 or _is_certainly_not_zero(difference):
        return bool(difference == 0)
    difference = sympy.simplify(difference)
    return difference == 0 or difference.equals(0) is True


def _is_certainly_not_zero(difference: Any) -> bool:
    variables = sorted(difference.free_symbols, key=str)
    for point in _POINTS if variables else _POINTS[:1]:
        at = {variable: point + k for k, variable in enumerate(variables)}
        value = difference.xreplace(at).evalf(_DIGITS, maxn=_MOST_DIGITS)
        if any(x.is_Float and x._prec > 1 and x != 0 for x in value.as_real_imag()):
            return True
    return False


def _same_equation(ours: Any, theirs: Any) -> bool:
    """Return whether one equation is the other one times a constant.

    Equations without variables are different, because any two of them, such as ln 2 = 5 and
    ln 3 = 1, are multiples of each other.
    """
    if not isinstance(ours, sympy.Eq) or not isinstance(theirs, sympy.Eq):
        return False
    left, right = ours.lhs - ours.rhs, theirs.lhs - theirs.rhs
    variables = sorted(left.free_symbols | right.free_symbols, key=str)
    at = {variable: _POINTS[0] + k for k, variable in enumerate(variables)}
    factor = left.xreplace(at) / right.xreplace(at)
    return bool(variables and factor.is_nonzero) and _same(left, factor * right)


def _exact(_: Any, text: str) -> Any:
    """Convert the text of a number to an exact sympy fraction; it replaces a method of the
    parser."""
    return sympy.Rational(Fraction(text.replace(",", "")))


def _closed(*_: Any, **__: Any) -> Any:
    raise ValueError("graders do not evaluate text")


logging.disable()
warnings.simplefilter("ignore")
latex2sympy2._Latex2Sympy.parse_number = _exact
latex2sympy2.convert_number = lambda text: _exact(None, text)
for ours, theirs in _WARM:
    assert decide(ours, [theirs], compare_algebra) is Verdict.EQUAL
sympy_parser.parse_expr = sympy_parser.eval_expr = _closed
