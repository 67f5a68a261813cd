"""The protocol of rollout engines: an engine accepts requests, returns completions step by step,
and loads new weights between any two steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from burnish.errors import EngineError
from burnish.randomness import Stream
from burnish.types import Completion, Episode, Finish, IntArray, SamplingParams, Weights

if TYPE_CHECKING:
    import torch


Probed = tuple[float, ...]
"""Result of a probe: the log-probabilities of fixed tokens after a fixed context, which show which
weights a model has."""
Probe = Callable[[], Probed]
"""Function that computes the current probe of a model."""
MOVED = 1e-3
"""Largest change of the model's probe, in nats, that a bf16 engine's probe may fail to show."""


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt for an engine, from which ``n`` responses are sampled."""

    request_id: str
    """Name of the request; unique among the unfinished requests of an engine."""
    prompt: IntArray
    """[T] token ids"""
    n: int = 1
    """Number of responses to sample for this prompt."""
    params: SamplingParams = field(default_factory=SamplingParams)
    group: int = 0
    """Sequence number in the run of the group (all samples of one prompt) that the request belongs
    to; random draws are hashed from it."""
    stream: Stream = Stream.TRAIN
    """Separates the random draws of training and evaluation."""
    begun: Completion | None = None
    """Partial response that all samples continue; None to start new responses. Its tokens are part
    of the completions and count towards max_tokens."""
    episode: Episode | None = None
    """Start of the environment with which each sample has several turns; None for one turn. Only
    `burnish.rollout.episodes.EpisodeEngine` accepts it."""
    first: int = 0
    """Index of the request's first sample in its group. It enters the random draws, so that several
    requests of one group draw different numbers."""
    turn: int = 0
    """Index in the response at which the current turn of an episode begins. Stop strings,
    min_tokens and the think budget count from it."""
    position: int = 0
    """Position of the response's first token in the random draws: the number of tokens that the
    sample has in earlier token sequences."""

    continues: bool = False
    """Whether a later request may continue the completions (`begun`), as a turn of an episode, so
    that the engine may keep their cache."""

    @property
    def given(self) -> IntArray:
        """The prompt, followed by the tokens of the partial response if there is one."""
        begun = [] if self.begun is None else [self.begun.token_ids]
        return np.concatenate([self.prompt, *begun])


@dataclass(frozen=True)
class Capabilities:
    """The properties that an engine guarantees. A run starts only if `require` accepts them."""

    model_logprobs: bool
    """Log-probabilities are the model's at the sampling temperature, before any truncation."""
    token_versions: bool
    """Every token carries the version of the weights that sampled it."""
    counter_draws: bool
    """A token's random number depends only on seed, stream, group, sample and position
    (`burnish/randomness.py`)."""


class Sampler(Protocol):
    """Accepts requests with `submit` and returns their completions from `step`. It is one engine,
    or several engines together."""

    @property
    def unfinished(self) -> int:
        """Number of samples whose completion `step` has not returned yet."""

    @property
    def sampled(self) -> int:
        """Total number of tokens sampled since the start, without inserted tokens."""

    def submit(self, request: Request) -> None:
        """Queue a request, whose samples the following steps compute. Raise an EngineError if the
        request is invalid or the engine does not support its settings."""

    def step(self) -> list[Completion]:
        """Advance the unfinished samples. Return the completions that are available since the last
        step, of ended and aborted samples; an empty list if no sample has ended."""


class Engine(Sampler, Protocol):
    """A `Sampler` that samples the tokens itself, with weights that can be replaced."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def version(self) -> int:
        """Version of the loaded weights; 0 before the first load."""

    def load(self, weights: Weights) -> None:
        """Load new weights. All tokens after that are sampled with them, also those of samples in
        flight. If the weights are refused, raise an EngineError and keep the old ones."""

    def probe(self) -> tuple[float, ...]:
        """Return the log-probabilities of fixed tokens under the loaded weights, for comparison
        with the probe of the learner's model."""

    def abort(self, request_id: str) -> None:
        """End a request's unfinished samples; `step` returns their completions, which have the
        tokens so far and the finish ``ABORT``. Do nothing if no sample of the request is
        unfinished."""


