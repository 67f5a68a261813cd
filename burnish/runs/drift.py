"""How far the policy moved from where it began, read against what it gained by that: in words."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Points = Sequence[tuple[float, float]]
"""(step, value), by step, all finite."""
Array = npt.NDArray[np.float64]

FEWEST = 4
"""Steps below which no trend is read."""
GAINED = 0.95
"""The share of the reward's whole gain after which it counts as made."""
RUNAWAY = 0.5
"""KL that grows by this share of itself after the gain was made has run away."""


def read_drift(
    reward: Points, initial: Points, previous: Points = (), *, unit: str = "nats"
) -> list[str]:
    """Sentences: how KL to the initial model grew, whether reward followed, where it ran away.

    ``initial`` and ``previous`` are KL to the initial model and to the previous step's policy;
    ``reward`` may have been measured at other steps (a validation). No KL, no sentence.
    """
    if len(initial) < FEWEST:
        return ["Too few steps have been measured to read a trend."] if initial else []
    steps, kl = _columns(initial)
    kl = _smooth(kl, keep_ends=True)
    sentences = [_growth(steps, kl, unit)]
    if len(reward) >= 2:
        at, values = _columns(reward)
        sentences += _company(steps, kl, np.interp(steps, at, _smooth(values)), unit)
    if len(previous) >= FEWEST:
        sentences.append(_pace(*_columns(previous), unit))
    return sentences


def read_mismatch(mean: Points, largest: Points, *, rounded: bool = False) -> list[str]:
    """Whether sampler and learner gave the same tokens the same log-probability.

    rounded: 16-bit logits, of 10 to 30 and 8 bits or so, are up to 0.1 off by themselves."""
    if not mean:
        return []
    average = float(np.mean([value for _, value in mean]))
    verdict = "agree" if average < 1e-3 else "nearly agree" if average < 1e-2 else "disagree"
    if rounded and 1e-3 <= average < 0.1:
        verdict = "agree as far as 16-bit logits can"
    text = f"Sampler and learner {verdict}: their log-probabilities differ by {_say(average)} nats"
    if not largest:
        return [f"{text} on average."]
    step, most = max(largest, key=lambda point: point[1])
    if most == 0:
        return ["Sampler and learner agree to the last bit of every log-probability."]
    return [f"{text} on average and by {_say(most)} at most (step {step:g})."]


def _growth(steps: Array, kl: Array, unit: str) -> str:
    first, last, peak = kl[0], kl[-1], kl.max()
    if peak < 1e-3:
        return f"KL to the initial model stayed below {_say(peak)} {unit}: the policy hardly moved."
    if last < 0.7 * peak:
        return (
            f"KL to the initial model rose to {_say(peak)} {unit} at step {steps[kl.argmax()]:g} "
            f"and fell back to {_say(last)}."
        )
    if last - first < 0.1 * peak:
        return f"KL to the initial model stayed near {_say(last)} {unit}."
    late = (last - kl[len(kl) // 2]) / (last - first)
    pace = "ever faster" if late > 0.65 else "most of it early" if late < 0.35 else "evenly"
    return (
        f"KL to the initial model grew from {_say(first)} to {_say(last)} {unit} "
        f"by step {steps[-1]:g}, {pace}."
    )


def _company(steps: Array, kl: Array, reward: Array, unit: str) -> list[str]:
    """Whether the reward went along, and from where on it no longer did."""
    first, last, best = reward[0], reward[-1], reward.max()
    least = 0.01 * max(abs(first), abs(best), 1e-9)  # less than this is no gain
    moved = kl.max() - kl[0]
    if best - first <= least:
        if moved < 1e-3:
            return []
        verb = "fell" if last < first - least else "did not follow"
        return [f"The reward {verb}: {_say(first)} at first, {_say(last)} at last."]
    made = int(np.argmax(reward >= first + GAINED * (best - first)))
    followed = f"The reward followed, from {_say(first)} to {_say(reward[made])}"
    if kl[made] - kl[0] > 1e-3:
        rate = (reward[made] - first) / (kl[made] - kl[0])
        followed += f" by step {steps[made]:g} ({_say(rate)} per nat)"
    grown = kl[made:].max() - kl[made]
    if len(kl) - made >= FEWEST and grown > max(RUNAWAY * kl[made], 0.1 * moved, 1e-3):
        peak = made + int(kl[made:].argmax())
        return [
            f"{followed}.",
            f"From step {steps[made]:g} on KL ran away: {_say(kl[made])} to {_say(kl[peak])} "
            f"{unit} by step {steps[peak]:g}, while the reward went from {_say(reward[made])} to "
            f"{_say(reward[peak])}.",
        ]
    end = (
        f"the reward has since fallen to {_say(last)}"
        if best - last > 0.2 * (best - first)
        else "KL did not run away"
    )
    return [f"{followed}; {end}."]


def _pace(steps: Array, kl: Array, unit: str) -> str:
    """The largest of the steps, against the usual one."""
    usual, peak = float(np.median(kl)), int(kl.argmax())
    text = f"From one step to the next the policy usually moved by {_say(usual)} {unit}"
    if kl[peak] > 5 * max(usual, 1e-9) and kl[peak] > 1e-3:
        return f"{text}; step {steps[peak]:g} stands out with {_say(kl[peak])}."
    return f"{text}; no step stands out."


def _columns(points: Points) -> tuple[Array, Array]:
    table = np.array(points, dtype=np.float64)
    return table[:, 0], table[:, 1]


def _smooth(values: Array, *, keep_ends: bool = False) -> Array:
    """Mean over up to two neighbours on each side; the ends over what there is, or kept."""
    n, most = len(values), min(2, len(values) // 16)
    sides = [(min(most, i), min(most, n - 1 - i)) for i in range(n)]
    if keep_ends:
        sides = [(min(pair), min(pair)) for pair in sides]
    return np.array([values[i - a : i + b + 1].mean() for i, (a, b) in enumerate(sides)])


def _say(value: float) -> str:
    return "0" if abs(value) < 5e-9 else f"{value:.2g}" if abs(value) < 1 else f"{value:.3g}"
