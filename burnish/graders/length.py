"""Length penalties: changes of a group's rewards, after grading.

Each function takes the graded responses to one prompt and returns the change of each reward, [G].
``limit`` is the maximum number of tokens of a response. Rewards are the task's, before they are
multiplied by ``task.scales``. In the formulas, |y_i| is the number of sampled tokens of response i.
`PENALTIES` maps the names in a recipe to these functions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


class GradedResponses(NamedTuple):
    """The graded responses to one prompt, [G] each."""

    rewards: Floats
    right: Bools
    """Whether the task counts the response as correct."""
    lengths: Floats
    """Number of sampled tokens."""
    inserted: Floats
    """Number of tokens that the system inserted into the response; they count towards the limit."""
    counted: Bools
    """Whether the response enters the group's statistics. A greedy baseline and a response that is
    dropped because it was truncated do not."""


def overlong(given: GradedResponses, *, limit: int, buffer: int, coefficient: float) -> Floats:
    """Penalize responses of more than ``limit − buffer`` tokens, linearly up to ``coefficient`` at
    the limit.

        r_i ← r_i − c · min(1, max(0, (|y_i| − (l_i − buffer)) / buffer))

    l_i is the limit minus the tokens that were inserted into the response, so that the penalty of
    a response that was truncated at the limit is c.

    DAPO's soft overlong punishment, https://arxiv.org/abs/2503.14476, equation 13. Differs from the
    paper in the coefficient, which is 1 there.
    """
    limits = limit - given.inserted
    return -coefficient * np.clip((given.lengths - (limits - buffer)) / buffer, 0, 1)


def target(given: GradedResponses, *, limit: int, tokens: int, coefficient: float) -> Floats:
    """Penalize each response in proportion to the distance of its length from n = ``tokens``.

        r_i ← r_i − α · | n − |y_i| |,    α = ``coefficient``

    L1-Exact, https://arxiv.org/abs/2503.04697, equation 1. Differs from the paper in n, which is
    one number for all prompts; the paper draws one for each and writes it into the prompt.
    """
    return -coefficient * np.abs(tokens - given.lengths)


def at_most(
    given: GradedResponses, *, limit: int, tokens: int, coefficient: float, delta: float
) -> Floats:
    """Scale positive rewards down, by a factor that falls as the length approaches and exceeds
    n = ``tokens``.

        r_i ← r_i · min(1, max(0, α · (n − |y_i|) + δ)),    α = ``coefficient``, δ = ``delta``

    L1-Max, https://arxiv.org/abs/2503.04697, equation 2. Differs from the paper in n, as `target`
    does. A negative reward does not change.
    """
    kept = np.clip(coefficient * (tokens - given.lengths) + delta, 0, 1)
    return np.maximum(given.rewards, 0) * (kept - 1)


def among_correct(given: GradedResponses, *, limit: int, coefficient: float) -> Floats:
    """Penalize the correct responses to a prompt, longer ones more; wrong ones are not changed.

        r_i ← r_i − α · σ((|y_i| − mean) / std)    if i is correct; mean and std over correct ones

    Arora and Zanette 2025, https://arxiv.org/abs/2502.04463. Follows the paper where it is
    specific. The std divides by the number of correct responses; if the std is 0, the fraction
    counts as 0.
    """
    away, among = np.zeros_like(given.lengths), given.lengths[given.right & given.counted]
    if among.size and among.std():
        away = (given.lengths - among.mean()) / among.std()
    return np.where(given.right, -coefficient / (1 + np.exp(-away)), 0)


def solve_rate(given: GradedResponses, *, limit: int, coefficient: float) -> Floats:
    """Penalize each token, the more the higher the group's solve rate, so that answers to easy
    prompts become short.

        r_i ← r_i − β · max(p, 1 / G) · |y_i| / limit,    p = share of correct responses

    ALP, https://arxiv.org/abs/2506.05256. Differs from the paper in the constant by which lengths
    are divided: here it is the limit.
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
