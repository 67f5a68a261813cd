"""Length as a part of the reward: changes of a group's rewards, after grading.

Each function takes the graded responses to one prompt and returns the change of each reward, [G].
``limit`` is the largest number of tokens of a response. Rewards are those of the task, before any
scale. `PENALTIES` has the functions by their names in a recipe.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class Graded(NamedTuple):
    """The graded responses to one prompt, [G] each."""

    rewards: Floats
    right: Bools
    """The responses that the task counts as correct."""
    lengths: Floats
    """Sampled tokens."""
    inserted: Floats
    """Tokens that the system put into the response; they use up the limit, too."""
    counted: Bools
    """The responses whose statistics count: not a greedy baseline, and no response that is dropped
    because it was truncated."""


def overlong(given: Graded, *, limit: int, buffer: int, coefficient: float) -> Floats:
    """Nothing up to ``limit − buffer`` tokens, then linearly down to −coefficient at the limit.

        r_i ← r_i − c · min(1, max(0, (|y_i| − (l_i − buffer)) / buffer))

    l_i is the limit less the tokens that were inserted into the response, so that a response that
    was truncated at the limit pays c.

    DAPO's soft overlong punishment, https://arxiv.org/abs/2503.14476, equation 13. Differs from the
    paper in the coefficient, which is 1 there.
    """
    limits = limit - given.inserted
    return -coefficient * np.clip((given.lengths - (limits - buffer)) / buffer, 0, 1)


def target(given: Graded, *, limit: int, tokens: int, coefficient: float) -> Floats:
    """Every token too many or too few costs the same.

        r_i ← r_i − α · | n − |y_i| |

    L1-Exact, https://arxiv.org/abs/2503.04697, equation 1. Differs from the paper in n, which is
    one number for all prompts; the paper draws one for each and writes it into the prompt.
    """
    return -coefficient * np.abs(tokens - given.lengths)


def at_most(given: Graded, *, limit: int, tokens: int, coefficient: float, delta: float) -> Floats:
    """A good answer is worth less the longer it is; 1 only if it stays well below n tokens.

        r_i ← r_i · min(1, max(0, α · (n − |y_i|) + δ))

    L1-Max, https://arxiv.org/abs/2503.04697, equation 2. Differs from the paper in n, as `target`
    does. A negative reward stays as it is.
    """
    kept = np.clip(coefficient * (tokens - given.lengths) + delta, 0, 1)
    return np.maximum(given.rewards, 0) * (kept - 1)


def among_correct(given: Graded, *, limit: int, coefficient: float) -> Floats:
    """Of the right answers to a prompt, those shorter than their mean lose less than the longer.

        r_i ← r_i − α · σ((|y_i| − mean) / std)    if i is right; mean and std over right answers

    Arora and Zanette 2025, https://arxiv.org/abs/2502.04463. Differs from the paper in nothing that
    it fixes: the std is over the number of right answers, and the fraction is 0 where it is.
    """
    away, among = np.zeros_like(given.lengths), given.lengths[given.right & given.counted]
    if among.size and among.std():
        away = (given.lengths - among.mean()) / among.std()
    return np.where(given.right, -coefficient / (1 + np.exp(-away)), 0)


def solve_rate(given: Graded, *, limit: int, coefficient: float) -> Floats:
    """Tokens cost more the more often the group is right: easy prompts get short answers.

        r_i ← r_i − β · max(p, 1 / G) · |y_i| / limit,    p = share of right answers

    ALP, https://arxiv.org/abs/2506.05256. Differs from the paper in the constant that normalises
    lengths, which is the limit.
    """
    right = given.right[given.counted]
    rate = max(float(right.mean()), 1 / right.size) if right.size else 0.0
    return -coefficient * rate * given.lengths / limit


PENALTIES: dict[str, Callable[..., Floats]] = {
    "overlong": overlong,
    "target": target,
    "at_most": at_most,
    "among_correct": among_correct,
    "solve_rate": solve_rate,
}
