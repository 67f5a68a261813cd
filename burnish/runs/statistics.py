"""How sure a measured accuracy is, and figures of several samples per prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from math import comb, sqrt
from typing import Any, NamedTuple

Z = 1.959963984540054
"""95% of a normal distribution lie within so many standard deviations."""


def is_right(row: Mapping[str, Any]) -> bool:
    """Whether a response, as a row of its file, earned 1, or did all that a reward with partial
    credit asks: it sorted."""
    return (row["parts"].get("sorted", row["reward"]) or 0) >= 1


class Outcome(NamedTuple):
    """Whether a response is right, and its answer."""

    right: bool
    answer: str | None
    """The answer that it votes for; None if it abstains."""


def wilson(successes: float, trials: float) -> tuple[float, float]:
    """The 95% score interval of a share (Wilson 1927)."""
    share, spread = successes / trials, Z * Z / trials
    middle = (share + spread / 2) / (1 + spread)
    half = sqrt(spread * (share * (1 - share) + spread / 4)) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def interval(shares: Sequence[float], samples: int) -> tuple[float, float]:
    """The 95% interval of the mean over prompts, each of which has its share of right samples.

    Wilson's, for as many trials as would leave the mean as uncertain as the prompts' own spread
    does: the number of prompts where a prompt's samples all agree (always, with one each), up to
    the number of samples where they are independent.
    """
    count, mean = len(shares), sum(shares) / len(shares)
    variance = sum((share - mean) ** 2 for share in shares) / count
    ratio = mean * (1 - mean) / variance if variance else samples * (mean not in (0, 1))
    trials = count * min(max(ratio, 1), samples)
    return wilson(mean * trials, trials)


def pass_at_k(right: int, samples: int, k: int) -> float:
    """The chance that one of k samples is right, without bias (https://arxiv.org/abs/2107.03374).

    1 − C(n − c, k) / C(n, k): the share of choices of k samples that hold a right one.
    """
    return 1 - comb(samples - right, k) / comb(samples, k)


def majority(outcomes: Sequence[Outcome]) -> bool:
    """Whether the answer that most samples give is right; of equals, the one given first."""
    votes = Counter(outcome.answer for outcome in outcomes if outcome.answer is not None)
    if not votes:
        return False
    ((winner, _),) = votes.most_common(1)
    return next(outcome.right for outcome in outcomes if outcome.answer == winner)


def describe(prompts: Sequence[Sequence[Outcome]]) -> dict[str, float]:
    """Accuracy with its interval; pass@k and majority@k for k = 2, 4, … and all samples.

    Majority@k takes the first k samples. The figures are empty without an outcome.
    """
    given = [outcomes for outcomes in prompts if outcomes]
    if not given:
        return {}
    right = [sum(outcome.right for outcome in outcomes) for outcomes in given]
    shares = [count / len(outcomes) for count, outcomes in zip(right, given, strict=True)]
    samples = min(map(len, given))
    low, high = interval(shares, samples)
    figures = {"accuracy": sum(shares) / len(shares), "accuracy_low": low, "accuracy_high": high}
    for k in sorted({*(2**i for i in range(1, samples.bit_length())), samples} - {1}):
        passes = (pass_at_k(c, len(o), k) for c, o in zip(right, given, strict=True))
        figures[f"pass_at_{k}"] = sum(passes) / len(given)
        figures[f"majority_at_{k}"] = sum(majority(outcomes[:k]) for outcomes in given) / len(given)
    return figures