OnTokens = Callable[[str, int, list[int], list[float]], None]
"""Callback for tokens that were sampled: the request's id, the index of the sample, the tokens, and
their log-probabilities."""


@runtime_checkable
class TokenSource(Protocol):
    """An engine that hands out tokens as soon as they are sampled."""

    on_tokens: OnTokens | None
    """Called with the new tokens of each sample, including its end token: during `step`, and during
    `load` and `abort` with tokens that were sampled before. It must not call the engine. None for
    no callback."""


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can release its GPU memory."""

    def sleep(self) -> None:
        """Release the memory until the next request, probe or load. Raise an EngineError if a
        sample is unfinished."""


@runtime_checkable
class ExternalEngine(Protocol):
    """An engine in another process or on a server."""

    facts: dict[str, Any]
    """The engine's description of itself. The keys name and precision always exist. Unless the
    engine is an SGLang server, so do model, the fingerprint of its initial weights, and
    on_update."""

    def expect(self, probe: Probe, tolerance: float) -> None:
        """Check all following loads: `load` raises an EngineError if the engine's probe after it
        differs from ``probe()``, the probe of the learner's model, by more than ``tolerance`` nats,
        or does not change with it (`ProbeCheck`)."""

    def close(self) -> None:
        """End the engine's process, or disconnect from its server. All following calls fail."""


def require(found: Capabilities, *, repeats: bool) -> None:
    """Raise an EngineError if an engine's capabilities ``found`` are not sufficient for a run.

    Every run needs the model's log-probabilities and the version of each token. A run with
    ``repeats``, which must sample the same tokens when it is repeated, also needs
    ``counter_draws``.
    """
    rules = {
        "log-probabilities at the sampling temperature, before truncation": found.model_logprobs,
        "the version of every token": found.token_versions,
        "reproducible draws (burnish/randomness.py)": found.counter_draws or not repeats,
    }
    if missing := _broken(rules):
        remedy = "use the native engine; SGLang needs --enable-deterministic-inference for draws"
        raise EngineError(f"the engine must provide {'; and '.join(missing)}; {remedy}")


def check_request(request: Request, *, vocab_size: int, context: int) -> None:
    """Raise an EngineError that lists all problems of a request: its number of samples, its
    sampling parameters, token ids outside the vocabulary, or a prompt of the wrong length.

    ``context`` is the model's maximum number of tokens of prompt and response together. A prompt,
    including the partial response, must leave room for one more token; max_tokens may exceed the
    room.
    """
    length, p = len(request.given), request.params
    ids = np.append(request.given, p.stop_ids)
    begun = length - len(request.prompt)
    known = bool(((ids >= 0) & (ids < vocab_size)).all())
    fewest, most, think = p.min_tokens, p.max_tokens, p.think_tokens
    rules = {
        f"a prompt has 1 to {context - 1} tokens in this model, got {length}": 0 < length < context,
        f"token ids must lie in 0 … {vocab_size - 1}; is this the model's tokenizer?": known,
        f"n must be at least 1, got {request.n}": request.n >= 1,
        f"a partial response must have fewer than max_tokens = {most}, got {begun}": begun
        < max(most, 1),
        f"turn must lie in 0 … {begun}, the partial response's length, got {request.turn}": (
            0 <= request.turn <= begun
        ),
        f"position must be at least 0, got {request.position}": request.position >= 0,
        f"max_tokens must be at least 1, got {most}": most >= 1,
        f"min_tokens must lie in 0 … max_tokens, got {fewest}": 0 <= fewest <= max(most, 1),
        f"temperature must be 0 or more, got {p.temperature}": 0 <= p.temperature < float("inf"),
        f"top_p must lie in (0, 1], got {p.top_p}; 1 turns it off": 0 < p.top_p <= 1,
        f"top_k must be at least 1, got {p.top_k}": p.top_k is None or p.top_k >= 1,
        f"min_p must lie in [0, 1], got {p.min_p}; 0 turns it off": 0 <= p.min_p <= 1,
        f"repetition_penalty must be at least 0.01, got {p.repetition_penalty}; 1 turns it off": (
            0.01 <= p.repetition_penalty < float("inf")
        ),
        f"stop must hold texts, got {p.stop!r}": type(p.stop) is tuple and all(p.stop),
        f"think_tokens must lie in 1 … max_tokens − 1, got {think}": think is None
        or 0 < think < most,
        "a think budget needs think_end and think_phrase": think is None
        or bool(p.think_end and p.think_phrase),
    }
    if broken := _broken(rules):
        raise EngineError(f"request {request.request_id!r}: {'; '.join(broken)}")


