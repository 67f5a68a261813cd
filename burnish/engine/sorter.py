"""The sorting model as an engine: a request's samples are complete after one step."""

from __future__ import annotations

import numpy as np
import torch

from burnish.draws import uniforms
from burnish.engine.protocol import Capabilities, Event, Request
from burnish.engine.weights import check as check_weights
from burnish.errors import EngineError
from burnish.model.sorter import Sorter
from burnish.types import Completion, Finish, FloatArray, IntArray, Weights


class SorterEngine:
    capabilities = Capabilities(
        model_logprobs=True, token_versions=True, counter_draws=True, updates_in_flight=True
    )

    def __init__(self, model: Sorter) -> None:
        self.model = model
        self.version = self.sampled = self._incarnation = 0
        self._waiting: list[Request] = []
        self._aborted: list[Completion] = []

    @property
    def unfinished(self) -> int:
        return sum(request.n for request in self._waiting) + len(self._aborted)

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> list[Event]:
        """Sample all waiting requests that are sampled like the first."""
        events: list[Event] = [*self._aborted]
        self._aborted = []
        if self._waiting:
            first = _kind(self._waiting[0])
            alike = [request for request in self._waiting if _kind(request) == first]
            self._waiting = [request for request in self._waiting if _kind(request) != first]
            events += self._sample(alike)
        return events

    def load(self, weights: Weights) -> None:
        check_weights(weights, version=self.version, incarnation=self._incarnation)
        self.model.load_state_dict(weights.tensors)
        self.version, self._incarnation = weights.version, weights.incarnation

    def abort(self, request_id: str) -> None:
        gone = [request for request in self._waiting if request.request_id == request_id]
        if not gone:
            raise EngineError(f"request {request_id!r} is not in flight; it can't be aborted")
        self._waiting = [request for request in self._waiting if request not in gone]
        nothing = np.empty(0, np.int32), np.empty(0, np.float32)
        self._aborted += [
            self._completion(request, i, *nothing, Finish.ABORT)
            for request in gone
            for i in range(request.n)
        ]

    @torch.no_grad()
    def _sample(self, requests: list[Request]) -> list[Completion]:
        """Temperature 0 takes the likeliest numbers."""
        params, samples = requests[0].params, requests[0].n
        tokens = torch.from_numpy(np.stack([request.prompt for request in requests])).long()
        greedy = params.temperature == 0
        logits = self.model(tokens) / (1.0 if greedy else params.temperature)
        logprobs = torch.log_softmax(logits, -1)[:, None]
        logprobs = logprobs.expand(-1, samples, -1, -1)  # [requests, samples, length, numbers]
        if greedy:
            chosen = logprobs.argmax(-1)
        else:
            groups = np.array([request.group for request in requests])[:, None, None]
            place = groups, np.arange(samples)[:, None], np.arange(self.model.length)
            draws = uniforms(params.seed, requests[0].stream, *place)
            chosen = invert(logprobs, torch.from_numpy(draws))
        picked = logprobs.gather(-1, chosen[..., None]).squeeze(-1).numpy().astype(np.float32)
        ids = chosen.numpy().astype(np.int32)
        self.sampled += ids.size
        return [  # a response has as many numbers as its prompt, and is whole
            self._completion(request, i, ids[row, i], picked[row, i], Finish.STOP)
            for row, request in enumerate(requests)
            for i in range(samples)
        ]

    def _completion(
        self, request: Request, sample: int, ids: IntArray, logprobs: FloatArray, finish: Finish
    ) -> Completion:
        return Completion(
            request_id=request.request_id,
            sample_index=sample,
            token_ids=ids,
            logprobs=logprobs,
            versions=np.full(len(ids), self.version, dtype=np.int32),
            sampled=np.ones(len(ids), dtype=np.bool_),
            params=request.params,
            finish=finish,
            stop=None,
            text="".join(spell(ids)),
        )


def _kind(request: Request) -> object:
    return request.params, request.n, request.stream


def spell(ids: IntArray) -> list[str]:
    """The numbers as texts that, put together, read as a prompt does: "0 2 4"."""
    return [f" {number}" if place else str(number) for place, number in enumerate(ids)]


def invert(logprobs: torch.Tensor, draws: torch.Tensor) -> torch.Tensor:
    """The token at which the cumulative distribution passes the draw: [..., V], [...] → [...].

    In float64; a token of probability 0 never is that token.
    """
    cumulative = logprobs.double().exp().cumsum(-1)
    below = draws * cumulative[..., -1]
    last = (logprobs.isfinite() * torch.arange(logprobs.shape[-1])).amax(-1)
    return torch.minimum((cumulative <= below[..., None]).sum(-1), last)
