"""Counter-based random numbers: one uniform number per token, hashed from the token's coordinates.

A draw depends only on (run seed, stream, group index, sample, position), not on the batch that a
token was sampled in or on earlier draws. A group that is sampled again gets the same numbers.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


class Stream(IntEnum):
    """Consumers of random numbers. Streams are independent of each other."""

    TRAIN = 0
    """Responses to training prompts."""
    EVALUATION = 1
    """Responses to held-out prompts."""
    TASK = 2
    """Choice and content of prompts; see `Purpose`."""
    GENERATE = 3
    """Responses outside of a run: `burnish.generate` and the HTTP endpoint."""
    BUFFER = 4
    """Choice of groups from the replay buffer."""
    CONTINUATION = 5
    """Continuations that estimate step values. The sample coordinate encodes the sample, the step's
    first token and the number of the continuation."""


class Purpose(IntEnum):
    """Purposes of the numbers that tasks draw. In ``Stream.TASK``, the purpose takes the place of
    the sample coordinate, so that draws for different purposes are independent."""

    ROWS = 0
    """Order of rows in an epoch, and numbers to sort."""
    SPLIT = 1
    """Choice of the held-out rows and words."""
    TRAIN = 2
    """Generated training questions."""
    VALIDATION = 3
    """Generated held-out questions."""
    PART = 4
    """Choice of a group's task in a mixture."""
    HINT = 6
    """Decision whether a prompt gets a hint, and the length of the hint."""
    CURRICULUM = 7
    """Decision whether the curriculum admits a prompt."""
    ENVIRONMENT = 8
    """Seeds of environments of training prompts."""
    HELD_OUT_ENVIRONMENT = 9
    """Seeds of environments of held-out prompts, the same for every run."""


def uniforms(
    seed: npt.ArrayLike,
    stream: npt.ArrayLike,
    group: npt.ArrayLike,
    sample: npt.ArrayLike,
    position: npt.ArrayLike,
) -> npt.NDArray[np.float64]:
    """Hash each combination of coordinates to a uniform float64 number in [0, 1) with 53 random
    bits. The arguments are broadcast against each other, and the result has their common shape.
    Equal coordinates always give the same number."""
    state = np.zeros(1, dtype=np.uint64)
    for word in (seed, stream, group, sample, position):
        state = mix(state + GOLDEN + mix(np.asarray(word).astype(np.uint64)[..., None]))
    return (state[..., 0] >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(seed: int, stream: int, group: int, sample: int, size: int) -> npt.NDArray[np.intp]:
    """Return a permutation of 0 … size − 1 that (seed, stream, group, sample) determine."""
    return np.argsort(uniforms(seed, stream, group, sample, np.arange(size)), kind="stable")


def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finaliser of splitmix64 (Steele et al. 2014), a bijection that mixes all bits."""
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
