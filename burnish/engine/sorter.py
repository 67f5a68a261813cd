"""An engine for the sorting model. A response has a fixed length and is complete after one step."""

from __future__ import annotations

import numpy as np
import torch

from burnish.engine.native.sampler import search
from burnish.engine.protocol import Capabilities, Request, check_weights, completed
from burnish.model.sorter import Sorter
from burnish.randomness import uniforms
from burnish.types import Completion, Finish, IntArray, Weights


class SorterEngine:
    """Samples from a sorting model in memory; `load` overwrites the model's weights."""

    capabilities = Capabilities(model_logprobs=True, token_versions=True, counter_draws=True)

    def __init__(self, model: Sorter) -> None:
        self.model = model
        self.version = self.sampled = self._incarnation = 0
        self.probe = model.probe
        self._waiting: dict[str, Request] = {}
        self._aborted: list[Completion] = []

    @property
    def unfinished(self) -> int:
        return sum(request.n for request in self._waiting.values()) + len(self._aborted)

    def submit(self, request: Request) -> None:
        self._waiting[request.request_id] = request

    def step(self) -> list[Completion]:
        """Sample the whole responses of the first waiting request and of all other waiting requests
        that have the same sampling parameters, number of samples and stream. Return their
        completions, and those of aborted requests."""
        done, self._aborted = self._aborted, []
        waiting = list(self._waiting.values())
        alike = [request for request in waiting if _kind(request) == _kind(waiting[0])]
        for request in alike:
            del self._waiting[request.request_id]
        return done + self._sample(alike) if alike else done

    def load(self, weights: Weights) -> None:
        check_weights(weights, self.version, self._incarnation)
        self.model.load_state_dict(weights.tensors)
        self.version, self._incarnation = weights.version, weights.incarnation

    def abort(self, request_id: str) -> None:
        if request_id in self._waiting:
            request = self._waiting.pop(request_id)
            for i in range(request.n):
                self._aborted.append(completed(request, i, ([], [], []), (Finish.ABORT, None, "")))

    @torch.no_grad()
    def _sample(self, requests: list[Request]) -> list[Completion]:
        """Sample all responses of requests that have the same settings, and return the completions.
        Temperature 0 selects the most likely numbers."""
        params, samples = requests[0].params, requests[0].n
        tokens = torch.from_numpy(np.stack([request.prompt for request in requests])).long()
        logits = self.model(tokens) / (params.temperature or 1.0)
        logprobs = torch.log_softmax(logits, -1)[:, None]
        logprobs = logprobs.expand(-1, samples, -1, -1)  # [requests, samples, length, numbers]
        groups = np.array([request.group for request in requests])[:, None, None]
        place = groups, np.arange(samples)[:, None], np.arange(self.model.length)
        draws = torch.from_numpy(uniforms(params.seed, requests[0].stream, *place))
        chosen = search(logprobs.double().exp(), draws[..., None])[0].squeeze(-1)
        if params.temperature == 0:
            chosen = logprobs.argmax(-1)
        picked = logprobs.gather(-1, chosen[..., None]).squeeze(-1).numpy()
        ids = chosen.numpy()
        self.sampled += ids.size
        versions = np.full(self.model.length, self.version)
        found = []
        for row, request in enumerate(requests):
            for i, own in enumerate(ids[row]):  # a response has as many numbers as the prompt
                ended = Finish.STOP, None, "".join(decode_numbers(own))
                found.append(completed(request, i, (own, picked[row, i], versions), ended))
        return found


def _kind(request: Request) -> object:
    return request.params, request.n, request.stream


def decode_numbers(ids: IntArray) -> list[str]:
    """Return one text per number, with a space before all but the first: "0", " 2", " 4"."""
    return [f" {number}" if place else str(number) for place, number in enumerate(ids)]
