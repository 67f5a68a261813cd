"""Length as a part of the reward: changes of a group's rewards, after grading.

Each function takes the rewards [G] and lengths [G] (sampled tokens) of the graded responses to one
prompt and returns the change of each reward, [G]. ``limit`` is the largest length. A response is
right if its reward is at least 1. `PENALTIES` has the functions by their names in a recipe.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


def overlong(
    rewards: Floats, lengths: Floats, *, limit: int, buffer: int, coefficient: float
) -> Floats:
    """Nothing up to ``limit − buffer`` tokens, then linearly down to −coefficient at the limit.

        r_i ← r_i − c · min(1, max(0, (|y_i| − (limit − buffer)) / buffer))

    DAPO's soft overlong punishment, https://arxiv.org/abs/2503.14476, equation 13. Differs from the
    paper in the coefficient, which is 1 there.
    """
    return -coefficient * np.clip((lengths - (limit - buffer)) / buffer, 0, 1)


def target(
    rewards: Floats, lengths: Floats, *, limit: int, tokens: int, coefficient: float
) -> Floats:
    """Every token too many or too few costs the same.

        r_i ← r_i − α · | n − |y_i| |

    L1-Exact, https://arxiv.org/abs/2503.04697, equation 1. Differs from the paper in n, which is
    one number for all prompts; the paper draws one for each and writes it into the prompt.
    """
    return -coefficient * np.abs(tokens - lengths)


def at_most(
    rewards: Floats, lengths: Floats, *, limit: int, tokens: int, coefficient: float, delta: float
) -> Floats:
    """A good answer is worth less the longer it is; 1 only if it stays well below n tokens.

        r_i ← r_i · min(1, max(0, α · (n − |y_i|) + δ))

    L1-Max, https://arxiv.org/abs/2503.04697, equation 2. Differs from the paper in n, as `target`
    does. A negative reward stays as it is.
    """
    return np.maximum(rewards, 0) * (np.clip(coefficient * (tokens - lengths) + delta, 0, 1) - 1)


def among_correct(rewards: Floats, lengths: Floats, *, limit: int, coefficient: float) -> Floats:
    """Of the right answers to a prompt, those shorter than their mean lose less than the longer.

        r_i ← r_i − α · σ((|y_i| − mean) / std)    if r_i ≥ 1; mean and std over right answers

    Arora and Zanette 2025, https://arxiv.org/abs/2502.04463. Differs from the paper in nothing that
    it fixes: the std is over the number of right answers, and the fraction is 0 where it is.
    """
    right = rewards >= 1
    if not right.any():
        return np.zeros_like(rewards)
    mean, std = lengths[right].mean(), lengths[right].std()
    away = (lengths - mean) / std if std else np.zeros_like(lengths)
    return np.where(right, -coefficient / (1 + np.exp(-away)), 0)


def solve_rate(rewards: Floats, lengths: Floats, *, limit: int, coefficient: float) -> Floats:
    """Tokens cost more the more often the group is right: easy prompts get short answers.

        r_i ← r_i − β · max(p, 1 / G) · |y_i| / limit,    p = share of right answers

    ALP, https://arxiv.org/abs/2506.05256. Differs from the paper in the constant that normalises
    lengths, which is the limit.
    """
    rate = max(float((rewards >= 1).mean()), 1 / len(rewards))
    return -coefficient * rate * lengths / limit


PENALTIES: dict[str, Callable[..., Floats]] = {
    "overlong": overlong,
    "target": target,
    "at_most": at_most,
    "among_correct": among_correct,
    "solve_rate": solve_rate,
}
