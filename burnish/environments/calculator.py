"""The tool ``calculator``: exact arithmetic on integers, decimals and fractions, with bounds.

It evaluates a syntax tree of numbers, operators and a few functions; nothing else is executed.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction

from burnish.environments.protocol import ToolError

LONGEST_EXPRESSION = 1000
"""Characters of an expression."""
MOST_BITS = 4096
"""Bits of a numerator or denominator; a number of 1233 digits."""
LONGEST_DECIMAL = 30
"""Digits after the point of a result that is written as a decimal instead of as a fraction."""
SPELLINGS = str.maketrans({"×": "*", "÷": "/", "\N{MINUS SIGN}": "-", "·": "*"})
Number = Fraction | float

_BINARY: Mapping[type[ast.operator], Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(math.floor(a / b)),
    ast.Mod: operator.mod,
}
_CONSTANTS = {"pi": math.pi, "e": math.e}


def calculator(expression: str) -> str:
    """Evaluate an arithmetic expression exactly.

    Args:
        expression: numbers, + - * / // % ** and brackets, sqrt, abs, round, floor, ceil, min, max,
            gcd, factorial, pi and e, such as "3 * (1/4 + 0.5)"
    """
    text = expression.translate(SPELLINGS).strip()
    if len(text) > LONGEST_EXPRESSION:
        raise ToolError(f"an expression has at most {LONGEST_EXPRESSION} characters")
    try:
        tree = ast.parse(text, mode="eval")
        return written_number(_value(tree.body, text))
    except (RecursionError, MemoryError):
        raise ToolError("the expression is nested too deeply") from None
    except (SyntaxError, ValueError) as error:
        said = error.msg if isinstance(error, SyntaxError) else str(error)
        raise ToolError(f"not an arithmetic expression: {said}") from None
    except ZeroDivisionError:
        raise ToolError("division by zero") from None
    except OverflowError:
        raise ToolError("the result is too large") from None


def written_number(value: Number) -> str:
    """Return a number as text: an integer, an exact decimal, or a fraction with its approximate
    value. A float, such as a square root, is written with 15 digits."""
    if isinstance(value, float):
        return f"{value:.15g}"
    if value.denominator == 1:
        return str(value.numerator)
    left, digits = value.denominator, 0
    for factor in (2, 5):
        count = 0
        while left % factor == 0:
            left, count = left // factor, count + 1
        digits = max(digits, count)
    if left == 1 and digits <= LONGEST_DECIMAL:
        whole = str(abs(value.numerator) * 10**digits // value.denominator).zfill(digits + 1)
        return f"{'-' * (value < 0)}{whole[:-digits]}.{whole[-digits:]}"
    try:
        return f"{value} (about {float(value):.12g})"
    except OverflowError:
        return str(value)


def _value(node: ast.expr, text: str) -> Number:
    match node:
        case ast.Constant(value=bool() | str() | bytes() | complex() | None):
            raise ToolError(f"{ast.unparse(node)} is no real number")
        case ast.Constant(value=int(number)):
            return _bounded(Fraction(number))
        case ast.Constant(value=float()):
            return _decimal(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, text)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand, text)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            return _power(_value(left, text), _value(right, text))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _bounded(_BINARY[type(op)](_value(left, text), _value(right, text)))
        case ast.BinOp(op=ast.BitXor()):
            raise ToolError("^ is not known; write ** for powers")
        case ast.Name(id=name) if name in _CONSTANTS:
            return _CONSTANTS[name]
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
            return _call(name, [_value(each, text) for each in args])
    raise ToolError(f"{ast.unparse(node)[:80]} is not known; the functions are {_NAMES}")


def _decimal(text: str) -> Fraction:
    value = Decimal(text.replace("_", ""))
    if value and abs(value.adjusted()) > MOST_BITS:
        raise ToolError(f"the number {text} is too large or too small")
    return Fraction(_bounded(Fraction(value)))


def _bounded(value: Number) -> Number:
    if isinstance(value, float):
        if not math.isfinite(value):
            raise OverflowError
        return value
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        raise ToolError(f"a number has more than {MOST_BITS} bits")
    return value


def _power(base: Number, exponent: Number) -> Number:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        bits = max(base.numerator.bit_length(), base.denominator.bit_length()) - 1
        if bits * abs(exponent.numerator) > MOST_BITS:
            raise ToolError(f"a number has more than {MOST_BITS} bits")
        return _bounded(Fraction(base ** int(exponent)))
    power = float(base) ** float(exponent)
    if isinstance(power, complex):
        raise ToolError("a root of a negative number is no real number")
    return _bounded(power)


def _sqrt(value: Number) -> Number:
    if value < 0:
        raise ToolError("a root of a negative number is no real number")
    if isinstance(value, Fraction):
        roots = math.isqrt(value.numerator), math.isqrt(value.denominator)
        exact = Fraction(*roots)
        if exact * exact == value:
            return exact
    return math.sqrt(value)


def _round(value: Number, digits: Number = Fraction(0)) -> Number:
    count = _whole(digits, "the number of digits")
    if abs(count) > LONGEST_DECIMAL:
        raise ToolError(f"the number of digits must be at most {LONGEST_DECIMAL}, got {count}")
    return round(Fraction(value), count) if isinstance(value, Fraction) else round(value, count)


def _factorial(value: Number) -> Number:
    count = _whole(value, "the argument of factorial")
    if not 0 <= count <= 500:
        raise ToolError(f"the argument of factorial must be from 0 to 500, got {count}")
    return Fraction(math.factorial(count))


def _whole(value: Number, name: str) -> int:
    if isinstance(value, float) or value.denominator != 1:
        raise ToolError(f"{name} must be an integer, got {written_number(value)}")
    return value.numerator


def _gcd(*values: Number) -> Number:
    return Fraction(math.gcd(*(_whole(value, "an argument of gcd") for value in values)))


_FUNCTIONS: Mapping[str, tuple[Callable[..., Number], int, int]] = {
    "sqrt": (_sqrt, 1, 1),
    "abs": (abs, 1, 1),
    "round": (_round, 1, 2),
    "floor": (lambda value: Fraction(math.floor(value)), 1, 1),
    "ceil": (lambda value: Fraction(math.ceil(value)), 1, 1),
    "min": (lambda *values: min(values), 1, 100),
    "max": (lambda *values: max(values), 1, 100),
    "gcd": (_gcd, 1, 100),
    "factorial": (_factorial, 1, 1),
}
"""Functions by their names, each with the least and the largest number of arguments."""
_NAMES = ", ".join(_FUNCTIONS)


def _call(name: str, values: list[Number]) -> Number:
    function, least, most = _FUNCTIONS[name]
    if not least <= len(values) <= most:
        raise ToolError(f"{name} takes {least} to {most} arguments, got {len(values)}")
    return _bounded(function(*values))


vars(calculator)["deterministic"] = True
