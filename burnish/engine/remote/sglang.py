"""An engine that samples on an SGLang server over HTTP; both sides exchange token ids.

The server samples, and this client decides where a response ends, by the rules of
`burnish/engine/native/sequence.py`. A load of weights aborts the calls in flight, and their
responses continue in new calls, so all tokens of a call have the same version. docs/engines.md
lists the server behaviour that this relies on.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import deque
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from burnish.engine import protocol
from burnish.engine.native.sequence import RequestGroup, Sequence
from burnish.engine.protocol import Capabilities, Probe, ProbeCheck, Request
from burnish.engine.remote.daemon_threads import DaemonThreads
from burnish.engine.remote.sglang_api import SglangApi
from burnish.engine.remote.sglang_weights import WEIGHT_SENDERS, WeightSender
from burnish.engine.remote.weight_shapes import Shapes
from burnish.errors import EngineError
from burnish.model.checkpoint import read_model_config, read_state
from burnish.model.tokenizer import Tokenizer
from burnish.randomness import uniforms
from burnish.types import Completion, Finish, Weights

ABORT_RETRY = 0.5
"""Seconds after which an abort is sent again if its calls have not ended."""
STEP_TIMEOUT = 0.02
"""Seconds after which a step returns even if no call has ended, so that weights can be loaded."""
PROBE_NOISE = 1e-2
"""Largest difference between two probes of the same weights; sums depend on the batch."""
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""burnish's names of the server's precisions."""


class GenerateCall(NamedTuple):
    """A call of /generate in flight, which samples the next tokens of one sample."""

    sequence: Sequence
    name: str
    """The call's name on the server."""
    version: int
    """Version of the weights that were loaded when the call was sent."""
    incarnation: int
    """Incarnation of these weights."""

    @property
    def request_id(self) -> str:
        return self.sequence.group.request.request_id


