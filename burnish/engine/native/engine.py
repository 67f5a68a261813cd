"""The native rollout engine: continuous batching over a paged cache, with the learner's model code.

submit ──► Scheduler.plan ──► model ──► sample ──► Sequence.take ──► completions
                 ▲                                      │
                 └──────────── tokens, freed pages ◄────┘
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from burnish.engine import protocol
from burnish.engine.native import sampler
from burnish.engine.native.cache import Cache, TokenRun
from burnish.engine.native.decoding import AHEAD, is_drawn_ahead
from burnish.engine.native.plain import Backend, Plain
from burnish.engine.native.scheduler import Plan, Scheduler
from burnish.engine.native.sequence import RequestGroup, Sequence
from burnish.engine.protocol import Capabilities, OnTokens, Request
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError, ModelError
from burnish.machine import hardware
from burnish.model.checkpoint import load_hf_state
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import Transformer
from burnish.types import Completion, Finish, Weights

AHEAD_OF_OTHERS = 8
"""Tokens per row that a GPU samples before the host reads them, while other samples wait. A row
that ends leaves half of them unused on average."""


class NativeEngine:
    """Samples with burnish's own model in memory, on its device and in its precision. `load`
    overwrites the model's weights."""

    capabilities = Capabilities(model_logprobs=True, token_versions=True, counter_draws=True)

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        settings: EngineSettings = EngineSettings(),
    ) -> None:
        """Allocate the cache, and choose the backend for the model's device.

        Without a tokenizer, completions have no text and end at stop ids or at their limit.
        """
        self._model, self._tokenizer = model, tokenizer
        self._cache = Cache(model, settings.kv_bytes, settings.page_size)
        self._backend = choose_backend(model, self._cache, settings.max_running)
        self.scheduler = Scheduler(settings, self._cache.count)
        self._groups: dict[str, RequestGroup] = {}
        self._undelivered: list[Completion] = []
        self.version = self.sampled = self._incarnation = 0
        self._loaded: set[str] = set()
        """Names of the tensors that any load has changed."""
        self.probe = model.probe
        self.on_tokens: OnTokens | None = None

    @property
    def unfinished(self) -> int:
        queued = len(self.scheduler.waiting) + len(self.scheduler.running)
        return queued + len(self._undelivered)

    def submit(self, request: Request) -> None:
        """Queue a request. Raise an EngineError if it is invalid, or if the cache is too small for
        one of its samples. A request with stop strings or a think budget needs the engine's
        tokenizer."""
        config, pages = self._model.config, self.scheduler.pages
        assert request.request_id not in self._groups, f"{request.request_id} is in flight"
        protocol.check_request(request, vocab_size=config.vocab_size, context=config.context)
        texts = request.params.stop or request.params.think_tokens
        assert self._tokenizer or not texts, "stop strings and think budgets need a tokenizer"
        group = RequestGroup(request, self._tokenizer, config.context)
        if pages.needed(len(request.prompt) + group.limit - 1) > pages.count:
            raise EngineError(
                f"request {request.request_id!r}: one sample must fit the cache of "
                f"{pages.count * pages.size} tokens, got a prompt of {len(request.prompt)} and up "
                f"to {group.limit} more; raise kv_bytes or lower max_tokens"
            )
        self._groups[request.request_id] = group
        self.scheduler.add(group)

    def step(self) -> list[Completion]:
        """Compute the tokens that the scheduler plans and sample the next ones. Return the
        completions of samples that have ended, and of aborted samples."""
        done, self._undelivered = self._undelivered, []
        plan = self.scheduler.plan()
        if plan.counts:
            with hardware.on_device(self._cache.device):
                results = self._run(plan)
            for sequence, tokens, logprobs in zip(*results, strict=True):
                self._extend(sequence, tokens, logprobs)
                if sequence.finish is not None:
                    done.append(self._complete(sequence, sequence.finish))
        return done

    def load(self, weights: Weights) -> None:
        """Load new weights, which the next step uses, or raise an EngineError and keep all old
        ones. Partial weights must contain every tensor that an earlier load has changed."""
        protocol.check_weights(weights, self.version, self._incarnation, self._cache.dtype)
        try:
            load_hf_state(self._model, weights.tensors, self._named(weights))
        except ModelError as error:
            raise EngineError(f"{error}; version {self.version} stays loaded") from error
        self._loaded |= weights.tensors.keys()
        self._backend.update()
        self.scheduler.update()
        self.version, self._incarnation = weights.version, weights.incarnation

    def _named(self, weights: Weights) -> set[str] | None:
        """Return the names of the tensors that weights must contain; None for all.

        Partial weights must contain every tensor that any load has changed, so that no token comes
        from a mixture of versions.
        """
        return self._loaded | weights.tensors.keys() if weights.is_partial else None

    def abort(self, request_id: str) -> None:
        """End a request's unfinished samples; the next step returns completions with their tokens
        so far."""
        if request_id in self._groups:
            for sequence in list(self._groups[request_id].sequences):
                self._undelivered.append(self._complete(sequence, Finish.ABORT))

    def response_of(self, request_id: str) -> list[int]:
        """Return the tokens so far of the first unfinished sample of a request; an empty list if
        the request has no unfinished sample."""
        group = self._groups.get(request_id)
        return [] if group is None else group.sequences[0].response

    @torch.inference_mode()
    def _run(self, plan: Plan) -> tuple[list[Sequence], list[list[int]], list[list[float]]]:
        """Compute the tokens of a plan, and sample the next tokens of samples that are ready.
        Return these samples, their new tokens, and the log-probabilities."""
        if plan.copies:
            self._cache.copy(list(plan.copies.values()))
        backend, samples, steps = self._backend, list(plan.counts), self._ahead(plan)
        if backend.sample_ahead is not None and steps > 1:
            tokens, logprobs = backend.sample_ahead(samples, steps)
            self.scheduler.advance(plan)
            return samples, tokens, logprobs
        hidden = backend.hidden([TokenRun(s, s.computed, plan.counts[s]) for s in samples])
        row = {sequence: i for i, sequence in enumerate(samples)}
        ready = self.scheduler.advance(plan)
        if not ready:
            return [], [], []
        logits = backend.logits(hidden[self._cache.tensor([row[s] for s in ready])])
        points, heat, limited = self._draws(ready, 1)
        drawn, found = sampler.sample_tokens(logits, points[:, 0], heat, limited, backend.weigh)
        return ready, drawn[:, None].tolist(), found[:, None].tolist()

    def _ahead(self, plan: Plan) -> int:
        """Return the number of tokens that each sample of the plan draws before the next plan.

        On a GPU, the host would take longer than the model for single tokens. Therefore several
        tokens are drawn at once if the plan only decodes, no waiting sample could start, and a GPU
        can draw within the limits of all samples. There are fewer of them if other samples wait
        for those that end. Only tokens after a stop string are discarded.
        """
        scheduler = self.scheduler
        if self._backend.sample_ahead is None or not scheduler.only_decodes(plan):
            return 1
        if not all(map(is_drawn_ahead, {sequence.limits for sequence in plan.counts})):
            return 1
        longest = max(sequence.room for sequence in plan.counts)
        for steps in (AHEAD, AHEAD_OF_OTHERS):
            if steps < AHEAD or not scheduler.waiting:
                steps = min(steps, longest)
                if steps > 1 and scheduler.reserve(plan, steps):
                    return steps
        return 1

    def _draws(self, samples: list[Sequence], steps: int) -> tuple[Tensor, Tensor, sampler.Limited]:
        return sampler.draws(samples, steps, self._cache.device)

    def _extend(self, sequence: Sequence, tokens: list[int], logprobs: list[float]) -> None:
        """Append tokens to a sample, up to the one that ends it. A log-probability of NaN aborts
        the sample."""
        sound = len(tokens)
        if math.isnan(sum(logprobs)):
            sound = next(i for i, logprob in enumerate(logprobs) if math.isnan(logprob))
        drawn = sequence.forced is None
        taken = sequence.take(tokens[:sound], logprobs, self.version)
        if self.on_tokens is not None and taken:
            own = sequence.group.request.request_id, sequence.index
            self.on_tokens(*own, tokens[:taken], logprobs[:taken])
        if sound < len(tokens) and sequence.finish is None:
            # Finite weights can still overflow. Only this sample is lost. Its pages are cleared,
            # because NaN would spread to their next holder even from masked slots.
            holders = self.scheduler.pages.holders
            self._cache.clear([page for page in sequence.pages if holders[page] == 1])
            sequence.finish = Finish.ABORT
        self.sampled += taken * drawn
        sequence.computed += max(0, taken - 1)

    def _complete(self, sequence: Sequence, finish: Finish) -> Completion:
        group = sequence.group
        self.scheduler.finish(sequence)
        group.sequences.remove(sequence)
        if not group.sequences:
            del self._groups[group.request.request_id]
        return sequence.complete(finish)


def choose_backend(model: Transformer, cache: Cache, rows: int) -> Backend:
    """Build the fastest backend for the model's device and precision. ``rows``: maximum number of
    samples that decode at the same time."""
    if cache.device.type == "cpu" and cache.dtype in (torch.float32, torch.bfloat16):
        from burnish.engine.native.cpu import Cpu

        return Cpu(model, cache)
    if cache.device.type == "cuda":
        from burnish.engine.native import cuda

        if cuda.usable(cache.width):
            return cuda.Cuda(model, cache, rows)
    return Plain(model, cache)