def check_weights(
    weights: Weights, version: int, incarnation: int, dtype: torch.dtype | None = None
) -> None:
    """Raise an EngineError if weights must not replace the loaded ones: they come from before a
    restart of the run (their incarnation is lower), or contain NaN or infinity.

    ``version`` and ``incarnation`` are those of the loaded weights. ``dtype`` is the engine's
    precision, in which values must not overflow; None to check the values in their own precision.
    """
    finite = all(
        bool(x.to(dtype).isfinite()) for t in weights.tensors.values() for x in t.aminmax()
    )
    rules = {
        f"the run was restarted: weights of incarnation {weights.incarnation} can't follow "
        f"incarnation {incarnation}": weights.incarnation >= incarnation,
        f"weights must be finite, and version {weights.version} is not": finite,
    }
    if broken := _broken(rules):
        raise EngineError(f"{'; '.join(broken)}; version {version} stays loaded")


class ProbeCheck:
    """Compares an engine's probe after each load with the probe of the learner's model, to detect
    weights that are stale or incomplete."""

    def __init__(self, limit: float) -> None:
        """``limit``: largest difference of two log-probabilities, in nats, that rounding may
        cause."""
        self._limit = limit
        self._last: tuple[Probed, Probed] | None = None
        """The engine's last probe, and the model's probe at the load that last changed it."""

    def __call__(self, version: int, expected: Probed, found: Probed) -> None:
        """Compare ``found``, the engine's probe after it loaded ``version``, with ``expected``, the
        probe of the learner's model. Call this once after each load.

        Raise an EngineError in two cases: if a log-probability differs by more than the limit, or
        if ``found`` is the same as after the previous load although the model's probe has moved by
        more than ``MOVED`` since the load that last changed the engine's probe.
        """
        since = self._last[1] if self._last is not None and self._last[0] == found else expected
        self._last = found, since
        probed = f"log-probabilities of fixed tokens are {found[:3]} …"
        if not np.allclose(expected, found, rtol=0, atol=self._limit):
            why = f"{expected[:3]} … were expected (they may differ by {self._limit:g})"
        elif not np.allclose(expected, since, rtol=0, atol=MOVED):
            why = f"unchanged, while the expected ones moved from {since[:3]} … to {expected[:3]}"
        else:
            return
        raise EngineError(
            f"the weights that were loaded as version {version} are stale or incomplete: {probed}, "
            f"{why}; resume the run from its last checkpoint"
        )


def _broken(rules: Mapping[str, bool]) -> list[str]:
    return [rule for rule, holds in rules.items() if not holds]


Recorded = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]
"""A response's tokens, their log-probabilities and their versions."""
Ended = tuple[Finish, str | int | None, str]
"""How a response ended, the stop string or end id that ended it (or None), and its text."""


def completed(
    request: Request,
    sample: int,
    recorded: Recorded,
    ended: Ended,
    put_in: slice = slice(0),
) -> Completion:
    """Build the `Completion` record of one sample of a request.

    ``sample`` is its index in the request. ``recorded`` and ``ended`` describe the whole response,
    including a partial response that it continues. All tokens count as sampled, except those that
    the system inserted, in the slice ``put_in``, and those that the partial response marks as
    inserted.
    """
    tokens, logprobs, versions = recorded
    ids, stamps = np.array(tokens, dtype=np.int32), np.array(versions, dtype=np.int32)
    sampled = np.ones(len(ids), dtype=np.bool_)
    sampled[put_in] = False
    if request.begun is not None:
        sampled[: len(request.begun.sampled)] = request.begun.sampled
    own = ids, np.array(logprobs, dtype=np.float32), stamps, sampled
    return Completion(request.request_id, sample, *own, request.params, *ended)
