"""An engine that runs vLLM in this process, one step at a time, and exchanges token ids with it.

It runs in vLLM's environment, inside `burnish/engine/remote/server.py`. vLLM computes and samples.
`burnish/engine/native/sequence.py` decides where a response ends and records its text and versions,
as in the native engine. vLLM returns log-probabilities after the temperature, but also after masks
and truncation, so requests with a mask are rejected.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from burnish.engine import protocol
from burnish.engine.native.sequence import RequestGroup, Sequence
from burnish.engine.protocol import Capabilities, Request
from burnish.engine.remote.weight_shapes import Shapes
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.model import checkpoint
from burnish.model.tokenizer import Tokenizer
from burnish.randomness import uniforms
from burnish.types import Completion, Finish, Weights

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process, so that each step uses one version
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # a single process needs no network
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it returns no processed log-probabilities
    "TRITON_F32_DEFAULT": "ieee",  # otherwise attention in fp32 multiplies in tf32
}
SHARE = 0.01
"""vLLM starts only if this share of the GPU's memory is free; ``kv_bytes`` bounds its cache."""
STEP_TOKENS = 8192
"""Minimum token budget of a step. The budget is larger if one token of each sample or, on a CPU,
the longest prompt needs more."""
PROBED = "probe"
"""Name of the request that probes the weights; names of samples contain a slash."""


