"""transformers as an engine: its model, burnish's draws, and whole responses in a step.

It is slow and plain, and the second opinion on a model that burnish's own forward pass reads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from burnish import machine
from burnish.engine import protocol, sampler
from burnish.engine.protocol import Capabilities, Request
from burnish.engine.sequence import RequestGroup, Sequence
from burnish.engine.serving import DTYPES, Settings
from burnish.engine.shapes import Shapes
from burnish.model import checkpoint
from burnish.model.tokenizer import Tokenizer
from burnish.types import Completion, Finish, Weights


class HfEngine:
    capabilities = Capabilities(model_logprobs=True, token_versions=True, counter_draws=True)

    def __init__(self, given: Settings) -> None:
        machine.set_up_torch(given.threads)
        from transformers import AutoModelForCausalLM

        self._dtype = getattr(torch, DTYPES[given.precision])
        load: Any = AutoModelForCausalLM.from_pretrained
        self._model = load(given.model, dtype=self._dtype).to(given.device).eval()
        self._device, self._rows = given.device, given.max_running
        self._tokenizer = Tokenizer.load(given.model)
        self._config = checkpoint.read_config(Path(given.model))
        self._shapes = Shapes(self._config)
        self._waiting: list[Sequence] = []
        self._undelivered: list[Completion] = []
        self.version = self.sampled = self._incarnation = 0

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self._undelivered)

    def submit(self, request: Request) -> None:
        bounds = {"vocab_size": self._config.vocab_size, "context": self._config.context}
        protocol.check(request, **bounds)
        group = RequestGroup(request, self._tokenizer, self._config.context)
        self._waiting += group.sequences

    @torch.inference_mode()
    def step(self) -> list[Completion]:
        """Whole responses of some samples."""
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
        """As `burnish.model.transformer.Transformer.probe`."""
        tokens = torch.tensor(self._config.probed, device=self._device)
        logits = self._model(tokens[None]).logits[0, -1]
        return tuple(logits.float().log_softmax(-1)[tokens].tolist())

    def load(self, weights: Weights) -> None:
        protocol.check_weights(weights, self.version, self._incarnation, self._dtype)
        self._shapes.check(weights, self.version)
        self._model.load_state_dict(weights.tensors, strict=False)
        self.version, self._incarnation = weights.version, weights.incarnation

    def _generate(self, batch: list[Sequence]) -> None:
        """Padding stands on the left, so that all samples decode at the same place."""
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
            ids, logprobs = sampler.sample(out.logits[:, -1], points[:, 0], heat, limited)
            for row, sequence in enumerate(batch):
                self._extend(sequence, int(ids[row]), float(logprobs[row]))
            if all(sequence.finish is not None for sequence in batch):
                return
            tokens = ids[:, None]
            mask = torch.cat([mask, torch.ones_like(tokens)], 1)

    def _extend(self, sequence: Sequence, token: int, logprob: float) -> None:
        """The next token of a sample that has not ended."""
        if sequence.finish is None and logprob != logprob:  # NaN: the model overflowed
            sequence.finish = Finish.ABORT
        elif sequence.finish is None:
            drawn = sequence.forced is None
            self.sampled += sequence.take([token], [logprob], self.version) * drawn
