"""Sentences about drift: how far the policy moved from its start, and which reward it gained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from burnish.runs.metrics import smooth

Points = Sequence[tuple[float, float]]
"""(step, value), by step, all finite."""
Array = npt.NDArray[np.float64]

UNIT = "nats per token"
FEWEST = 4
"""Steps below which no trend is read."""
GAINED = 0.95
"""The share of the reward's whole gain after which it counts as made."""
RUNAWAY = 0.5
"""KL that grows by this share of itself after the gain was made has run away."""
AGREED, ROUNDED = 1e-2, 0.1
"""Mean gap between sampler and learner, in nats, up to which they agree: in fp32, and in 16 bits,
whose logits, of 10 to 30 and 8 bits or so, are up to 0.1 off by themselves."""


def read_drift(reward: Points, initial: Points) -> list[str]:
    """Sentences: how KL to the initial model grew, whether reward followed, where it ran away.

    ``initial`` is the KL to the initial model (k1, nats per token: a single token that only the
    initial model finds likely may be most of k3). ``reward`` may have been measured at other steps
    (a validation). Without a KL there is no sentence.
    """
    if len(initial) < FEWEST:
        return ["Too few steps have been measured to read a trend."] if initial else []
    steps, kl = _columns(initial)
    sentences = [_growth(steps, kl)]
    if len(reward) >= 2:
        sentences += _company(steps, kl, np.interp(steps, *_columns(reward)))
    return sentences


def read_mismatch(mean: Points, largest: Points, *, rounded: bool = False) -> list[str]:
    """Whether sampler and learner gave the same tokens the same log-probability.

    rounded: their logits have 16 bits.
    """
    if not mean or not largest:
        return []
    average = sum(value for _, value in mean) / len(mean)
    step, most = max(largest, key=lambda point: point[1])
    if most == 0:
        return ["Sampler and learner agree to the last bit of every log-probability."]
    verdict = "agree" if average < (ROUNDED if rounded else AGREED) else "disagree"
    return [
        f"Sampler and learner {verdict}: their log-probabilities differ by {_say(average)} nats "
        f"on average and by {_say(most)} at most (step {step:g})."
    ]


def _growth(steps: Array, kl: Array) -> str:
    first, last, peak = kl[0].round(5), kl[-1], kl.max()
    subject = "KL to the initial model"
    if peak < 1e-3:
        return f"{subject} stayed below {_say(peak)} {UNIT}: the policy hardly moved."
    if last < 0.7 * peak:
        at = f"at step {steps[kl.argmax()]:g}"
        return f"{subject} rose to {_say(peak)} {UNIT} {at} and fell back to {_say(last)}."
    return f"{subject} went from {_say(first)} to {_say(last)} {UNIT} by step {steps[-1]:g}."


def _company(steps: Array, kl: Array, reward: Array) -> list[str]:
    """Whether the reward went along, and from where on it no longer did."""
    first, last, best = reward[0], reward[-1], reward.max()
    if best - first <= 0.01 * max(abs(first), abs(best)):  # less than this is no gain
        return [f"The reward did not follow: {_say(first)} at first, {_say(last)} at last."]
    made = int(np.argmax(reward >= first + GAINED * (best - first)))
    at = f"{_say(reward[made])} by step {steps[made]:g}"
    sentences = [f"The reward followed, from {_say(first)} to {at}, and ended at {_say(last)}."]
    grown = kl[made:].max() - kl[made]
    if len(kl) - made >= FEWEST and grown > max(RUNAWAY * kl[made], 0.1 * np.ptp(kl), 1e-3):
        peak = made + int(kl[made:].argmax())
        sentences.append(
            f"From step {steps[made]:g} on KL ran away: {_say(kl[made])} to {_say(kl[peak])} "
            f"{UNIT} by step {steps[peak]:g}, while the reward went from {_say(reward[made])} to "
            f"{_say(reward[peak])}."
        )
    return sentences


def _columns(points: Points) -> tuple[Array, Array]:
    """Steps and smoothed values."""
    steps, values = zip(*points, strict=True)
    return np.array(steps, dtype=np.float64), np.array(smooth(values))


def _say(value: float) -> str:
    return "0" if abs(value) < 5e-9 else f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"
