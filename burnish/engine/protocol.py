"""The protocol of every rollout engine: requests, events, weights between any two steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from burnish.draws import Stream
from burnish.errors import EngineError
from burnish.types import Completion, IntArray, SamplingParams, Weights


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
    streamed: bool = True
    """Whether every token is an event; a completion always is."""


@dataclass(frozen=True)
class TokenEvent:
    """A token was sampled."""

    request_id: str
    sample_index: int
    token_id: int
    logprob: float
    version: int
    text: str
    """What can be shown now: whole characters that no stop string can still cut off."""


Event = TokenEvent | Completion


@dataclass(frozen=True)
class Capabilities:
    """What an engine really does; whoever builds a run calls `require`."""

    model_logprobs: bool
    """Log-probabilities are the model's at the sampling temperature, before any truncation."""
    token_versions: bool
    """Every token carries the version of the weights that sampled it."""
    counter_draws: bool
    """A token's random number depends on nothing but its place (`burnish/draws.py`)."""
    updates_in_flight: bool
    """`load` is allowed while samples are unfinished."""


class Engine(Protocol):
    """The only thing that samples."""

    @property
    def capabilities(self) -> Capabilities: ...

    @property
    def version(self) -> int: ...

    @property
    def unfinished(self) -> int:
        """Samples whose completion `step` has not returned yet."""
        ...

    @property
    def sampled(self) -> int:
        """Tokens that were sampled since the engine was made."""
        ...

    def submit(self, request: Request) -> None: ...

    def step(self) -> list[Event]: ...

    def load(self, weights: Weights) -> None:
        """Take new weights, or raise an error and keep the old ones."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request's unfinished samples; `step` returns their tokens so far."""
        ...


def require(found: Capabilities, *, repeats: bool) -> None:
    """Refuse an engine whose samples can't be learned from, or, if a result has to repeat, one
    whose draws do not."""
    rules = {
        "log-probabilities at the sampling temperature, before truncation": found.model_logprobs,
        "the version of every token": found.token_versions,
        "draws that repeat, of burnish/draws.py": found.counter_draws or not repeats,
    }
    missing = [rule for rule, holds in rules.items() if not holds]
    if missing:
        raise EngineError(f"the engine must give {'; and '.join(missing)}; use the native engine")


def check(request: Request, *, vocab_size: int, context: int, has_text: bool) -> None:
    """Refuse what no engine can serve; the message says the rule, the value and the remedy."""
    rule = _broken_rule(request, vocab_size, context, has_text)
    if rule is not None:
        raise EngineError(f"request {request.request_id!r}: {rule}")


def _broken_rule(request: Request, vocab: int, context: int, has_text: bool) -> str | None:
    prompt, p = np.asarray(request.prompt), request.params
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        return f"prompt must be a flat array of token ids, got {prompt.dtype}{list(prompt.shape)}"
    if prompt.size == 0:
        return "the prompt must hold at least one token, got 0; begin with the model's start token"
    if prompt.min() < 0 or prompt.max() >= vocab:
        worst = prompt.max() if prompt.max() >= vocab else prompt.min()
        return f"token ids must lie in 0 … {vocab - 1}, got {worst}; is this the model's tokenizer?"
    if prompt.size >= context:
        return (
            f"the prompt must leave room in the context of {context} tokens, got {prompt.size}; "
            "shorten it or use a model with a longer context"
        )
    if request.n < 1:
        return f"n must be at least 1, got {request.n}"
    return _broken_setting(p, vocab, has_text)


def _broken_setting(p: SamplingParams, vocab: int, has_text: bool) -> str | None:
    if p.max_tokens < 1:
        return f"max_tokens must be at least 1, got {p.max_tokens}"
    if not 0 <= p.min_tokens <= p.max_tokens:
        return f"min_tokens must lie in 0 … max_tokens = {p.max_tokens}, got {p.min_tokens}"
    if not 0 <= p.temperature < float("inf"):
        return f"temperature must be 0 (greedy) or positive and finite, got {p.temperature}"
    if not 0 < p.top_p <= 1:
        return f"top_p must lie in (0, 1], got {p.top_p}; 1 turns it off"
    if p.top_k is not None and p.top_k < 1:
        return f"top_k must be at least 1, got {p.top_k}; None turns it off"
    stops: object = p.stop
    if not isinstance(stops, tuple) or not all(isinstance(s, str) and s for s in stops):
        return (
            f"stop must be a tuple of texts that are not empty, got {stops!r}; ids go to stop_ids"
        )
    if p.stop and not has_text:
        return f"stop strings need a tokenizer, got {p.stop!r}; use stop_ids or give the engine one"
    for token in p.stop_ids:
        if not isinstance(token, int | np.integer) or not 0 <= token < vocab:
            return f"stop_ids must be token ids in 0 … {vocab - 1}, got {token!r}"
    return None
