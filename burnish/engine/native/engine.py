"""The native rollout engine: continuous batching over a paged cache, on the learner's own model.

submit ──► Scheduler.plan ──► model ──► sample ──► Sequence.take ──► completions
                 ▲                                      │
                 └──────────── tokens, freed pages ◄────┘
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from burnish.engine import protocol, sampler
from burnish.engine.cache import Cache, Run
from burnish.engine.plain import Backend, Plain
from burnish.engine.protocol import Capabilities, Request
from burnish.engine.scheduler import EngineSettings, Plan, Scheduler
from burnish.engine.sequence import ANY, GREEDY, RequestGroup, Sequence
from burnish.errors import EngineError, ModelError
from burnish.model.checkpoint import load_hf_state
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import Transformer
from burnish.types import Completion, Finish, Weights

AHEAD = 8
"""Tokens that a GPU samples of each row before its host looks at them: rows that end run on for
half of that on average."""


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
        self._model, self._tokenizer = model, tokenizer
        self._cache = Cache(model, settings.kv_bytes, settings.page_size)
        self._backend = choose_backend(model, self._cache, settings.max_running)
        self.scheduler = Scheduler(settings, self._cache.count)
        self._groups: dict[str, RequestGroup] = {}
        self._undelivered: list[Completion] = []
        self.version = self.sampled = self._incarnation = 0
        self._loaded: set[str] = set()
        """The tensors that any load has changed."""
        self.probe = model.probe

    @property
    def unfinished(self) -> int:
        queued = len(self.scheduler.waiting) + len(self.scheduler.running)
        return queued + len(self._undelivered)

    def submit(self, request: Request) -> None:
        config, pages = self._model.config, self.scheduler.pages
        assert request.request_id not in self._groups, f"{request.request_id} is in flight"
        protocol.check(request, vocab_size=config.vocab_size, context=config.context)
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
        """Run the model, a few times at most -> the samples that are complete."""
        done, self._undelivered = self._undelivered, []
        plan = self.scheduler.plan()
        if plan.counts:
            for sequence, tokens, logprobs in zip(*self._run(plan), strict=True):
                self._extend(sequence, tokens, logprobs)
                if sequence.finish is not None:
                    done.append(self._complete(sequence, sequence.finish))
        return done

    def load(self, weights: Weights) -> None:
        """New weights from the next step on: all of them, or an error and the old ones stay."""
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
        """The tensors that weights must name, None for all: a part of them is enough if the others
        are as they were at first, so that no token comes from a mixture of versions."""
        return self._loaded | weights.tensors.keys() if weights.is_partial else None

    def abort(self, request_id: str) -> None:
        """End a request's unfinished samples; the next step returns their tokens so far."""
        if request_id in self._groups:
            for sequence in list(self._groups[request_id].sequences):
                self._undelivered.append(self._complete(sequence, Finish.ABORT))

    @torch.inference_mode()
    def _run(self, plan: Plan) -> tuple[list[Sequence], list[list[int]], list[list[float]]]:
        """-> samples that have new tokens, the tokens of each, and their log-probabilities."""
        if plan.copies:
            self._cache.copy(list(plan.copies.values()))
        backend, samples, steps = self._backend, list(plan.counts), self._ahead(plan)
        if backend.sample_ahead is not None and steps > 1:
            tokens, logprobs = backend.sample_ahead(samples, *self._draws(samples, steps))
            self.scheduler.advance(plan)
            return samples, tokens.tolist(), logprobs.tolist()
        hidden = backend.hidden([Run(s, s.computed, plan.counts[s]) for s in samples])
        row = {sequence: i for i, sequence in enumerate(samples)}
        ready = self.scheduler.advance(plan)
        if not ready:
            return [], [], []
        logits = backend.logits(hidden[self._cache.tensor([row[s] for s in ready])])
        points, heat, limited = self._draws(ready, 1)
        tokens, logprobs = sampler.sample(logits, points[:, 0], heat, limited, backend.weigh)
        return ready, tokens[:, None].tolist(), logprobs[:, None].tolist()

    def _ahead(self, plan: Plan) -> int:
        """Tokens of each sample that are sampled before the next plan.

        Several on a GPU, whose host would otherwise take longer than the model, if the plan only
        decodes, no sample could begin, and tokens are drawn alike, by chance or greedily. Tokens
        after an end are dropped.
        """
        if self._backend.sample_ahead is None or not self.scheduler.only_decodes(plan):
            return 1
        steps = min(AHEAD, *(sequence.room for sequence in plan.counts))
        alike = {sequence.limits for sequence in plan.counts} in ({ANY}, {GREEDY})
        return steps if alike and steps > 1 and self.scheduler.reserve(plan, steps) else 1

    def _draws(self, samples: list[Sequence], steps: int) -> tuple[Tensor, Tensor, sampler.Limited]:
        return sampler.draws(samples, steps, self._cache.device)

    def _extend(self, sequence: Sequence, tokens: list[int], logprobs: list[float]) -> None:
        """A sample's next tokens, up to the one that ends it."""
        sound = len(tokens)
        if math.isnan(sum(logprobs)):
            sound = next(i for i, logprob in enumerate(logprobs) if math.isnan(logprob))
        drawn = sequence.forced is None
        taken = sequence.take(tokens[:sound], logprobs, self.version)
        if sound < len(tokens) and sequence.finish is None:
            # Finite weights can still overflow. Only this sample is lost, and its pages are
            # cleaned: their next holder would read NaN even where it is masked.
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
    """By the model's device and precision; rows: samples that decode at once, at most."""
    if cache.device.type == "cpu" and cache.dtype in (torch.float32, torch.bfloat16):
        from burnish.engine.cpu import Cpu

        return Cpu(model, cache)
    if cache.device.type == "cuda":
        from burnish.engine import cuda

        if cuda.usable(cache.width):
            return cuda.Cuda(model, cache, rows)
    return Plain(model, cache)
