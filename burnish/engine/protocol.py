"""The protocol of every rollout engine: requests, completions, weights between any two steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from burnish.draws import Stream
from burnish.errors import EngineError
from burnish.types import Completion, Finish, IntArray, SamplingParams, Weights

if TYPE_CHECKING:
    import torch


Probed = tuple[float, ...]
"""Log-probabilities of fixed tokens."""
MOVED = 1e-3
"""Nats by which new weights may move a probe and leave that of an engine in bf16 as it was."""


@dataclass(frozen=True, eq=False)
class Request:
    request_id: str
    prompt: IntArray
    """[T] token ids"""
    n: int = 1
    """Samples of this prompt: one group."""
    params: SamplingParams = field(default_factory=SamplingParams)
    group: int = 0
    """The group's running number in the run; draws are hashed from it."""
    stream: Stream = Stream.TRAIN
    """Keeps the draws of training and of evaluation apart."""
    begun: Completion | None = None
    """The beginning of the response, which all samples go on from; None if there is none."""
    first: int = 0
    """The number of the first sample in draws, so that requests of one group may draw apart."""

    @property
    def given(self) -> IntArray:
        """The tokens before the first that is sampled."""
        begun = [] if self.begun is None else [self.begun.token_ids]
        return np.concatenate([self.prompt, *begun])


@dataclass(frozen=True)
class Capabilities:
    """An engine's promises; a run is built only if they pass `require`."""

    model_logprobs: bool
    """Log-probabilities are the model's at the sampling temperature, before any truncation."""
    token_versions: bool
    """Every token carries the version of the weights that sampled it."""
    counter_draws: bool
    """A token's random number depends on nothing but its place (`burnish/draws.py`)."""


class Server(Protocol):
    """Whoever answers requests: an engine, or several engines together."""

    @property
    def unfinished(self) -> int:
        """Samples whose completion `step` has not returned yet."""

    @property
    def sampled(self) -> int:
        """Tokens that were sampled since it was made."""

    def submit(self, request: Request) -> None: ...

    def step(self) -> list[Completion]: ...


class Engine(Server, Protocol):
    """The only thing that samples."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def version(self) -> int: ...

    def load(self, weights: Weights) -> None:
        """Take new weights, or raise an error and keep the old ones."""

    def probe(self) -> tuple[float, ...]:
        """Log-probabilities of fixed tokens with the loaded weights; a learner gives the same."""

    def abort(self, request_id: str) -> None:
        """End a request's unfinished samples, if it has any; `step` returns their tokens so far."""


@runtime_checkable
class Sleeper(Protocol):
    """An engine that can give its memory on a GPU away."""

    def sleep(self) -> None:
        """Give it away until the next call; no sample may be unfinished."""


def require(found: Capabilities, *, repeats: bool) -> None:
    """Refuse an engine whose samples can't be learned from, or, if a result has to repeat, one
    whose draws do not."""
    rules = {
        "log-probabilities at the sampling temperature, before truncation": found.model_logprobs,
        "the version of every token": found.token_versions,
        "draws that repeat, of burnish/draws.py": found.counter_draws or not repeats,
    }
    if missing := _broken(rules):
        remedy = "use the native engine; SGLang needs --enable-deterministic-inference for draws"
        raise EngineError(f"the engine must give {'; and '.join(missing)}; {remedy}")


def check(request: Request, *, vocab_size: int, context: int) -> None:
    """Refuse a request that no engine can serve."""
    length, p = len(request.given), request.params
    ids = np.append(request.given, p.stop_ids)
    known = bool(((ids >= 0) & (ids < vocab_size)).all())
    fewest, most, think = p.min_tokens, p.max_tokens, p.think_tokens
    rules = {
        f"a prompt has 1 to {context - 1} tokens in this model, got {length}": 0 < length < context,
        f"token ids must lie in 0 … {vocab_size - 1}; is this the model's tokenizer?": known,
        f"n must be at least 1, got {request.n}": request.n >= 1,
        f"a response that has begun must have fewer than max_tokens = {most}, got "
        f"{length - len(request.prompt)}": length - len(request.prompt) < max(most, 1),
        f"max_tokens must be at least 1, got {most}": most >= 1,
        f"min_tokens must lie in 0 … max_tokens, got {fewest}": 0 <= fewest <= max(most, 1),
        f"temperature must be 0 or more, got {p.temperature}": 0 <= p.temperature < float("inf"),
        f"top_p must lie in (0, 1], got {p.top_p}; 1 turns it off": 0 < p.top_p <= 1,
        f"top_k must be at least 1, got {p.top_k}": p.top_k is None or p.top_k >= 1,
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
    """Refuse weights of an incarnation before the loaded one, or not finite once in `dtype`.

    version: of the loaded weights; dtype: None if the weights are loaded as they are.
    """
    finite = all(
        bool(x.to(dtype).isfinite()) for t in weights.tensors.values() for x in t.aminmax()
    )
    rules = {
        f"the run was restarted: weights of incarnation {weights.incarnation} must not follow "
        f"incarnation {incarnation}": weights.incarnation >= incarnation,
        f"weights must be finite, and those of version {weights.version} are not": finite,
    }
    if broken := _broken(rules):
        raise EngineError(f"{'; '.join(broken)}; version {version} stays loaded")


class ProbeCheck:
    """Holds an engine's probes, load by load, to those of the model that its weights come from."""

    def __init__(self, limit: float) -> None:
        """``limit``: how far the two may differ by rounding."""
        self._limit = limit
        self._last: tuple[Probed, Probed] | None = None
        """The engine's probe, and the model's when the engine's last changed."""

    def __call__(self, version: int, expected: Probed, found: Probed) -> None:
        """Refuse an engine whose probe is ``found``, once it has loaded ``version``, if it differs
        from the ``expected`` one by more than the limit, or has not changed while that one has."""
        since = self._last[1] if self._last is not None and self._last[0] == found else expected
        self._last = found, since
        told = f"log-probabilities of fixed tokens are {found[:3]} …"
        if not np.allclose(expected, found, rtol=0, atol=self._limit):
            why = f"{expected[:3]} … were expected (they may differ by {self._limit:g})"
        elif not np.allclose(expected, since, rtol=0, atol=MOVED):
            why = f"as they were while the expected ones moved from {since[:3]} … to {expected[:3]}"
        else:
            return
        raise EngineError(
            f"the weights that were loaded as version {version} are stale or torn: {told}, {why}; "
            "resume the run from its last checkpoint"
        )


def _broken(rules: Mapping[str, bool]) -> list[str]:
    return [rule for rule, holds in rules.items() if not holds]


Recorded = tuple[npt.ArrayLike, npt.ArrayLike, npt.ArrayLike]
"""A response's tokens, their log-probabilities and their versions."""
Ended = tuple[Finish, str | int | None, str]
"""How a response ended, the stop string or end id that ended it, and its text."""


def completed(
    request: Request,
    sample: int,
    recorded: Recorded,
    ended: Ended,
    put_in: slice = slice(0),
) -> Completion:
    """A request's sample, all of whose tokens were sampled but those that were ``put_in`` and some
    of the response's beginning."""
    tokens, logprobs, versions = recorded
    ids, stamps = np.array(tokens, dtype=np.int32), np.array(versions, dtype=np.int32)
    sampled = np.ones(len(ids), dtype=np.bool_)
    sampled[put_in] = False
    if request.begun is not None:
        sampled[: len(request.begun.sampled)] = request.begun.sampled
    own = ids, np.array(logprobs, dtype=np.float32), stamps, sampled
    return Completion(request.request_id, sample, *own, request.params, *ended)
