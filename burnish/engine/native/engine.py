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
from burnish.engine.native.cache import Cache, TokenRun, download
from burnish.engine.native.decoding import AHEAD, is_drawn_ahead
from burnish.engine.native.plain import Backend, Block, Plain
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
FEWER = 4, 2
"""Tokens per row that a GPU samples if there are no pages for more."""
PUMPED = 16
"""Samples that the host extends before it gives the device more to do."""


class Step:
    """A step that computes given tokens and draws one new token for some of their samples: a
    `plain.Block` that is queued as a whole."""

    steps = 1

    def __init__(self, samples: list[Sequence], *drawn: Tensor) -> None:
        """``drawn``: tokens and log-probabilities, [samples] each; none without samples."""
        self.samples = samples
        self._read = download(*drawn) if samples else None

    def pump(self) -> None:
        """Do nothing: the device has everything."""

    def queue(self) -> bool:
        return True

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        if self._read is None:
            return [], []
        tokens, logprobs = (drawn[:, None].tolist() for drawn in self._read())
        return tokens, logprobs


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
        on_gpu = self._cache.device.type == "cuda"
        self.scheduler = Scheduler(settings, self._cache.count, prompts_first=on_gpu)
        self._groups: dict[str, RequestGroup] = {}
        self._undelivered: list[Completion] = []
        self._block: Block | None = None
        """The block that the device has begun and the host has not read; None if there is none."""
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
        """Read the tokens that the device has begun to draw, or that the scheduler plans if there
        are none, and let it begin the next ones before that. Return the completions of samples that
        have ended, and of aborted samples."""
        with hardware.on_device(self._cache.device), torch.inference_mode():
            self._take(self._block or self._begin(self.scheduler.plan()))
        done, self._undelivered = self._undelivered, []
        return done

    def load(self, weights: Weights) -> None:
        """Load new weights, which the next step uses, or raise an EngineError and keep all old
        ones. Partial weights must contain every tensor that an earlier load has changed."""
        protocol.check_weights(weights, self.version, self._incarnation, self._cache.dtype)
        self._settle()
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
            self._settle()
        if request_id in self._groups:
            for sequence in list(self._groups[request_id].sequences):
                self._undelivered.append(self._complete(sequence, Finish.ABORT))

    def response_of(self, request_id: str) -> list[int]:
        """Return the tokens, as far as the host has read them, of the first unfinished sample of a
        request; an empty list if the request has no unfinished sample."""
        group = self._groups.get(request_id)
        return [] if group is None else group.sequences[0].response

    def _begin(self, plan: Plan) -> Block:
        """Run a plan, or begin a block of steps with it."""
        if plan.copies:
            self._cache.copy(list(plan.copies.values()))
        backend, samples, steps = self._backend, list(plan.counts), self._ahead(plan)
        if backend.sample_ahead is not None and steps > 1:
            block = backend.sample_ahead(samples, steps, None)
            self._advance(plan)
            return block
        if not samples:
            return Step([])
        hidden = backend.hidden([TokenRun(s, s.computed, plan.counts[s]) for s in samples])
        row = {sequence: i for i, sequence in enumerate(samples)}
        ready = self._advance(plan)
        if not ready:
            return Step([])
        logits = backend.logits(hidden[self._cache.tensor([row[s] for s in ready])])
        points, heat, limited = self._draws(ready, 1)
        drawn = sampler.sample_tokens(logits, points[:, 0], heat, limited, backend.weigh)
        return Step(ready, *drawn)

    def _advance(self, plan: Plan) -> list[Sequence]:
        """Record that a plan was run; return the samples that get a new token. Until this token is
        read, their last known token counts as not computed, so that a sample can always go on from
        the tokens that it has."""
        ready = self.scheduler.advance(plan)
        for sample in ready:
            sample.computed -= 1
        return ready

    def _take(self, block: Block, *, follows: bool = True) -> None:
        """Append the tokens of a block to their samples, and collect the completions of those that
        end for `step`. With ``follows``, the device first begins the next block, if there is one
        (see `_follow`), so that it does not wait for the host."""
        self._block = None  # not to be read again if a callback fails
        next_block = self._follow(block) if follows else None
        results = block.samples, *block.read()
        for number, (sequence, tokens, logprobs) in enumerate(zip(*results, strict=True)):
            if next_block is not None and number % PUMPED == 0:
                next_block.pump()
            if sequence.finish is None:  # otherwise it has ended in the block before
                self._extend(sequence, tokens, logprobs)
        goes_on = next_block is not None and any(s.finish is None for s in next_block.samples)
        self._block = next_block if goes_on else None

    def _settle(self) -> None:
        """Read the block that the device has begun, and begin no other."""
        if self._block is not None:
            with hardware.on_device(self._cache.device), torch.inference_mode():
                self._take(self._block, follows=False)

    def _follow(self, block: Block) -> Block | None:
        """Begin the block that follows another whose tokens are not read yet, and return it: a step
        with prompts after a step, or decoding steps after decoding steps.

        Return None if the tokens must be read first: if a sample could start, if one needs a token
        that is not drawn, if pages are missing, or if no sample goes on. This depends on the
        requests and on the blocks before, and never on time. Samples that turn out to have ended
        draw nothing in the block, or tokens that are discarded.
        """
        scheduler, begin = self.scheduler, self._backend.sample_ahead
        if isinstance(block, Step):
            plan = scheduler.plan_unread()
            assert not any(s.waits for s in block.samples), "it preempts no sample of the step"
            return self._begin(plan) if plan.counts else None
        alive = [sample for sample in block.samples if sample.finish is None]
        if begin is None or scheduler.some_begin or len(alive) < len(scheduler.running):
            return None
        samples = [sample for sample in alive if sample.room > block.steps]
        if not samples:
            return None
        longest = max(sample.room for sample in samples) - block.steps
        steps = min(AHEAD_OF_OTHERS if scheduler.waiting else AHEAD, longest)
        if not block.queue() or not scheduler.reserve(samples, block.steps + steps):
            return None
        return begin(samples, steps, block)

    def _ahead(self, plan: Plan) -> int:
        """Return the number of tokens that each sample of the plan draws before the next plan.

        On a GPU, the host would take longer than the model for single tokens. Therefore several
        tokens are drawn at once if the plan only decodes, no waiting sample could start, and a GPU
        can draw within the limits of all samples. There are fewer of them if other samples wait
        for those that end, or if pages are scarce. Only tokens after a stop string are discarded.
        """
        scheduler = self.scheduler
        if self._backend.sample_ahead is None or not plan.counts:
            return 1
        if not scheduler.only_decodes(plan):
            return 1
        if not all(map(is_drawn_ahead, {sequence.limits for sequence in plan.counts})):
            return 1
        longest = max(sequence.room for sequence in plan.counts)
        for steps in (AHEAD, AHEAD_OF_OTHERS, *FEWER):
            if steps < AHEAD or not scheduler.waiting:
                steps = min(steps, longest)
                if steps > 1 and scheduler.reserve(plan.counts, steps):
                    return steps
        return 1

    def _draws(self, samples: list[Sequence], steps: int) -> tuple[Tensor, Tensor, sampler.Limited]:
        return sampler.draws(samples, steps, self._cache.device)

    def _extend(self, sequence: Sequence, tokens: list[int], logprobs: list[float]) -> None:
        """Append tokens to a sample, up to the one that ends it, and complete the sample if it has
        ended. A log-probability of NaN aborts the sample."""
        sound = len(tokens)
        if math.isnan(sum(logprobs)):
            sound = next(i for i, logprob in enumerate(logprobs) if math.isnan(logprob))
        drawn = sequence.forced is None
        taken = sequence.take(tokens[:sound], logprobs, self.version)
        if sound < len(tokens) and sequence.finish is None:
            # Finite weights can still overflow. Only this sample is lost. Its pages are cleared,
            # because NaN would spread to their next holder even from masked slots.
            self._cache.clear(self.scheduler.pages.private(sequence.pages))
            sequence.finish = Finish.ABORT
        self.sampled += taken * drawn
        if taken:
            sequence.computed = len(sequence.tokens) - 1
        if sequence.finish is not None:
            self._undelivered.append(self._complete(sequence, sequence.finish))
        if self.on_tokens is not None and taken:
            own = sequence.group.request.request_id, sequence.index
            self.on_tokens(*own, tokens[:taken], logprobs[:taken])

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
