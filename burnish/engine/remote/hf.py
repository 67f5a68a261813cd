"""An engine that runs the model of transformers and samples with burnish's random draws.

A step samples whole responses. The engine is slow and simple, and serves as an independent check of
burnish's own forward pass.
"""

from __future__ import annotations

from typing import Any

import torch

from burnish.engine import protocol
from burnish.engine.native import sampler
from burnish.engine.native.sequence import RequestGroup, Sequence
from burnish.engine.protocol import Capabilities, Request
from burnish.engine.remote.weight_shapes import Shapes
from burnish.engine.settings import EngineSettings
from burnish.machine import hardware
from burnish.model import checkpoint
from burnish.model.tokenizer import Tokenizer
from burnish.types import Completion, Finish, Weights


class HfEngine:
    """Samples with the model of transformers, loaded from ``settings.directory``. A step samples
    whole responses, so only samples that have not started can be aborted."""

    capabilities = Capabilities(model_logprobs=True, token_versions=True, counter_draws=True)

    def __init__(self, settings: EngineSettings) -> None:
        hardware.set_up_torch(settings.threads)
        from transformers import AutoModelForCausalLM

        self._dtype = getattr(torch, settings.dtype)
        load: Any = AutoModelForCausalLM.from_pretrained
        self._model = load(settings.directory, dtype=self._dtype).to(settings.device).eval()
        self._device, self._rows = settings.device, settings.max_running
        self._tokenizer = Tokenizer.load(settings.directory)
        self._config = checkpoint.read_model_config(settings.directory)
        self._shapes = Shapes(self._config)
        self._waiting: list[Sequence] = []
        self._undelivered: list[Completion] = []
        self.version = self.sampled = self._incarnation = 0

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self._undelivered)

    def submit(self, request: Request) -> None:
        bounds = {"vocab_size": self._config.vocab_size, "context": self._config.context}
        protocol.check_request(request, **bounds)
        group = RequestGroup(request, self._tokenizer, self._config.context)
        self._waiting += group.sequences

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Sample the whole responses of the next samples in the queue, up to max_running of them.
        Return their completions, and those of aborted samples."""
        batch, self._waiting = self._waiting[: self._rows], self._waiting[self._rows :]
        if batch:
            self._generate(batch)
        done, self._undelivered = self._undelivered, []
        return done + [s.complete(s.finish or Finish.ABORT) for s in batch]

    def abort(self, request_id: str) -> None:
        ended = [s for s in self._waiting if s.group.request.request_id == request_id]
        self._waiting = [s for s in self._waiting if s not in ended]
        self._undelivered += [sequence.complete(Finish.ABORT) for sequence in ended]

    @torch.inference_mode()
    def probe(self) -> tuple[float, ...]:
        """Return the log-probabilities of fixed tokens after a fixed context, as
        `burnish.model.transformer.Transformer.probe` does."""
        tokens = torch.tensor(self._config.probed, device=self._device)
        logits = self._model(tokens[None]).logits[0, -1]
        return tuple(logits.float().log_softmax(-1)[tokens].tolist())

    def load(self, weights: Weights) -> None:
        protocol.check_weights(weights, self.version, self._incarnation, self._dtype)
        self._shapes.check(weights, self.version)
        self._model.load_state_dict(weights.tensors, strict=False)
        self.version, self._incarnation = weights.version, weights.incarnation

    def _generate(self, batch: list[Sequence]) -> None:
        """Sample a batch until all its samples have ended. Prompts are padded on the left, so that
        all samples decode at the same index."""
        width = max(len(s.tokens) for s in batch)
        padded = [[0] * (width - len(s.tokens)) + s.tokens for s in batch]
        seen = [[0] * (width - len(s.tokens)) + [1] * len(s.tokens) for s in batch]
        tokens = torch.tensor(padded, device=self._device)
        mask, cache = torch.tensor(seen, device=self._device), None
        while True:
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
            given = {"attention_mask": mask, "position_ids": places, "past_key_values": cache}
            out = self._model(tokens, **given, use_cache=True, logits_to_keep=1)
            cache = out.past_key_values
            points, heat, limited = sampler.draws(batch, 1, self._device)
            ids, logprobs = sampler.sample_tokens(out.logits[:, -1], points[:, 0], heat, limited)
            for row, sequence in enumerate(batch):
                self._extend(sequence, int(ids[row]), float(logprobs[row]))
            if all(sequence.finish is not None for sequence in batch):
                return
            tokens = ids[:, None]
            mask = torch.cat([mask, torch.ones_like(tokens)], 1)

    def _extend(self, sequence: Sequence, token: int, logprob: float) -> None:
        """Append a token to a sample, unless the sample has ended. A log-probability of NaN aborts
        the sample."""
        if sequence.finish is None and logprob != logprob:  # NaN: the model overflowed
            sequence.finish = Finish.ABORT
        elif sequence.finish is None:
            drawn = sequence.forced is None
            self.sampled += sequence.take([token], [logprob], self.version) * drawn
