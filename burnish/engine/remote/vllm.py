"""vLLM as an engine: tokens in, tokens out, one step at a time in this process.

It runs in vLLM's environment, behind `burnish/engine/serving.py`. vLLM computes and draws; the end
of a response, its text and its stamps come from `burnish/engine/sequence.py`, as in the native
engine. Log-probabilities are vLLM's processed ones: after the temperature, but also after masks and
truncation, so requests with a mask are refused.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch

from burnish.draws import uniforms
from burnish.engine import protocol
from burnish.engine.protocol import Capabilities, Request
from burnish.engine.sequence import RequestGroup, Sequence
from burnish.engine.serving import DTYPES, Settings
from burnish.engine.shapes import Shapes
from burnish.errors import EngineError
from burnish.model import checkpoint
from burnish.model.tokenizer import Tokenizer
from burnish.types import Completion, Finish, Weights

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a step ends before the next call: versions are exact
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # one process needs no network
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it gives no processed log-probabilities
    "TRITON_F32_DEFAULT": "ieee",  # or attention in fp32 multiplies in tf32
}
SHARE = 0.01
"""vLLM starts only if this share of the GPU's memory is free; ``kv_mb`` bounds its cache."""
STEP_TOKENS = 8192
"""Tokens that a step computes, or more: a token of each sample, and on a CPU the longest prompt."""
PROBED = "probe"
"""The name of the request that probes the weights; those of samples have a slash."""


