"""Scores of reasoning-gym's own scorers; a worker's business, since some take long or for ever.

Several of them pass the response to eval or to sympy's parser, which evaluates. Where this file is
loaded those names stand for functions that read literals and algebra, and call nothing else.
"""

from __future__ import annotations

import ast
import logging
import operator
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import lru_cache
from json import dumps, loads
from typing import Any

import reasoning_gym
import sympy
from sympy.parsing import sympy_parser

from burnish.graders.extract import EXTRACTORS

LARGEST_POWER = 1_000
_CONSTANTS = {"pi": sympy.pi, "E": sympy.E}
_FUNCTIONS = ("sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh", "exp", "log", "sqrt")


def reward(response: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """reward: the scorer's, which may give part of a point; answer: 1 for a whole one."""
    answer = EXTRACTORS[row["format"]](response)
    if answer is None:
        return {"reward": 0.0, "format": 0.0, "answer": 0.0, "status": "unparsed"}
    scorer = _scorer(row["generator"], dumps(row["settings"]))
    score = float(scorer(answer, row["entry"]))
    return {"reward": score, "format": 1.0, "answer": float(score == 1)}


@lru_cache(maxsize=64)
def _scorer(generator: str, settings: str) -> Callable[[str, Any], float]:
    scorer: Callable[[str, Any], float]
    scorer = reasoning_gym.create_dataset(generator, **loads(settings)).score_answer
    return scorer


def literal(text: str) -> Any:
    """For eval: lists, numbers and texts."""
    return ast.literal_eval(text.strip())


def arithmetic(text: str, **_: Any) -> Any:
    """For the parser where numbers are to be combined: decimal ones, exactly, and no names.

    (Scorers count the numbers that they see: x/x, 0x10 or 1e1 would make others from nothing.)
    """
    if re.search(r"[A-Za-z_]", text):
        raise ValueError("letters in arithmetic")
    return algebra(text)


def algebra(text: str, local_dict: Any = None, **_: Any) -> Any:
    """For the parser elsewhere: also variables and known functions."""
    tree = ast.parse(text.strip(), mode="eval")
    return _value(tree.body, _CONSTANTS | dict(local_dict or {}))


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """names: the values of variables; any other variable stands for itself."""
    match node:
        case ast.Constant(value=int() | float() as number):
            return sympy.sympify(number)
        case ast.Name(id=name):
            return names.get(name, sympy.Symbol(name))
        case ast.UnaryOp(op=sign, operand=operand) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(operand, names))
        case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
            return _OPERATORS[type(sign)](_value(left, names), _value(right, names))
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in _FUNCTIONS:
            return getattr(sympy, name)(*(_value(part, names) for part in parts))
    raise ValueError(f"no algebra: {type(node).__name__}")


def _power(base: Any, exponent: Any) -> Any:
    if not abs(exponent) <= LARGEST_POWER:
        raise ValueError(f"a power above {LARGEST_POWER}")
    return base**exponent


def _closed(*_: Any, **__: Any) -> Any:
    raise ValueError("a grader evaluates no text")


_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: _power,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
logging.disable()
warnings.simplefilter("ignore")
for name, module in list(sys.modules.items()):
    if name.startswith("reasoning_gym"):
        vars(module).update(exec=_closed)
        if not name.startswith("reasoning_gym.arithmetic."):  # these evaluate their own questions
            vars(module).update(eval=literal)
        if vars(module).get("parse_expr") is sympy_parser.parse_expr:
            vars(module)["parse_expr"] = arithmetic
sympy.parse_expr = sympy_parser.parse_expr = algebra
sympy_parser.eval_expr = _closed