class SglangEngine:
    """Client of an SGLang server that implements `Engine`. It replaces the server's weights, so no
    other client may use the server. After a timeout or a restart of the server, or if its weights
    are unknown, every further call raises an EngineError."""

    def __init__(
        self,
        url: str,
        model: Path | str,
        tokenizer: Tokenizer | None = None,
        *,
        deadline: float = 600.0,
        max_running: int = 128,
        keeps_cache: bool = False,
        weights: str = "disk",
        sleeps: bool = False,
        key: str | None = None,
    ) -> None:
        """Check that the server fits the settings, and load the weights of version 0 into it. Raise
        an EngineError if the server does not respond or does not fit, or if the load fails.

        Args:
            url: of the server.
            model: model directory with the weights of version 0.
            tokenizer: None if completions need no text and no request has stop strings.
            deadline: timeout of each call in seconds.
            max_running: maximum number of samples that are sent to the server at the same time.
            keeps_cache: whether samples in flight keep keys and values of older weights; otherwise
                the server computes them again after each load.
            weights: how weights are sent, a key of `WEIGHT_SENDERS`.
            sleeps: whether `sleep` will be called, which the server must support.
            key: the server's API key; None if it has none.
        """
        self._server = SglangApi(url, deadline, key)
        self._tokenizer, self._keeps = tokenizer, keeps_cache
        self._calls: dict[Future[Any], GenerateCall] = {}
        self._running, self._queued = max_running, deque[Sequence]()
        """Samples that wait until fewer than ``max_running`` calls are in flight."""
        self._undelivered: list[Completion] = []
        self._aborted: set[str] = set()
        """Requests whose samples end with the tokens that they have so far."""
        self._aborted_at = 0.0
        """When the server was last asked to abort these requests."""
        self._client, self._loads = uuid.uuid4().hex, 0
        """Parts of the key of the server's prefix cache: an id of this client and the number of
        loads so far. Versions can't be the key, because a restarted run reuses some of them."""
        self._keys: dict[Sequence, str] = {}
        """Cache keys of samples in flight. Calls that continue a response use the key of its first
        call, so that they may read the cache that this call filled."""
        self.version = self.sampled = self._incarnation = 0
        self._expected: tuple[Probe, ProbeCheck] | None = None
        self._config = config = read_model_config(Path(model))
        self._shapes = Shapes(config)
        facts = self._server.facts()
        self._context: int = min(config.context, facts["max_req_input_len"])
        self._has_tokenizer = not facts["skip_tokenizer_init"]
        self.facts = {"name": "sglang", "precision": PRECISIONS.get(facts["dtype"], facts["dtype"])}
        self.capabilities = Capabilities(
            model_logprobs=True,
            token_versions=True,
            counter_draws=facts["enable_deterministic_inference"],
        )
        # Weights are released only if the server has a copy: the next load may be refused.
        self._tags = ["kv_cache", "weights"][: 1 + facts["enable_weights_cpu_backup"]]
        self._is_asleep = False
        if sleeps and not facts["enable_memory_saver"]:
            raise self._server.error(
                "can't release its memory, as engine.sleep = true requires; start it with "
                "--enable-memory-saver"
            )
        if weights != "disk" and facts["pp_size"] * facts["dp_size"] > 1:
            raise self._server.error(
                f"has pp_size = {facts['pp_size']} and dp_size = {facts['dp_size']}; they must be "
                f"1 for engine.weights = '{weights}'; restart it, or use engine.weights = 'disk'"
            )
        self._sender: WeightSender = WEIGHT_SENDERS[weights](self._server, facts)
        self._update(read_state(Path(model)), 0)
        self._last, self._threads = self.probe(), DaemonThreads(max_running)

    @property
    def unfinished(self) -> int:
        return len(self._calls) + len(self._queued) + len(self._undelivered)

    def submit(self, request: Request) -> None:
        """Queue a request, and send its samples to the server if fewer than ``max_running`` are
        there. Raise an EngineError if the request is invalid, or if it has min_tokens, a repetition
        penalty or a think budget, which this engine does not support."""
        protocol.check_request(request, vocab_size=self._config.vocab_size, context=self._context)
        p = request.params
        if p.min_tokens or p.think_tokens or p.repetition_penalty != 1:
            raise EngineError(
                f"request {request.request_id!r}: SGLang returns no log-probabilities before the "
                "mask of min_tokens and before repetition_penalty, and none for a think budget's "
                "phrase; remove these settings, or use the native engine"
            )
        self._wake()
        self._queued += RequestGroup(request, self._tokenizer, self._context).sequences
        self._send_queued()

    def step(self) -> list[Completion]:
        """Wait at most `STEP_TIMEOUT` seconds for a call to end, and send new ones. Return the
        completions of samples that have ended or were aborted; often an empty list."""
        done, self._undelivered = self._undelivered, []
        for future in wait(self._calls, 0 if done else STEP_TIMEOUT, FIRST_COMPLETED).done:
            call = self._calls.pop(future)
            self._take(call, self._server.part(future.result(), "/generate", "meta_info"))
            if call.sequence.finish is None:
                self._send(call.sequence)
            else:
                self._keys.pop(call.sequence, None)
                done.append(call.sequence.complete(call.sequence.finish))
        self._aborted &= {call.request_id for call in self._calls.values()}
        if self._aborted and time.monotonic() > self._aborted_at + ABORT_RETRY:
            self._abort_calls()  # the first abort may have reached the server before the calls
        self._send_queued()
        return done

    def abort(self, request_id: str) -> None:
        ended = [s for s in self._queued if s.group.request.request_id == request_id]
        self._queued = deque(s for s in self._queued if s not in ended)
        self._undelivered += [sequence.complete(Finish.ABORT) for sequence in ended]
        if any(call.request_id == request_id for call in self._calls.values()):
            self._aborted.add(request_id)
            self._abort_calls()

    def _abort_calls(self) -> None:
        for call in self._calls.values():
            if call.request_id in self._aborted:
                self._server.call("/abort_request", {"rid": call.name})
        self._aborted_at = time.monotonic()

    def probe(self) -> tuple[float, ...]:
        """Return the log-probabilities of fixed tokens after a fixed context, without the server's
        prefix cache."""
        self._wake()
        ids = self._config.probed
        params = {"max_new_tokens": 1, "temperature": 1.0, "sampling_seed": 0}
        body = {"input_ids": ids, "return_logprob": True, "token_ids_logprob": ids}
        body |= {"extra_key": uuid.uuid4().hex, "sampling_params": params}  # not from the cache
        answer, path = self._server.call("/generate", body), "/generate"
        names = "meta_info", "output_token_ids_logprobs"
        rows = self._server.part(answer, path, *names)[0]
        found = {token: logprob for logprob, token, _ in rows}
        return tuple(found[token] for token in ids)

    def expect(self, probe: Probe, tolerance: float) -> None:
        """Check all following loads: `load` raises an EngineError, as do all calls after it, if the
        server's probe after the load differs from ``probe()`` by more than ``tolerance`` nats
        (`ProbeCheck`)."""
        self._expected = probe, ProbeCheck(tolerance)

    def load(self, weights: Weights) -> None:
        """Load weights for all following tokens, also those of samples in flight.

        Raise an EngineError if the weights are refused, and keep the old ones. Also raise one, and
        make all further calls fail, if the server may hold a part of the weights after an error, or
        if its probe differs from the expected one.
        """
        protocol.check_weights(weights, self.version, self._incarnation)
        # The server itself reports neither missing nor unknown tensors.
        self._shapes.check(weights, self.version)
        # The learner computes its probe before the server wakes up and takes the GPU's memory.
        wanted = None if self._expected is None else self._expected[0]()
        try:
            self._update(weights.tensors, weights.version)
        except EngineError as error:
            raise self._failed(error) from error
        self.version, self._incarnation = weights.version, weights.incarnation
        self._last = self.probe()
        if self._expected is not None and wanted is not None:
            try:
                self._expected[1](weights.version, wanted, self._last)
            except EngineError as error:
                raise self._lose(str(error)) from None

    def sleep(self) -> None:
        """Release the GPU's memory until the next request, probe or load. Raise an EngineError if
        samples are not delivered yet. The weights' memory is released only if the server keeps a
        copy in main memory."""
        if self.unfinished:
            raise EngineError(f"{self.unfinished} samples are not delivered; step until they are")
        # A server that is not idle would crash; flush_cache waits until it is idle.
        self._server.call(f"/flush_cache?timeout={self._server.deadline:g}", {})
        self._server.call("/release_memory_occupation", {"tags": self._tags})
        self._is_asleep = True

    def _wake(self) -> None:
        if self._is_asleep:
            self._server.call("/resume_memory_occupation", {"tags": self._tags})
            self._is_asleep = False

    def close(self) -> None:
        """Abort the samples in flight and disconnect; the server keeps running. All following calls
        raise an EngineError."""
        with suppress(EngineError):
            self._wake()
            self._server.call("/abort_request", {"abort_all": True})
        self._sender.close()
        self._server.lost = "was closed by this client"
        self._threads.close()

    def _send_queued(self) -> None:
        """Send queued samples while fewer than max_running calls are in flight. This runs in the
        thread that also loads weights, so that the cache key matches the weights."""
        while self._queued and len(self._calls) < self._running:
            self._send(self._queued.popleft())

    def _send(self, sequence: Sequence) -> None:
        request, params = sequence.group.request, sequence.group.request.params
        place = params.seed, request.stream, request.group, request.first + sequence.index
        drawn = {
            "max_new_tokens": sequence.room,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "stop_token_ids": sorted(sequence.group.end_ids),
            "sampling_seed": int(uniforms(*place, request.position) * 2**53),
        }
        if params.min_p:
            drawn["min_p"] = params.min_p
        if params.stop and self._has_tokenizer:  # otherwise `take` truncates the response here
            drawn["stop"] = list(params.stop)
        name = uuid.uuid4().hex  # the server aborts every name with the given prefix
        body = {"rid": name, "input_ids": sequence.tokens, "return_logprob": True}
        if self._keeps:  # a new sample must not read cached keys of older weights
            key = f"{self._client}-{self._loads}"
            body["extra_key"] = self._keys.get(sequence, key)
            self._keys.setdefault(sequence, key)
        body["sampling_params"] = drawn
        future = self._threads.submit(self._server.call, "/generate", body)
        self._calls[future] = GenerateCall(sequence, name, self.version, self._incarnation)

    def _take(self, call: GenerateCall, answer: dict[str, Any]) -> None:
        """Append the tokens of a call's answer to its sample, up to the one that ends the response.
        Raise if the server was restarted or has sampled nothing."""
        stamp = str(self._server.part(answer, "/generate", "weight_version"))
        rows, sequence = answer.get("output_token_logprobs") or [], call.sequence
        if not stamp.isdecimal():
            raise self._lose(
                f"was restarted: its weights are {stamp!r}, which is no version of this run"
            )
        is_aborted = call.request_id in self._aborted
        sent = call.version, call.incarnation
        if not rows and not is_aborted and sent == (self.version, self._incarnation):
            raise self._server.error(
                f"sampled nothing for request {call.request_id!r}: {answer['finish_reason']}"
            )
        begins = len(sequence.tokens) == sequence.group.prompt_length
        if self._keeps and begins and sent != (int(stamp), self._incarnation):
            rows = []  # weights were loaded meanwhile: the tokens may rest on an older cache
        if begins and not rows:
            self._keys.pop(sequence, None)
        sound = next((i for i, row in enumerate(rows) if row[0] is None), len(rows))
        logprobs, tokens = [row[0] for row in rows[:sound]], [row[1] for row in rows[:sound]]
        self.sampled += sequence.take(tokens, logprobs, int(stamp))
        if sequence.finish is None and (is_aborted or sound < len(rows)):
            sequence.finish = Finish.ABORT

    def _update(self, tensors: Mapping[str, Tensor], version: int) -> None:
        self._wake()
        last = {"weight_version": str(version), "flush_cache": not self._keeps}
        try:
            self._sender.send(tensors, last)
            self._loads += 1
        except (OSError, RuntimeError, SafetensorError) as error:
            raise self._server.error(f"did not receive the weights: {error}") from error

    def _failed(self, error: EngineError) -> EngineError:
        """Return the error of a failed load, for the caller to raise. If a part of the weights was
        sent, or if a probe fails or shows that tensors have changed, make all further calls
        fail."""
        gap = math.inf
        if not self._sender.has_begun:
            with suppress(EngineError):
                gap = max(abs(a - b) for a, b in zip(self.probe(), self._last, strict=True))
        if gap > PROBE_NOISE:
            return self._lose(f"holds unknown weights after a failed load: {error}")
        return EngineError(f"{error}; version {self.version} stays loaded")

    def _lose(self, why: str) -> EngineError:
        """Make all further calls fail. Return the error for the caller to raise."""
        self._server.lost = f"{why}; restart it, and continue with `burnish resume`"
        return self._server.error(self._server.lost)
