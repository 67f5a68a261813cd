"""Counter-based randomness: one uniform number per token, hashed from where the token stands.

A draw depends on (run seed, stream, group index, sample, position) and on nothing else: neither on
the batch that a token was sampled in nor on earlier draws. A group that is sampled again draws the
same numbers.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Stream(IntEnum):
    """Who draws; streams never share numbers."""

    TRAIN = 0
    EVALUATION = 1
    TASK = 2
    GENERATE = 3
    BUFFER = 4
    CONTINUATION = 5
    """The place of the sample is a number of the sample, the step's first token and k together."""


class Purpose(IntEnum):
    """What a task draws for: the place of the sample in draws of ``Stream.TASK``."""

    ROWS = 0
    """The order of rows in an epoch; the numbers to sort."""
    SPLIT = 1
    """Rows and words that are held out."""
    TRAIN = 2
    VALIDATION = 3
    PART = 4
    """The part of a mixture that a group belongs to."""
    HINT = 6
    CURRICULUM = 7
    """Whether a prompt is asked again."""


def uniforms(
    seed: npt.ArrayLike,
    stream: npt.ArrayLike,
    group: npt.ArrayLike,
    sample: npt.ArrayLike,
    position: npt.ArrayLike,
) -> npt.NDArray[np.float64]:
    """Float64 in [0, 1) with 53 random bits; the arguments broadcast."""
    state = np.zeros(1, dtype=np.uint64)
    for word in (seed, stream, group, sample, position):
        state = mix(state + GOLDEN + mix(np.asarray(word).astype(np.uint64)[..., None]))
    return (state[..., 0] >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(seed: int, stream: int, group: int, sample: int, size: int) -> npt.NDArray[np.intp]:
    """0 … size − 1 in an order of its own for each (seed, stream, group, sample)."""
    return np.argsort(uniforms(seed, stream, group, sample, np.arange(size)), kind="stable")


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finaliser (Steele et al. 2014), a bijection that spreads every bit over all."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
