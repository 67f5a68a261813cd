"""The native rollout engine: continuous batching over a paged cache, on the learner's own model.

submit ──► Scheduler.plan ──► model ──► sample ──► Reader ──► events
                 ▲                                   │
                 └────────── tokens, freed pages ◄───┘
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from burnish.draws import uniforms
from burnish.engine import protocol, sampler
from burnish.engine.cache import Cache, Run
from burnish.engine.pages import Pages
from burnish.engine.plain import Backend, Plain
from burnish.engine.protocol import Capabilities, Event, Request, TextEvent
from burnish.engine.sampler import Draw
from burnish.engine.scheduler import Plan, Scheduler
from burnish.engine.sequence import RequestGroup, Sequence
from burnish.engine.weights import check as check_weights
from burnish.errors import EngineError, ModelError
from burnish.model.checkpoint import load_hf_state
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import Transformer
from burnish.types import Completion, Finish, Weights

AHEAD = 8
"""Tokens that a GPU samples of each row before its host looks at them: rows that end run on for
half of that on average."""


@dataclass(frozen=True)
class EngineSettings:
    kv_bytes: int = 1 << 30
    """Memory for keys and values; samples that do not fit wait, or are computed again later."""
    page_size: int = 16
    """Tokens per page, a multiple of 4."""
    max_running: int = 128
    """Samples that decode at once."""
    step_tokens: int = 1024
    """Tokens per step; longer prompts are computed in chunks."""
    on_update: Literal["keep", "recompute"] = "recompute"
    """Whether samples in flight keep their caches when weights are loaded."""


class NativeEngine:
    """Runs in the model's precision and on its device. It owns the model: `load` writes to it."""

    capabilities = Capabilities(model_logprobs=True, token_versions=True, counter_draws=True)

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        settings: EngineSettings = EngineSettings(),
    ) -> None:
        """Without a tokenizer, completions have no text and end by stop ids or length alone."""
        self.settings, self._model, self._tokenizer = settings, model, tokenizer
        weight = model.embed.weight
        page_bytes = Cache.page_bytes(model.config, settings.page_size, weight.dtype)
        pages = Pages(settings.kv_bytes // page_bytes, settings.page_size)
        self._cache = Cache(model.config, pages.count, pages.size, weight.dtype, weight.device)
        self._backend = choose_backend(model, self._cache, settings.max_running)
        self.scheduler = Scheduler(
            pages,
            max_running=settings.max_running,
            step_tokens=settings.step_tokens,
            keep=settings.on_update == "keep",
        )
        self._groups: dict[str, RequestGroup] = {}
        self._undelivered: list[Completion] = []
        self.version = self.sampled = self._incarnation = 0

    @property
    def unfinished(self) -> int:
        queued = len(self.scheduler.waiting) + len(self.scheduler.running)
        return queued + len(self._undelivered)

    def submit(self, request: Request) -> None:
        config, pages = self._model.config, self.scheduler.pages
        if request.request_id in self._groups:
            raise EngineError(f"request_id must be new, {request.request_id!r} is in flight")
        has_text = self._tokenizer is not None
        protocol.check(
            request, vocab_size=config.vocab_size, context=config.context, has_text=has_text
        )
        group = RequestGroup(request, self._tokenizer, config.context)
        limit = group.sequences[0].reader.limit
        if pages.needed(len(request.prompt) + limit - 1) > pages.count:
            raise EngineError(
                f"request {request.request_id!r}: one sample must fit the cache of "
                f"{pages.count * pages.size} tokens, got a prompt of {len(request.prompt)} and up "
                f"to {limit} more; raise kv_bytes or lower max_tokens"
            )
        self._groups[request.request_id] = group
        self.scheduler.add(group)

    def step(self) -> list[Event]:
        """Run the model, a few times at most -> texts and completions."""
        events: list[Event] = [*self._undelivered]
        self._undelivered = []
        plan = self.scheduler.plan()
        if plan.counts:
            for sequence, tokens, logprobs in zip(*self._run(plan), strict=True):
                events += self._extend(sequence, tokens, logprobs)
        return events

    def load(self, weights: Weights) -> None:
        """New weights from the next step on: all of them, or an error and the old ones stay."""
        loaded = {"version": self.version, "incarnation": self._incarnation}
        check_weights(weights, **loaded, dtype=self._cache.dtype)
        try:
            load_hf_state(self._model, weights.tensors)
        except ModelError as error:
            raise EngineError(f"{error}; version {self.version} stays loaded") from error
        self._backend.update()
        self.scheduler.update()
        self.version, self._incarnation = weights.version, weights.incarnation

    def abort(self, request_id: str) -> None:
        """End a request's unfinished samples; the next step returns their tokens so far."""
        if request_id not in self._groups:
            raise EngineError(f"request {request_id!r} is not in flight; it can't be aborted")
        for sequence in list(self._groups[request_id].sequences):
            self._undelivered.append(self._complete(sequence, Finish.ABORT))

    @torch.inference_mode()
    def _run(self, plan: Plan) -> tuple[list[Sequence], list[list[int]], list[list[float]]]:
        """-> samples that have new tokens, the tokens of each, and their log-probabilities."""
        if plan.copies:
            self._cache.copy(list(plan.copies.values()))
        steps, sample_ahead = self._ahead(plan), self._backend.sample_ahead
        if steps > 1 and sample_ahead is not None:
            samples, device = list(plan.counts), self._cache.device
            heat = [sequence.group.request.params.temperature for sequence in samples]
            points = torch.from_numpy(_points(samples, steps)).to(device)
            temperature = torch.tensor(heat, device=device) if heat[0] else None
            tokens, logprobs = sample_ahead(samples, points, temperature)
            self.scheduler.advance(plan)
            return samples, tokens.tolist(), logprobs.tolist()
        runs = [Run(sequence, sequence.computed, n) for sequence, n in plan.counts.items()]
        hidden, row = self._backend.hidden(runs), {s: i for i, s in enumerate(plan.counts)}
        ready = self.scheduler.advance(plan)
        if not ready:
            return [], [], []
        logits = self._backend.logits(hidden[self._cache.tensor([row[s] for s in ready])])
        tokens, logprobs = sampler.sample(logits, _draws(ready), self._backend.weigh)
        return ready, tokens[:, None].tolist(), logprobs[:, None].tolist()

    def _ahead(self, plan: Plan) -> int:
        """Tokens of each sample that are sampled before the next plan.

        Several on a GPU, whose host would otherwise take longer than the model, if the plan only
        decodes, no sample could begin, and no token has to be read on the way: none is streamed,
        held back or left out. Tokens after an end are dropped.
        """
        if self._backend.sample_ahead is None or not self.scheduler.only_decodes(plan):
            return 1
        ahead, greedy = AHEAD, set()
        for sequence in plan.counts:
            ahead = min(ahead, sequence.reader.room)
            if ahead < 2 or not sequence.reader.plain:
                return 1
            greedy.add(not sequence.group.request.params.temperature)
        return ahead if len(greedy) == 1 and self.scheduler.reserve(plan, ahead) else 1

    def _extend(self, sequence: Sequence, tokens: list[int], logprobs: list[float]) -> list[Event]:
        """A sample's next tokens, up to the one that ends it."""
        reader, request, events = sequence.reader, sequence.group.request, list[Event]()
        sound = len(tokens)
        if math.isnan(sum(logprobs)):
            sound = next(i for i, logprob in enumerate(logprobs) if math.isnan(logprob))
        taken = reader.take(tokens[:sound])
        if sound < len(tokens) and reader.finish is None:
            # Finite weights can still overflow. Only this sample is lost, and its pages are
            # cleaned: their next holder would read NaN even where it is masked.
            holders = self.scheduler.pages.holders
            self._cache.clear([page for page in sequence.pages if holders[page] == 1])
            reader.finish = Finish.ABORT
        self.sampled += taken
        sequence.tokens += tokens[:taken]
        sequence.logprobs += logprobs[:taken]
        sequence.versions += [self.version] * taken
        sequence.computed += max(0, taken - 1)
        if request.streamed:
            events.append(TextEvent(request.request_id, sequence.index, reader.show()))
        if reader.finish is not None:
            events.append(self._complete(sequence, reader.finish))
        return events

    def _complete(self, sequence: Sequence, finish: Finish) -> Completion:
        group = sequence.group
        self.scheduler.finish(sequence)
        group.sequences.remove(sequence)
        if not group.sequences:
            del self._groups[group.request.request_id]
        recorded = sequence.response, sequence.logprobs, sequence.versions
        return sequence.reader.completion(*recorded, finish)


def choose_backend(model: Transformer, cache: Cache, rows: int) -> Backend:
    """By the model's device and precision; rows: samples that decode at once, at most."""
    if cache.device.type == "cpu" and cache.dtype in (torch.float32, torch.bfloat16):
        from burnish.engine.cpu import Cpu

        return Cpu(model, cache)
    if cache.device.type == "cuda":
        from burnish.engine import cuda

        if cuda.usable(cache.width):
            return cuda.Cuda(model, cache, rows)
    return Plain(model, cache)


def _points(ready: list[Sequence], steps: int) -> npt.NDArray[np.float64]:
    """[samples, steps] in [0, 1): they choose the next tokens of each sample."""
    places = []
    for sequence in ready:
        request = sequence.group.request
        place = request.params.seed, request.stream, request.group, sequence.index
        places.append((*place, len(sequence.logprobs)))
    seed, stream, group, sample, position = np.array(places).T[..., None]
    return uniforms(seed, stream, group, sample, position + np.arange(steps))


def _draws(ready: list[Sequence]) -> list[Draw]:
    draws = []
    for sequence, point in zip(ready, _points(ready, 1)[:, 0].tolist(), strict=True):
        params, reader = sequence.group.request.params, sequence.reader
        banned = reader.end_ids if reader.held else frozenset()
        draws.append(Draw(point, params.temperature, params.top_k, params.top_p, banned))
    return draws
