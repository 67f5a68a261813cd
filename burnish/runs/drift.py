"""Sentences about drift: how far the policy moved from the initial model, and how the reward
changed meanwhile."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from burnish.runs.metrics import smooth

Points = Sequence[tuple[float, float]]
"""(step, value) in the order of steps; all values are finite."""
Array = npt.NDArray[np.float64]

UNIT = "nats per token"
FEWEST = 4
"""Minimum number of measured steps for a statement about a trend."""
GAINED = 0.95
"""Share of the total reward gain after which the gain counts as achieved."""
RUNAWAY = 0.5
"""The KL has run away if it grows by this share of itself after the gain was achieved."""
AGREED, ROUNDED = 1e-2, 0.1
"""Largest mean difference between sampler and learner, in nats, that counts as agreement: in fp32,
and in 16 bits. Logits of 10 to 30 with about 8 significant bits have rounding errors up to 0.1."""


def read_drift(reward: Points, initial: Points) -> list[str]:
    """Return sentences about the growth of the KL, the trend of the reward, and a runaway KL.

    ``initial`` is the KL to the initial model in nats per token, by the k1 estimator: k3 can be
    dominated by a single token that only the initial model finds likely. ``reward`` may have been
    measured at other steps, such as those of validations. Without a KL, the list is empty; with
    fewer than `FEWEST` points, it says only that no trend can be read.
    """
    if len(initial) < FEWEST:
        return ["Too few steps have been measured to read a trend."] if initial else []
    steps, kl = _columns(initial)
    sentences = [_growth(steps, kl)]
    if len(reward) >= 2:
        sentences += _reward_trend(steps, kl, np.interp(steps, *_columns(reward)))
    return sentences


def read_mismatch(mean: Points, largest: Points, *, rounded: bool = False) -> list[str]:
    """Return a sentence that says whether sampler and learner agree on log-probabilities; an empty
    list if nothing was measured.

    ``mean`` and ``largest`` are the mean and the maximum difference at each step, in nats.
    ``rounded`` is true if the logits have 16 bits.
    """
    if not mean or not largest:
        return []
    average = sum(value for _, value in mean) / len(mean)
    step, most = max(largest, key=lambda point: point[1])
    if most == 0:
        return ["Sampler and learner agree to the last bit of every log-probability."]
    verdict = "agree" if average < (ROUNDED if rounded else AGREED) else "disagree"
    return [
        f"Sampler and learner {verdict}: their log-probabilities differ by {_format(average)} nats "
        f"on average and by {_format(most)} at most (step {step:g})."
    ]


def _growth(steps: Array, kl: Array) -> str:
    first, last, peak = kl[0].round(5), kl[-1], kl.max()
    subject = "KL to the initial model, averaged over neighbouring steps,"
    if peak < 1e-3:
        return f"{subject} stayed below {_format(peak)} {UNIT}: the policy hardly moved."
    if last < 0.7 * peak:
        at = f"at step {steps[kl.argmax()]:g}"
        return f"{subject} rose to {_format(peak)} {UNIT} {at} and fell back to {_format(last)}."
    return f"{subject} went from {_format(first)} to {_format(last)} {UNIT} by step {steps[-1]:g}."


def _reward_trend(steps: Array, kl: Array, reward: Array) -> list[str]:
    """Return a sentence about the gain of the reward, and one about the KL if it kept growing after
    the gain was achieved."""
    first, last, best = reward[0], reward[-1], reward.max()
    if best - first <= 0.01 * max(abs(first), abs(best)):  # too small to count as a gain
        return [f"The reward did not follow: {_format(first)} at first, {_format(last)} at last."]
    made = int(np.argmax(reward >= first + GAINED * (best - first)))
    at = f"{_format(reward[made])} by step {steps[made]:g}"
    sentences = [
        f"The reward followed, from {_format(first)} to {at}, and ended at {_format(last)}."
    ]
    grown = kl[made:].max() - kl[made]
    if len(kl) - made >= FEWEST and grown > max(RUNAWAY * kl[made], 0.1 * np.ptp(kl), 1e-3):
        peak = made + int(kl[made:].argmax())
        sentences.append(
            f"From step {steps[made]:g} on KL ran away: {_format(kl[made])} to {_format(kl[peak])} "
            f"{UNIT} by step {steps[peak]:g}, while the reward went from {_format(reward[made])} "
            f"to {_format(reward[peak])}."
        )
    return sentences


def _columns(points: Points) -> tuple[Array, Array]:
    """Return the steps and the smoothed values of a line as arrays."""
    steps, values = zip(*points, strict=True)
    return np.array(steps, dtype=np.float64), np.array(smooth(values))


def _format(value: float) -> str:
    return "0" if abs(value) < 5e-9 else f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"
