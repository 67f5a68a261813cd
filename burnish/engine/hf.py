"""transformers' generate as an engine, to evaluate with.

A step runs one batch of whole requests to their end. The random numbers are PyTorch's own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from burnish.draws import uniforms
from burnish.engine import protocol
from burnish.engine.protocol import Capabilities, Event, Request
from burnish.engine.reader import Reader
from burnish.errors import EngineError, MissingExtra
from burnish.model.logprobs import logprobs_of
from burnish.model.tokenizer import Tokenizer
from burnish.types import Completion, Finish, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ROWS = 64
"""Samples in one call of generate, which keeps the logits of every step."""


class HFEngine:
    capabilities = Capabilities(
        model_logprobs=True, token_versions=True, counter_draws=False, updates_in_flight=False
    )

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer | None = None) -> None:
        self._model: Any = model.train(False)
        self._tokenizer = tokenizer
        self._context: int = model.config.max_position_embeddings
        self._waiting: list[tuple[Request, int]] = []
        self._aborted: list[Completion] = []
        self.version = self.sampled = 0

    @classmethod
    def open(cls, directory: Path | str, dtype: torch.dtype = torch.float32) -> HFEngine:
        try:
            from transformers import AutoModelForCausalLM
        except ImportError:
            raise MissingExtra("hf", "the transformers engine") from None
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        return cls(model, Tokenizer.load(directory))

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self._aborted)

    def submit(self, request: Request) -> None:
        vocab, has_text = self._model.config.vocab_size, self._tokenizer is not None
        protocol.check(request, vocab_size=vocab, context=self._context, has_text=has_text)
        self._waiting += [(request, index) for index in range(request.n)]

    def step(self) -> list[Event]:
        """Run waiting samples with the first one's settings to their end."""
        events: list[Event] = [*self._aborted]
        self._aborted = []
        if not self._waiting:
            return events
        params = self._waiting[0][0].params
        batch = [item for item in self._waiting if item[0].params == params][:ROWS]
        self._waiting = [item for item in self._waiting if item not in batch]
        tokens, logprobs = self._generate(batch)
        for item, row, scores in zip(batch, tokens.tolist(), logprobs.tolist(), strict=True):
            events.append(self._read(*item, row, scores))
        return events

    def load(self, weights: Weights) -> None:
        raise EngineError("the transformers engine takes no weights; train with the native engine")

    def abort(self, request_id: str) -> None:
        gone = [item for item in self._waiting if item[0].request_id == request_id]
        if not gone:
            raise EngineError(f"request {request_id!r} is not in flight; it can't be aborted")
        self._waiting = [item for item in self._waiting if item not in gone]
        for item in gone:
            self._aborted.append(self._reader(*item).completion([], [], [], Finish.ABORT))

    @torch.no_grad()
    def _generate(self, batch: list[tuple[Request, int]]) -> tuple[Tensor, Tensor]:
        """-> tokens and log-probabilities [samples, longest response]"""
        import transformers

        request, index = batch[0]
        params, heat = request.params, request.params.temperature
        longest = max(len(request.prompt) for request, _ in batch)
        ids, mask = torch.zeros(2, len(batch), longest, dtype=torch.long, device=self._model.device)
        for row, (one, _) in enumerate(batch):
            ids[row, longest - len(one.prompt) :] = torch.tensor(one.prompt.astype(np.int64))
            mask[row, longest - len(one.prompt) :] = 1
        drawn = {"temperature": heat, "top_p": params.top_p, "top_k": params.top_k or 0}
        configure: Any = transformers.GenerationConfig
        generation = configure(
            max_new_tokens=min(params.max_tokens, self._context - longest),
            min_new_tokens=params.min_tokens or None,
            eos_token_id=list(self._reader(request, index).end_ids) or None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            do_sample=heat > 0,
            **(drawn if heat > 0 else {}),
        )
        with torch.random.fork_rng():
            point = uniforms(params.seed, request.stream, request.group, index, 0)
            torch.manual_seed(int(point * 2**53))
            out = self._model.generate(ids, attention_mask=mask, generation_config=generation)
        tokens: Tensor = out.sequences[:, longest:]
        scores = [logprobs_of(step, tokens[:, t], heat or 1.0) for t, step in enumerate(out.logits)]
        return tokens, torch.stack(scores, 1)

    def _reader(self, request: Request, index: int) -> Reader:
        return Reader(request, index, self._tokenizer, self._context)

    def _read(
        self, request: Request, index: int, tokens: list[int], logprobs: list[float]
    ) -> Completion:
        """Cut a response at its stop, which generate may have run past."""
        reader, count = self._reader(request, index), 0
        while count < len(tokens) and reader.finish is None:
            reader.push(tokens[count])
            count += 1
        self.sampled += count
        recorded = tokens[:count], logprobs[:count], [self.version] * count
        return reader.completion(*recorded, reader.finish or Finish.LENGTH)
