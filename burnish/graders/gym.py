"""Scores of reasoning-gym's own scorers; a worker's business, since some take long or for ever.

Several of them pass the response to eval. Where this file is loaded, eval reads literals alone. A
scorer that evaluates more (the games of numbers, polynomials, integrals, code) makes an error.
"""

from __future__ import annotations

import ast
import logging
import sys
import warnings
from collections.abc import Mapping
from functools import lru_cache
from json import dumps, loads
from typing import Any

import reasoning_gym
import sympy
from sympy.parsing import sympy_parser

from burnish.graders.extract import EXTRACTORS


def reward(response: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """The scorer's reward, which may be part of a point; the part answer is 1 for a whole one."""
    answer = EXTRACTORS[row["format"]](response)
    if answer is None:
        return {"reward": 0.0, "format": 0.0, "answer": 0.0, "status": "unparsed"}
    scorer = _scorer(row["generator"], dumps(row["settings"]))
    score = float(scorer(answer, row["entry"]))
    return {"reward": score, "format": 1.0, "answer": float(score == 1), "correct": score == 1}


@lru_cache(maxsize=64)
def _scorer(generator: str, settings: str) -> Any:
    return reasoning_gym.create_dataset(generator, **loads(settings)).score_answer


def _closed(*_: Any, **__: Any) -> Any:
    """Raises what no scorer catches: a right answer must not earn 0."""
    raise SystemExit("this generator's scorer evaluates text; choose another task.generator")


logging.disable()
warnings.simplefilter("ignore")
for name, module in list(sys.modules.items()):
    if name.startswith("reasoning_gym"):
        vars(module).update(exec=_closed)
        if not name.startswith("reasoning_gym.arithmetic."):  # these evaluate their own questions
            vars(module).update(eval=ast.literal_eval)
        if vars(module).get("parse_expr") is sympy_parser.parse_expr:
            vars(module).update(parse_expr=_closed)
sympy.parse_expr = sympy_parser.parse_expr = sympy_parser.eval_expr = _closed