class VllmEngine:
    """Samples with vLLM, which runs in this process, one step at a time.

    Create it before anything imports vLLM: it sets the environment variables of `ENVIRONMENT`, and
    restricts CUDA_VISIBLE_DEVICES to the GPU of ``settings.device``.
    """

    capabilities = Capabilities(model_logprobs=True, token_versions=True, counter_draws=False)

    def __init__(self, settings: EngineSettings) -> None:
        os.environ.update(ENVIRONMENT | {"OMP_NUM_THREADS": str(settings.threads)})
        _see_only(settings.device)
        from vllm import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        on_cpu = settings.device == "cpu"
        self._settings, self._tokenizer = settings, Tokenizer.load(settings.directory)
        self._directory = settings.directory
        self._config = checkpoint.read_model_config(self._directory)
        longest = self._config.context if on_cpu else 0
        torch.set_num_threads(settings.threads)
        self._engine: Any = LLMEngine.from_engine_args(
            EngineArgs(
                model=str(settings.directory),
                dtype=settings.dtype,
                max_model_len=self._config.context,
                max_num_seqs=settings.max_running,
                max_num_batched_tokens=max(STEP_TOKENS, settings.max_running, longest),
                kv_cache_memory_bytes=settings.kv_bytes,
                gpu_memory_utilization=SHARE,
                enable_sleep_mode=settings.sleep,
                logprobs_mode="processed_logprobs",
                enable_prefix_caching=True,  # the samples of a group share their prompt
                disable_cascade_attn=True,
                async_scheduling=False,
                enforce_eager=on_cpu,
                enable_chunked_prefill=not on_cpu,  # with a seed, chunks crash vLLM on a CPU
                skip_tokenizer_init=True,
                generation_config="vllm",  # ignore the model's own sampling defaults
                disable_log_stats=True,
            )
        )
        self._shapes = Shapes(self._config)
        self._samples: dict[str, Sequence] = {}
        """Samples by the name of their vLLM request."""
        self._names: dict[Sequence, str] = {}
        self._loads = 0
        """Number of loads so far, which salts the prefix cache. Versions can't be the salt, because
        a restarted run reuses some of them."""
        self._undelivered: list[Completion] = []
        self._probed: dict[int, float] = {}
        """Log-probabilities of the current probe, by token; empty until vLLM has answered."""
        self.version = self.sampled = self._incarnation = 0
        self._sleeps = False

    @property
    def unfinished(self) -> int:
        return len(self._samples) + len(self._undelivered)

    def submit(self, request: Request) -> None:
        """Queue a request. Raise an EngineError if it is invalid, or if it has min_tokens, top_p,
        top_k, min_p, a repetition penalty or a think budget, which this engine does not support."""
        config, p = self._config, request.params
        protocol.check_request(request, vocab_size=config.vocab_size, context=config.context)
        reshapes = p.top_p < 1 or p.top_k is not None or p.min_p or p.repetition_penalty != 1
        if p.min_tokens or reshapes or p.think_tokens is not None:
            raise EngineError(
                f"request {request.request_id!r}: vLLM computes log-probabilities after the masks "
                "of min_tokens, top_p, top_k and min_p and after repetition_penalty, and has no "
                "think budget; remove these settings, or use the native engine"
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
        """Return the log-probabilities of fixed tokens after a fixed context, as
        `burnish.model.transformer.Transformer.probe` does. This runs steps of vLLM, in which
        samples in flight continue; the next `step` returns their completions."""
        self._wake()
        tokens, self._probed = self._config.probed, {}
        # The prefix cache may hold blocks of older weights that samples in flight keep.
        fresh = {
            "skip_reading_prefix_cache": True,
            "logprob_token_ids": list(dict.fromkeys(tokens)),
        }
        self._ask(PROBED, tokens, max_tokens=1, **fresh)
        while not self._probed:
            self._advance()
        return tuple(self._probed[token] for token in tokens)

    def load(self, weights: Weights) -> None:
        """Load weights for all following tokens; with on_update = recompute, discard the caches of
        older ones. Refused weights raise an EngineError and change nothing. Any other exception
        must end the process, because vLLM may have loaded a part of the weights.

        Partial weights are completed with the initial tensors of the model directory.
        """
        dtype = getattr(torch, self._settings.dtype)
        protocol.check_weights(weights, self.version, self._incarnation, dtype)
        self._shapes.check(weights, self.version)
        tensors = weights.tensors
        if weights.is_partial:  # the other tensors have their initial values
            tensors = {**checkpoint.read_state(self._directory), **tensors}
        self._wake()
        new = iter(tensors.items())
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": new})
        if self._config.tied:
            self._engine.collective_rpc(_tie)
        self._loads += 1
        keeps = self._settings.on_update == "keep"
        if not keeps and not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise RuntimeError("vLLM did not discard the caches of the old weights")
        self.version, self._incarnation = weights.version, weights.incarnation
        self._restart_unbegun()

    def sleep(self) -> None:
        """Release the GPU's memory until the next request, probe or load. Raise an EngineError if
        samples are not delivered yet.

        Caches are discarded. The weights are kept in main memory, so that they survive a load that
        is refused.
        """
        if self.unfinished:
            raise EngineError(f"{self.unfinished} samples are not delivered; step until they are")
        self._engine.sleep(level=1)
        self._sleeps = True

    def _wake(self) -> None:
        if self._sleeps:
            self._engine.wake_up()
            self._sleeps = False

    def _restart_unbegun(self) -> None:
        """Abort and resubmit all samples of requests that have no new tokens yet. They get the
        prefix cache's new salt and so start with the new weights. Samples of a request that has
        started may keep reading its cache."""
        begun = {s.group for s in self._samples.values() if len(s.tokens) > s.group.prompt_length}
        for name, sequence in list(self._samples.items()):
            if sequence.group not in begun:
                self._engine.abort_request([name])
                del self._samples[name]
                self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        request, p = sequence.group.request, sequence.group.request.params
        place = request.stream, request.group, request.first + sequence.index
        draw = uniforms(p.seed, *place, request.position + len(sequence.logprobs))
        how = {"temperature": p.temperature, "seed": int(draw * 2**53), "logprobs": 0}
        ends = {"max_tokens": sequence.room, "stop_token_ids": sorted(sequence.group.end_ids)}
        name = f"{request.request_id}/{sequence.index}/{self._loads}"
        self._ask(name, sequence.group.given.tolist(), **how, **ends)
        self._samples[name], self._names[sequence] = sequence, name

    def _ask(self, name: str, tokens: list[int], **how: Any) -> None:
        """Send a request to vLLM. The number of loads salts its prefix cache, so that a new request
        never reads cached blocks of older weights."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        fixed = {"output_kind": RequestOutputKind.DELTA, "detokenize": False, "ignore_eos": True}
        prompt = {"prompt_token_ids": tokens, "cache_salt": str(self._loads)}
        self._engine.add_request(name, prompt, SamplingParams(**fixed, **how))

    def _advance(self) -> None:
        """Run one step of vLLM, append the new tokens to their samples, and complete samples that
        have ended. The log-probabilities of a probe are stored."""
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
        self._engine.abort_request([name])  # has no effect if vLLM has ended it
        del self._samples[name]
        self._undelivered.append(sequence.complete(finish))


def _see_only(device: str) -> None:
    """Set CUDA_VISIBLE_DEVICES to the GPU of ``device``, because vLLM uses the first visible one.
    Do nothing if ``device`` has no number."""
    _, _, number = device.partition(":")
    if number:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(number)] if seen else number


def _tie(worker: Any) -> None:
    """In a vLLM worker, refresh the copy of the tied head that vLLM uses on a CPU and does not
    reload itself."""
    head = worker.model_runner.get_model().lm_head
    head.quant_method.process_weights_after_loading(head)