class VllmEngine:
    capabilities = Capabilities(model_logprobs=True, token_versions=True, counter_draws=False)

    def __init__(self, given: Settings) -> None:
        os.environ.update(ENVIRONMENT | {"OMP_NUM_THREADS": str(given.threads)})
        _see_only(given.device)
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        on_cpu = given.device == "cpu"
        self._given, self._tokenizer = given, Tokenizer.load(given.model)
        self._directory = Path(given.model)
        self._config = checkpoint.read_config(self._directory)
        longest = self._config.context if on_cpu else 0
        torch.set_num_threads(given.threads)
        self._engine: Any = LLMEngine.from_engine_args(
            EngineArgs(
                model=given.model,
                dtype=DTYPES[given.precision],
                max_model_len=self._config.context,
                max_num_seqs=given.max_running,
                max_num_batched_tokens=max(STEP_TOKENS, given.max_running, longest),
                kv_cache_memory_bytes=given.kv_mb << 20,
                gpu_memory_utilization=SHARE,
                enable_sleep_mode=given.sleep,
                logprobs_mode="processed_logprobs",
                enable_prefix_caching=True,  # a group shares its prompt
                disable_cascade_attn=True,
                async_scheduling=False,
                enforce_eager=on_cpu,
                enable_chunked_prefill=not on_cpu,  # a cut prompt and a seed end vLLM on a CPU
                skip_tokenizer_init=True,
                generation_config="vllm",  # none: all settings are the request's
                disable_log_stats=True,
            )
        )
        self._shapes = Shapes(self._config)
        self._samples: dict[str, Sequence] = {}
        """By vLLM's name for the request of the sample."""
        self._names: dict[Sequence, str] = {}
        self._loads = 0
        """Loads of weights so far: the salt of the prefix cache. Versions are no salt, because a
        run that was restarted counts some of them again."""
        self._undelivered: list[Completion] = []
        self._probed: dict[int, float] = {}
        """Log-probabilities of a probe, by token; empty until it is answered."""
        self.version = self.sampled = self._incarnation = 0
        self._sleeps = False

    @property
    def unfinished(self) -> int:
        return len(self._samples) + len(self._undelivered)

    def submit(self, request: Request) -> None:
        config, p = self._config, request.params
        protocol.check(request, vocab_size=config.vocab_size, context=config.context)
        if p.min_tokens or p.top_p < 1 or p.top_k is not None or p.think_tokens is not None:
            raise EngineError(
                f"request {request.request_id!r}: vLLM's log-probabilities come after the masks of "
                "min_tokens, top_p and top_k, and it has no think budget; leave them out, or use "
                "the native engine"
            )
        self._wake()
        for sequence in RequestGroup(request, self._tokenizer, config.context).sequences:
            self._begin(sequence)

    def step(self) -> list[Completion]:
        if self._samples:
            self._advance()
        done, self._undelivered = self._undelivered, []
        return done

    def abort(self, request_id: str) -> None:
        for sequence in list(self._samples.values()):
            if sequence.group.request.request_id == request_id:
                self._end(sequence, Finish.ABORT)

    def probe(self) -> tuple[float, ...]:
        """As `burnish.model.transformer.Transformer.probe`; samples in flight go on beside it."""
        self._wake()
        asked, self._probed = self._config.probed, {}
        # A cache of older weights may be kept for samples, and would answer here.
        fresh = {"skip_reading_prefix_cache": True, "logprob_token_ids": list(dict.fromkeys(asked))}
        self._ask(PROBED, asked, max_tokens=1, **fresh)
        while not self._probed:
            self._advance()
        return tuple(self._probed[token] for token in asked)

    def load(self, weights: Weights) -> None:
        """An exception from vLLM ends the process: it may have taken a part of the weights."""
        dtype = getattr(torch, DTYPES[self._given.precision])
        protocol.check_weights(weights, self.version, self._incarnation, dtype)
        self._shapes.check(weights, self.version)
        tensors = weights.tensors
        if weights.is_partial:  # the others are as they were at first
            tensors = {**checkpoint.read_state(self._directory), **tensors}
        self._wake()
        new = iter(tensors.items())
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": new})
        if self._config.tied:
            self._engine.collective_rpc(_tie)
        self._loads += 1
        keeps = self._given.on_update == "keep"
        if not keeps and not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not drop the caches of the old weights")
        self.version, self._incarnation = weights.version, weights.incarnation
        self._restart_unbegun()

    def sleep(self) -> None:
        """Gives the GPU's memory away until the next request, probe or load. Caches are dropped;
        the weights wait in main memory, so that a load that is refused leaves them."""
        if self.unfinished:
            raise EngineError(f"{self.unfinished} samples are not delivered; step until they are")
        self._engine.sleep(level=1)
        self._sleeps = True

    def _wake(self) -> None:
        if self._sleeps:
            self._engine.wake_up()
            self._sleeps = False

    def _restart_unbegun(self) -> None:
        """Requests that have no token yet begin with the new weights, so their salt is new, too;
        the other samples of a request that has begun may read its cache."""
        begun = {s.group for s in self._samples.values() if len(s.tokens) > s.group.prompt_length}
        for name, sequence in list(self._samples.items()):
            if sequence.group not in begun:
                self._engine.abort_request([name])
                del self._samples[name]
                self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        request, p = sequence.group.request, sequence.group.request.params
        place = request.stream, request.group, request.first + sequence.index
        draw = uniforms(p.seed, *place, len(sequence.logprobs))
        how = {"temperature": p.temperature, "seed": int(draw * 2**53), "logprobs": 0}
        ends = {"max_tokens": sequence.room, "stop_token_ids": sorted(sequence.group.end_ids)}
        name = f"{request.request_id}/{sequence.index}/{self._loads}"
        self._ask(name, sequence.group.given.tolist(), **how, **ends)
        self._samples[name], self._names[sequence] = sequence, name

    def _ask(self, name: str, tokens: list[int], **how: Any) -> None:
        """vLLM finds cached blocks only under the same salt: those of older weights serve no
        request that begins now."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        fixed = {"output_kind": RequestOutputKind.DELTA, "detokenize": False, "ignore_eos": True}
        prompt = {"prompt_token_ids": tokens, "cache_salt": str(self._loads)}
        self._engine.add_request(name, prompt, SamplingParams(**fixed, **how))

    def _advance(self) -> None:
        """One step of vLLM: the new tokens of each sample, up to the one that ends it."""
        for output in self._engine.step():
            (said,) = output.outputs
            if output.request_id == PROBED:
                self._probed = {token: one.logprob for token, one in said.logprobs[0].items()}
                continue
            sequence, tokens = self._samples[output.request_id], list(said.token_ids)
            rows = zip(tokens, said.logprobs, strict=True)
            logprobs = [row[token].logprob for token, row in rows]
            if math.isnan(sum(logprobs)):
                self._end(sequence, Finish.ABORT)
                continue
            self.sampled += sequence.take(tokens, logprobs, self.version)
            if sequence.finish is not None or output.finished:
                self._end(sequence, sequence.finish or Finish.LENGTH)

    def _end(self, sequence: Sequence, finish: Finish) -> None:
        name = self._names.pop(sequence)
        self._engine.abort_request([name])  # nothing happens if vLLM has ended it, too
        del self._samples[name]
        self._undelivered.append(sequence.complete(finish))


def _see_only(device: str) -> None:
    """vLLM takes the first GPU that it sees."""
    _, _, number = device.partition(":")
    if number:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(number)] if seen else number


def _tie(worker: Any) -> None:
    """On a CPU, vLLM multiplies by a copy of a tied head, which a reload leaves old."""
    head = worker.model_runner.get_model().lm_head
    head.quant_method.process_weights_after_loading(head)
