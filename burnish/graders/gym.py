"""Scores of reasoning-gym's own scorers; a worker's business, since some take long or for ever.

Several of them pass the response to eval or to sympy's parser, which evaluates. Where this file is
loaded those names stand for functions that read literals and arithmetic, and call nothing else.
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

LONGEST = 10_000
"""Characters that are parsed."""
LARGEST_POWER = 1_000
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: lambda a, b: a ** _small(b),
    ast.LShift: lambda a, b: a << _small(b),
    ast.RShift: operator.rshift,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
}
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


def literal(text: str, *_: Any) -> Any:
    """For eval: lists, texts, and arithmetic with Python's numbers."""
    return _value(_tree(text), lambda number: number, None)


def arithmetic(text: str, **_: Any) -> Any:
    """For the parser where numbers are to be combined: decimal ones, exactly, and no names.

    (Scorers count the numbers that they see: x/x, 0x10 or 1e1 would make others from nothing.)
    """
    if re.search(r"[A-Za-z_]", text):
        raise ValueError("letters in arithmetic")
    return _value(_tree(text), sympy.sympify, None)


def algebra(text: str, local_dict: Any = None, **_: Any) -> Any:
    """For the parser elsewhere: also variables and known functions."""
    return _value(_tree(text), sympy.sympify, _CONSTANTS | dict(local_dict or {}))


def _tree(text: str) -> ast.expr:
    if len(text) > LONGEST:
        raise ValueError(f"longer than {LONGEST} characters")
    return ast.parse(text.strip(), mode="eval").body


def _value(node: ast.expr, number: Callable[[Any], Any], names: dict[str, Any] | None) -> Any:
    """names: what a variable stands for, itself if it is not there; None: there are none."""
    if isinstance(node, ast.Constant):
        return number(node.value) if isinstance(node.value, int | float) else node.value
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(part, number, names) for part in node.elts]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _UNARY:
        return _UNARY[type(node.op)](_value(node.operand, number, names))
    if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
        left, right = (_value(side, number, names) for side in (node.left, node.right))
        return _BINARY[type(node.op)](left, right)
    if isinstance(node, ast.Name) and names is not None:
        return names.get(node.id, sympy.Symbol(node.id))
    called = node.func if isinstance(node, ast.Call) and not node.keywords else None
    if isinstance(called, ast.Name) and called.id in _FUNCTIONS and names is not None:
        assert isinstance(node, ast.Call)
        return getattr(sympy, called.id)(*(_value(part, number, names) for part in node.args))
    raise ValueError(f"neither a literal nor arithmetic: {type(node).__name__}")


def _small(exponent: Any) -> Any:
    if not abs(exponent) <= LARGEST_POWER:
        raise ValueError(f"a power above {LARGEST_POWER}")
    return exponent


def _closed(*_: Any, **__: Any) -> Any:
    raise ValueError("a grader evaluates no text")


logging.disable()
warnings.simplefilter("ignore")
for name, module in list(sys.modules.items()):
    if name.startswith("reasoning_gym"):
        vars(module).update(eval=literal, exec=_closed)
        if vars(module).get("parse_expr") is sympy_parser.parse_expr:
            vars(module)["parse_expr"] = arithmetic
sympy.parse_expr = sympy_parser.parse_expr = algebra
sympy_parser.eval_expr = _closed
