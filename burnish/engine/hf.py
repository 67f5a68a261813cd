"""transformers' generate behind burnish's protocol: the oracle in tests, the peer in benchmarks.

It serves whole requests, one batch per step, and so can do less than the native engine: see its
`capabilities`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from burnish.draws import uniforms
from burnish.engine import protocol
from burnish.engine.protocol import Capabilities, Event, Request, TokenEvent
from burnish.engine.reader import Reader
from burnish.errors import EngineError, MissingExtra
from burnish.model.logprobs import logprobs_of
from burnish.model.tokenizer import Tokenizer
from burnish.types import Finish, SamplingParams, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HFEngine:
    capabilities = Capabilities(
        continuous_batching=False,
        shared_prompts=False,
        updates_in_flight=False,
        counter_draws=False,
        streaming=False,
    )

    def __init__(
        self, model: PreTrainedModel, tokenizer: Tokenizer | None = None, *, max_rows: int = 64
    ) -> None:
        """max_rows: samples that one call of generate holds, logits of every step included."""
        self._model: Any = model.train(False)
        self._tokenizer, self._max_rows = tokenizer, max_rows
        self.version = 0
        self._waiting: list[tuple[Request, int]] = []
        self._undelivered: list[Event] = []
        self._paused = False
        self.sampled = 0

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
        return len(self._waiting)

    def submit(self, request: Request) -> None:
        if any(request.request_id == waiting.request_id for waiting, _ in self._waiting):
            raise EngineError(f"request_id must be new, {request.request_id!r} is in flight")
        config = self._model.config
        protocol.check(
            request,
            vocab_size=config.vocab_size,
            context=config.max_position_embeddings,
            has_text=self._tokenizer is not None,
        )
        self._waiting += [(request, index) for index in range(request.n)]

    def step(self) -> list[Event]:
        """Run waiting samples with the first one's settings to their end."""
        events, self._undelivered = self._undelivered, []
        if self._paused or not self._waiting:
            return events
        params = self._waiting[0][0].params
        batch = [item for item in self._waiting if item[0].params == params][: self._max_rows]
        self._waiting = [item for item in self._waiting if item not in batch]
        tokens, logprobs = self._generate(batch, params)
        for (request, index), row, scores in zip(batch, tokens, logprobs, strict=True):
            events += self._read(request, index, row, scores)
        return events

    def load(self, weights: Weights) -> None:
        if any(not bool(tensor.isfinite().all()) for tensor in weights.tensors.values()):
            raise EngineError(
                f"weights must be finite, those of version {weights.version} are not; "
                f"version {self.version} stays loaded"
            )
        mine = self._model.state_dict()
        unfit = [
            name
            for name in mine.keys() | weights.tensors.keys()
            if name != "lm_head.weight" or not self._model.config.tie_word_embeddings
            if name not in mine
            or name not in weights.tensors
            or mine[name].shape != weights.tensors[name].shape
        ]
        if unfit:
            raise EngineError(
                f"weights must fit the model, {len(unfit)} do not ({unfit[0]}, …); "
                f"version {self.version} stays loaded"
            )
        self._model.load_state_dict(weights.tensors, strict=False)
        self.version = weights.version

    def abort(self, request_id: str) -> None:
        dropped = [item for item in self._waiting if item[0].request_id == request_id]
        if not dropped:
            raise EngineError(f"request {request_id!r} is not in flight; it can't be aborted")
        self._waiting = [item for item in self._waiting if item not in dropped]
        for request, index in dropped:
            reader = self._reader(request, index)
            self._undelivered.append(reader.completion([], [], [], Finish.ABORT))

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    @torch.no_grad()
    def _generate(
        self, batch: Sequence[tuple[Request, int]], params: SamplingParams
    ) -> tuple[list[list[int]], list[list[float]]]:
        import transformers

        configure: Any = transformers.GenerationConfig
        device = self._model.device
        longest = max(len(request.prompt) for request, _ in batch)
        ids = torch.zeros(len(batch), longest, dtype=torch.long, device=device)
        mask = torch.zeros_like(ids)
        for row, (request, _) in enumerate(batch):
            length = len(request.prompt)
            ids[row, longest - length :] = torch.tensor(request.prompt.astype(np.int64))
            mask[row, longest - length :] = 1
        request, index = batch[0]
        settings: dict[str, Any] = {"do_sample": params.temperature > 0}
        if params.temperature > 0:
            settings |= {"temperature": params.temperature, "top_p": params.top_p}
            settings["top_k"] = params.top_k or 0
        generation = configure(
            max_new_tokens=min(
                params.max_tokens, self._model.config.max_position_embeddings - longest
            ),
            min_new_tokens=params.min_tokens or None,
            eos_token_id=list(self._reader(request, index).end_ids) or None,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **settings,
        )
        with torch.random.fork_rng():
            point = uniforms(params.seed, request.stream, request.group, index, 0)
            torch.manual_seed(int(point * 2**53))
            out = self._model.generate(ids, attention_mask=mask, generation_config=generation)
        tokens: Tensor = out.sequences[:, longest:]
        heat = params.temperature or 1.0
        scores = [logprobs_of(step, tokens[:, t], heat) for t, step in enumerate(out.logits)]
        return tokens.tolist(), torch.stack(scores, 1).tolist()

    def _reader(self, request: Request, index: int) -> Reader:
        context = self._model.config.max_position_embeddings
        return Reader(request, index, self._tokenizer, context)

    def _read(
        self, request: Request, index: int, tokens: list[int], logprobs: list[float]
    ) -> list[Event]:
        """Cut what was generated at its stop, which generate may have run past."""
        reader = self._reader(request, index)
        events: list[Event] = []
        count, place = 0, (request.request_id, index)
        for token, logprob in zip(tokens, logprobs, strict=True):
            text, count = reader.push(token), count + 1
            if request.streamed:
                events.append(TokenEvent(*place, token, logprob, self.version, text))
            if reader.finish is not None:
                break
        self.sampled += count
        recorded = tokens[:count], logprobs[:count], [self.version] * count
        done = reader.completion(*recorded, reader.finish or Finish.LENGTH)
        return [*events, done]
