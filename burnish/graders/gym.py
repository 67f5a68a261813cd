"""The reward of reasoning-gym tasks, computed by reasoning-gym's own scorers.

It runs only in grader workers, because some scorers take very long or do not terminate. Several
scorers evaluate the response as code. Loading this file prevents this: in reasoning-gym, ``eval``
accepts only literals (except in the modules that evaluate their own questions), and ``exec`` and
sympy's parser raise an error. Scorers that need them (number games, polynomials, integrals, code)
can't be used.
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


def gym_reward(response: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """Extract the answer from a response and score it with reasoning-gym's scorer.

    ``row`` has "format" (a key of `EXTRACTORS`), "generator" and "settings" of the dataset, and
    "entry" (question, answer and metadata). The reward may be fractional; the part "answer" is 1
    for a reward of 1, otherwise 0. A response without an answer gets a reward of 0 and the status
    "unparsed".
    """
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
    """Replacement for ``exec`` and sympy's parser: raise SystemExit, which no scorer catches.

    If a scorer caught the exception, a right answer would score 0.
    """
    raise SystemExit("this generator's scorer evaluates text; choose another task.generator")


logging.disable()
warnings.simplefilter("ignore")
for name, module in list(sys.modules.items()):
    if name.startswith("reasoning_gym"):
        vars(module).update(exec=_closed)
        if not name.startswith(
            "reasoning_gym.arithmetic."
        ):  # these modules evaluate their own questions
            vars(module).update(eval=ast.literal_eval)
        if vars(module).get("parse_expr") is sympy_parser.parse_expr:
            vars(module).update(parse_expr=_closed)
sympy.parse_expr = sympy_parser.parse_expr = sympy_parser.eval_expr = _closed
