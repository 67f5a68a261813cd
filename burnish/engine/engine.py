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
from burnish.engine import protocol
from burnish.engine.cache import Cache, Run
from burnish.engine.pages import Pages
from burnish.engine.plain import Backend, Plain
from burnish.engine.protocol import Capabilities, Event, Request, TokenEvent
from burnish.engine.reader import Reader
from burnish.engine.sampler import Draw
from burnish.engine.scheduler import Plan, Scheduler
from burnish.engine.sequence import Group, Sequence
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
    """What `load` does to the caches of samples in flight."""

    def __post_init__(self) -> None:
        for name in ("kv_bytes", "page_size", "max_running", "step_tokens"):
            if getattr(self, name) < 1:
                raise EngineError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.page_size % 4:
            raise EngineError(f"page_size must be a multiple of 4, got {self.page_size}")
        if self.on_update not in ("keep", "recompute"):
            raise EngineError(f"on_update must be 'keep' or 'recompute', got {self.on_update!r}")


class NativeEngine:
    """Runs in the model's precision and on its device. It owns the model: `load` writes to it."""

    capabilities = Capabilities(
        model_logprobs=True, token_versions=True, counter_draws=True, updates_in_flight=True
    )

    def __init__(
        self,
        model: Transformer,
        tokenizer: Tokenizer | None = None,
        settings: EngineSettings = EngineSettings(),
        *,
        version: int = 0,
    ) -> None:
        """Without a tokenizer, completions have no text and end by stop ids or length alone."""
        self.settings, self._model, self._tokenizer = settings, model, tokenizer
        weight = model.embed.weight
        page_bytes = Cache.page_bytes(model.config, settings.page_size, weight.dtype)
        pages = Pages(settings.kv_bytes // page_bytes, settings.page_size)
        if not pages.count:
            raise EngineError(
                f"kv_bytes must hold at least one page of {page_bytes} bytes, "
                f"got {settings.kv_bytes}; raise kv_bytes or lower page_size"
            )
        self._cache = Cache(model.config, pages.count, pages.size, weight.dtype, weight.device)
        self._backend = choose_backend(model, self._cache, settings.max_running)
        self._scheduler = Scheduler(
            pages,
            max_running=settings.max_running,
            step_tokens=settings.step_tokens,
            keep=settings.on_update == "keep",
        )
        self._scheduler.version = version
        self._groups: dict[str, Group] = {}
        self._undelivered: list[Completion] = []
        self._incarnation = 0
        self.sampled = 0

    @property
    def version(self) -> int:
        return self._scheduler.version

    @property
    def unfinished(self) -> int:
        queued = len(self._scheduler.waiting) + len(self._scheduler.running)
        return queued + len(self._undelivered)

    @property
    def preemptions(self) -> int:
        """How often a sample gave its pages up to be computed again."""
        return self._scheduler.preemptions

    def submit(self, request: Request) -> None:
        config, pages = self._model.config, self._scheduler.pages
        has_text = self._tokenizer is not None
        if request.request_id in self._groups:
            raise EngineError(f"request_id must be new, {request.request_id!r} is in flight")
        protocol.check(
            request, vocab_size=config.vocab_size, context=config.context, has_text=has_text
        )
        group = Group(request)
        for sequence in group.sequences:
            sequence.reader = Reader(request, sequence.index, self._tokenizer, config.context)
        limit = min(request.params.max_tokens, config.context - len(request.prompt))
        if pages.needed(len(request.prompt) + limit - 1) > pages.count:
            raise EngineError(
                f"request {request.request_id!r}: one sample must fit the cache of "
                f"{pages.count * pages.size} tokens, got a prompt of {len(request.prompt)} and up "
                f"to {limit} more; raise kv_bytes or lower max_tokens"
            )
        self._groups[request.request_id] = group
        self._scheduler.add(group)

    def step(self) -> list[Event]:
        """Run the model, a few times at most -> tokens and completions."""
        events: list[Event] = [*self._undelivered]
        self._undelivered = []
        plan = self._scheduler.plan()
        if not plan.counts:
            return events
        ahead = self._ahead(plan)
        if ahead > 1:
            return events + self._decode(plan, ahead)
        return events + self._run(plan)

    def load(self, weights: Weights) -> None:
        """New weights from the next step on: all of them, or an error and the old ones stay."""
        loaded = {"version": self.version, "incarnation": self._incarnation}
        check_weights(weights, **loaded, dtype=self._cache.dtype)
        try:
            load_hf_state(self._model, weights.tensors)
        except ModelError as error:
            raise EngineError(f"{error}; version {self.version} stays loaded") from error
        self._backend.update()
        self._scheduler.update(weights.version)
        self._incarnation = weights.incarnation

    def abort(self, request_id: str) -> None:
        """End a request's unfinished samples; the next step returns their tokens so far."""
        if request_id not in self._groups:
            raise EngineError(f"request {request_id!r} is not in flight; it can't be aborted")
        for sequence in list(self._groups[request_id].sequences):
            self._undelivered.append(self._complete(sequence, Finish.ABORT))

    @torch.inference_mode()
    def _run(self, plan: Plan) -> list[Event]:
        """The next token of each sample whose other tokens are computed by then."""
        if plan.copies:
            self._cache.copy(list(plan.copies.values()))
        runs = [Run(sequence, sequence.computed, n) for sequence, n in plan.counts.items()]
        hidden, row = self._backend.hidden(runs), {s: i for i, s in enumerate(plan.counts)}
        ready = self._scheduler.advance(plan)
        if not ready:
            return []
        rows = torch.tensor([row[sequence] for sequence in ready], device=hidden.device)
        logits = self._backend.logits(hidden[rows])
        events: list[Event] = []
        sampled = self._backend.sample(logits, _draws(ready))
        for sequence, token, logprob in zip(ready, *sampled, strict=True):
            events += self._extend(sequence, [token], [logprob])
        return events

    def _ahead(self, plan: Plan) -> int:
        """Tokens of each sample that are sampled before the next plan.

        Several on a GPU, whose host would take longer than the model otherwise, where nothing but
        decoding is planned, nobody waits for room to begin in, and nothing has to be read on the
        way: no token is streamed, held back or left out. What comes after an end is dropped.
        """
        if self._backend.sample_ahead is None or not self._scheduler.only_decodes(plan):
            return 1
        ahead, greedy = AHEAD, set()
        for sequence in plan.counts:
            reader = sequence.reader
            assert reader is not None
            ahead = min(ahead, reader.room)
            if ahead < 2 or not reader.plain:
                return 1
            greedy.add(not sequence.group.request.params.temperature)
        return ahead if len(greedy) == 1 and self._scheduler.reserve(plan, ahead) else 1

    @torch.inference_mode()
    def _decode(self, plan: Plan, steps: int) -> list[Event]:
        """Several tokens of each sample."""
        assert self._backend.sample_ahead is not None
        if plan.copies:
            self._cache.copy(list(plan.copies.values()))
        samples = list(plan.counts)
        heat = [sequence.group.request.params.temperature for sequence in samples]
        device = self._cache.device
        tokens, logprobs = self._backend.sample_ahead(
            samples,
            torch.from_numpy(_points(samples, steps)).to(device),
            torch.tensor(heat, device=device) if heat[0] else None,
        )
        self._scheduler.advance(plan)
        events: list[Event] = []
        for sequence, *fresh in zip(samples, tokens.tolist(), logprobs.tolist(), strict=True):
            events += self._extend(sequence, *fresh)
        return events

    def _extend(self, sequence: Sequence, tokens: list[int], logprobs: list[float]) -> list[Event]:
        """A sample's next tokens, up to the one that ends it."""
        reader, events = sequence.reader, list[Event]()
        assert reader is not None
        if reader.silent and not math.isnan(sum(logprobs)):
            taken = reader.take(tokens)
        else:
            taken = self._read(sequence, tokens, logprobs, events)
        self.sampled += taken
        sequence.tokens += tokens[:taken]
        sequence.logprobs += logprobs[:taken]
        sequence.versions += [self.version] * taken
        sequence.computed += max(0, taken - 1)
        if reader.finish is not None:
            events.append(self._complete(sequence, reader.finish))
        return events

    def _read(
        self, sequence: Sequence, tokens: list[int], logprobs: list[float], events: list[Event]
    ) -> int:
        """One after another -> how many; adds what is told of each to the events."""
        reader, request, taken = sequence.reader, sequence.group.request, 0
        assert reader is not None
        for token, logprob in zip(tokens, logprobs, strict=True):
            if math.isnan(logprob):
                # Finite weights can still overflow. Only this sample is lost, and its pages are
                # cleaned: whoever gets them next would read NaN even where it is masked.
                holders = self._scheduler.pages.holders
                self._cache.clear([page for page in sequence.pages if holders(page) == 1])
                reader.finish = Finish.ABORT
                break
            taken += 1
            text = reader.push(token)
            if request.streamed:
                place = request.request_id, sequence.index
                events.append(TokenEvent(*place, token, logprob, self.version, text))
            if reader.finish is not None:
                break
        return taken

    def _complete(self, sequence: Sequence, finish: Finish) -> Completion:
        group, reader = sequence.group, sequence.reader
        assert reader is not None
        self._scheduler.finish(sequence)
        group.sequences.remove(sequence)
        if not group.sequences:
            del self._groups[group.request.request_id]
        recorded = sequence.response, sequence.logprobs, sequence.versions
        return reader.completion(*recorded, finish)


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
    """[samples, steps]: what inverts the cumulative distribution of their next tokens."""
    requests = [sequence.group.request for sequence in ready]
    place = np.array(
        [
            [request.params.seed for request in requests],
            [request.stream for request in requests],
            [request.group for request in requests],
            [sequence.index for sequence in ready],
            [len(sequence.logprobs) for sequence in ready],
        ]
    )[..., None]
    seed, stream, group, sample, position = place
    return uniforms(seed, stream, group, sample, position + np.arange(steps))


def _draws(ready: list[Sequence]) -> list[Draw]:
    points = _points(ready, 1)[:, 0].tolist()
    return [_draw(sequence, point) for sequence, point in zip(ready, points, strict=True)]


def _draw(sequence: Sequence, uniform: float) -> Draw:
    reader, params = sequence.reader, sequence.group.request.params
    assert reader is not None
    return Draw(
        uniform=uniform,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        banned=reader.end_ids if reader.held else (),
    )
