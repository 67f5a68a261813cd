"""The calculator is exact, bounded, and evaluates nothing but arithmetic."""

import contextlib
import math
import random
import time
from fractions import Fraction

import pytest

from burnish.environments.calculator import calculator
from burnish.environments.protocol import ToolError


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("1 + 2 * 3", "7"),
        ("0.1 + 0.2", "0.3"),
        ("-0.05", "-0.05"),
        ("2 ** 200", str(2**200)),
        ("2 ** -2", "0.25"),
        ("1/3", "1/3 (about 0.333333333333)"),
        ("3 * (1/4 + 0.5)", "2.25"),
        ("7 // 2 - -7 // 2", "7"),
        ("-7 % 3", "2"),
        ("sqrt(2.25)", "1.5"),
        ("sqrt(2)", f"{math.sqrt(2):.15g}"),
        ("2 ** 0.5", f"{math.sqrt(2):.15g}"),
        ("round(2/3, 2)", "0.67"),
        ("max(1, 5/2, -3) + min(0.5, 2)", "3"),
        ("gcd(12, 18) + factorial(5) + abs(-1) + floor(1.9) + ceil(1.1)", "130"),
        ("2×3 − 8÷4", "4"),
        ("1e3 + 1_000", "2000"),
        (" pi ", f"{math.pi:.15g}"),
        ("1 ** (2 ** 4000)", "1"),
        ("0 ** 5", "0"),
    ],
)
def test_values(expression, value):
    assert calculator(expression) == value


def test_random_expressions_are_exact():
    draw = random.Random(0)

    def term(depth):
        if not depth:
            return f"{draw.randrange(100)}.{draw.randrange(100):02}"
        return f"({term(depth - 1)} {draw.choice('+-*/')} {term(depth - 1)})"

    for _ in range(100):
        text = term(3)
        value = eval(text.replace("(", "( ").replace(" ", "  "), {}, {})
        exact = eval(_fractions(text), {"F": Fraction})
        found = calculator(text).partition(" ")[0]
        assert Fraction(found) == exact
        assert float(exact) == pytest.approx(value)


def _fractions(text):
    words = text.replace("(", "( ").replace(")", " )").split()
    return " ".join(f"F('{word}')" if word[0].isdigit() else word for word in words)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("", "not an arithmetic expression"),
        ("1 +", "not an arithmetic expression: invalid syntax"),
        ("1 / 0", "division by zero"),
        ("5 % 0", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "a number has more than 4096 bits"),
        ("9 ** 9 ** 9 ** 9", "a number has more than 4096 bits"),
        ("2 ** 5000", "a number has more than 4096 bits"),
        ("1e99999999999", "is too large or too small"),
        ("1e-99999999999", "is too large or too small"),
        ("10.0 ** 0.5 ** 1e300", "the result is too large|has more than 4096 bits"),
        ("factorial(501)", "from 0 to 500, got 501"),
        ("factorial(10 ** 400)", "from 0 to 500"),
        ("factorial(1.5)", "must be an integer, got 1.5"),
        ("round(1, 10 ** 9)", "must be at most 30"),
        ("sqrt(-1)", "a root of a negative number"),
        ("(-1) ** 0.5", "a root of a negative number"),
        ("2 ^ 3", r"write \*\* for powers"),
        ("x + 1", "x is not known; the functions are sqrt"),
        ("__import__('os').system('true')", "is not known"),
        ("(1).real", "is not known"),
        ("[1, 2]", "is not known"),
        ("max(*[1])", "is not known"),
        ("'a' * 3", "'a' is no real number"),
        ("True + 1", "True is no real number"),
        ("2j", "is no real number"),
        ("sqrt(1, 2)", "sqrt takes 1 to 1 arguments, got 2"),
        ("1 < 2", "is not known"),
        ("1" * 1001, "at most 1000 characters"),
        ("(" * 499 + "1" + ")" * 499, "not an arithmetic expression|nested too deeply"),
        ("\ud800", "not an arithmetic expression"),
        ("1\0", "not an arithmetic expression"),
    ],
)
def test_expressions_that_are_refused(expression, said):
    began = time.monotonic()
    with pytest.raises(ToolError, match=said):
        calculator(expression)
    assert time.monotonic() - began < 0.5


def test_random_texts_raise_only_errors_of_the_tool():
    draw = random.Random(0)
    parts = ["1", "2.5", "9", "(", ")", "+", "-", "*", "/", "**", "//", "%", "sqrt", ","]
    values = 0
    for _ in range(3000):
        text = "".join(draw.choices(parts, k=draw.randrange(1, 12)))
        with contextlib.suppress(ToolError):
            values += bool(calculator(text))
    assert values > 100
