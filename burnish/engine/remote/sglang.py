"""SGLang's HTTP server as an engine: tokens in, tokens out.

The server samples, and this client decides where a response ends, by the rules of `sequence.py`. A
call is cut when weights come, and the response goes on in another call, so all tokens of a call are
of one version. docs/engines.md tells which answers of the server this rests on.
"""

from __future__ import annotations

import http.client
import json
import math
import ssl
import time
import urllib.error
import urllib.request
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from torch import Tensor

from burnish.draws import uniforms
from burnish.engine import protocol
from burnish.engine.callers import Callers
from burnish.engine.environment import parts
from burnish.engine.protocol import Capabilities, ProbeCheck, Request
from burnish.engine.sequence import RequestGroup, Sequence
from burnish.engine.sglang_weights import WAYS, Way
from burnish.engine.shapes import Shapes
from burnish.errors import EngineError
from burnish.model.checkpoint import read_config, read_state
from burnish.model.tokenizer import Tokenizer
from burnish.types import Completion, Finish, Weights

OLDEST = "0.5.15"
"""The version of SGLang whose answers were recorded (tests/engine/sglang_contract.json)."""
AGAIN = 0.5
"""Seconds after which the server is told again to abort calls that have not ended."""
GLANCE = 0.02
"""Seconds after which a step returns though no call has ended, so that weights can come."""
SAME = 1e-2
"""How far two probes of the same weights may differ: sums depend on the batch."""
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
"""burnish's names for the precisions that a server may be started with."""
FACTS: dict[str, type] = {
    "version": str,
    "max_req_input_len": int,
    "skip_tokenizer_init": bool,
    "enable_deterministic_inference": bool,
    "dtype": str,
    "device": str,
    "tp_size": int,
    "pp_size": int,
    "dp_size": int,
    "enable_memory_saver": bool,
    "enable_weights_cpu_backup": bool,
}
"""The part of /server_info that burnish reads."""
Probe = Callable[[], tuple[float, ...]]


class Server:
    """One SGLang server; every error names its url."""

    def __init__(self, url: str, deadline: float, key: str | None = None) -> None:
        """``key``: the server's API key; None if it has none."""
        self.url, self.deadline, self._key = url.rstrip("/"), deadline, key
        self._opener = urllib.request.OpenerDirector()
        # No proxy, and no redirection, which could give the key to another server.
        for handler in (
            urllib.request.HTTPHandler(),
            urllib.request.HTTPSHandler(),
            urllib.request.HTTPErrorProcessor(),
            urllib.request.HTTPDefaultErrorHandler(),
        ):
            self._opener.add_handler(handler)
        self.lost: str | None = None
        """Why the server is not asked any more; None while it is."""

    def call(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """GET, or POST if there is a body -> the answer's JSON, None if it has none."""
        if self.lost is not None:
            raise self.error(self.lost)
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data)
        request.add_header("Content-Type", "application/json")
        if self._key is not None:
            request.add_header("Authorization", f"Bearer {self._key}")
        try:
            with self._opener.open(request, timeout=self.deadline) as answer:
                said = answer.read()
        except urllib.error.HTTPError as error:
            why = f"refused {path} ({error.code}): {error.read(1000).decode(errors='replace')}"
            if error.code in (401, 403):
                why += "; engine.key must name the environment variable that holds its API key"
            elif 300 <= error.code < 400:
                where = error.headers.get("Location")
                why = f"sends {path} to {where}, which burnish does not follow; use its own url"
        except (OSError, http.client.HTTPException) as error:
            why = f"does not answer {path}: {error}; is it running? See its log"
            if isinstance(getattr(error, "reason", None), ssl.SSLError):
                why = (
                    f"has no connection that is trusted here: {error}; use http:// if it has no "
                    "TLS, or name its certificate's authority by the variable SSL_CERT_FILE"
                )
            elif TimeoutError in (type(error), type(getattr(error, "reason", None))):
                why = f"did not answer {path} within engine.deadline = {self.deadline:g} s"
            self.lost = why
        else:
            try:
                return json.loads(said) if said.startswith(b"{") else None
            except (ValueError, RecursionError) as error:
                why = f"answers {path} with broken JSON ({error}); is it an SGLang server?"
        raise self.error(why)

    def facts(self) -> dict[str, Any]:
        """The part of /server_info that burnish reads."""
        found = self.call("/server_info") or {}
        if isinstance(found.get("version"), str) and parts(found["version"]) < parts(OLDEST):
            raise self.error(f"must be {OLDEST} or newer, is {found['version']}")
        wrong = [name for name, kind in FACTS.items() if type(found.get(name)) is not kind]
        if wrong:
            told = ", ".join(
                f"{name} = {found[name]!r:.40}" if name in found else f"no {name}" for name in wrong
            )
            raise self.error(
                f"answers /server_info with {told}; burnish needs SGLang {OLDEST} or newer there, "
                "so check engine.url, and that no proxy answers for it"
            )
        return {name: found[name] for name in FACTS}

    def part(self, told: Any, path: str, *names: str) -> Any:
        """A part of the answer to ``path``, by the names of the objects that it is in."""
        for name in names:
            if not isinstance(told, dict) or name not in told:
                raise self.error(
                    f"answers {path} without {'.'.join(names)}; is it SGLang {OLDEST}?"
                )
            told = told[name]
        return told

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Calls in flight return the tokens that they have; later ones wait for the weights."""
        self.call("/pause_generation", {"mode": "abort"})
        try:
            yield
        except BaseException:
            with suppress(EngineError):
                self.call("/continue_generation", {})
            raise
        self.call("/continue_generation", {})

    def error(self, why: str) -> EngineError:
        told = why if self._key is None else why.replace(self._key, "(key)")
        return EngineError(f"SGLang at {self.url} {told}")


class Call(NamedTuple):
    """A sample's next tokens, which the server is sampling."""

    sequence: Sequence
    name: str
    """The server's name for it."""
    version: int
    """The loaded weights when it was sent, and the incarnation of their run."""
    incarnation: int

    @property
    def request_id(self) -> str:
        return self.sequence.group.request.request_id


class SglangEngine:
    """Owns the server's weights: nobody else may use the server meanwhile."""

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
        """``model`` is the directory of version 0, which the server loads at once.

        ``keeps_cache``: samples in flight keep the keys and values of older weights; ``weights``:
        the way by which they come; ``sleeps``: `sleep` will be called; ``key``: the server's API
        key.
        """
        self._server = Server(url, deadline, key)
        self._tokenizer, self._keeps = tokenizer, keeps_cache
        self._calls: dict[Future[Any], Call] = {}
        self._running, self._queued = max_running, deque[Sequence]()
        """Samples that the server has not been asked for yet: it gets ``max_running`` at once."""
        self._undelivered: list[Completion] = []
        self._aborted: set[str] = set()
        """Requests whose samples end with the tokens that they have."""
        self._aborted_at = 0.0
        """When the server was last told so."""
        self._client, self._loads = uuid.uuid4().hex, 0
        """The key of the server's prefix cache: a client of its own, and the loads so far. Versions
        are no key, because a run that was restarted counts some of them again."""
        self._keys: dict[Sequence, str] = {}
        """Of samples that have tokens: those may read the cache of the weights that began them."""
        self.version = self.sampled = self._incarnation = 0
        self._expected: tuple[Probe, ProbeCheck] | None = None
        self._config = config = read_config(Path(model))
        self._shapes = Shapes(config)
        told = self._server.facts()
        self._context: int = min(config.context, told["max_req_input_len"])
        self._reads = not told["skip_tokenizer_init"]
        self.facts = {"name": "sglang", "precision": PRECISIONS.get(told["dtype"], told["dtype"])}
        self.capabilities = Capabilities(
            model_logprobs=True,
            token_versions=True,
            counter_draws=told["enable_deterministic_inference"],
        )
        # Weights without a copy in main memory would be lost, and a load may be refused.
        self._tags = ["kv_cache", "weights"][: 1 + told["enable_weights_cpu_backup"]]
        self._is_asleep = False
        if sleeps and not told["enable_memory_saver"]:
            raise self._server.error(
                "can't give its memory away, as engine.sleep = true asks; start it with "
                "--enable-memory-saver"
            )
        if weights != "disk" and told["pp_size"] * told["dp_size"] > 1:
            raise self._server.error(
                f"has pp_size = {told['pp_size']} and dp_size = {told['dp_size']}; they must be 1 "
                f"for engine.weights = '{weights}'; start it so, or use engine.weights = 'disk'"
            )
        self._way: Way = WAYS[weights](self._server, told)
        self._update(read_state(Path(model)), 0)
        self._last, self._callers = self.probe(), Callers(max_running)

    @property
    def unfinished(self) -> int:
        return len(self._calls) + len(self._queued) + len(self._undelivered)

    def submit(self, request: Request) -> None:
        protocol.check(request, vocab_size=self._config.vocab_size, context=self._context)
        if request.params.min_tokens or request.params.think_tokens:
            raise EngineError(
                f"request {request.request_id!r}: SGLang has no log-probabilities from before the "
                "mask of min_tokens, and none of a think budget's phrase; leave both out, or use "
                "the native engine"
            )
        self._wake()
        self._queued += RequestGroup(request, self._tokenizer, self._context).sequences
        self._send_queued()

    def step(self) -> list[Completion]:
        """Wait a moment for calls -> the samples that are complete; the others go on."""
        done, self._undelivered = self._undelivered, []
        for future in wait(self._calls, 0 if done else GLANCE, FIRST_COMPLETED).done:
            call = self._calls.pop(future)
            self._take(call, self._server.part(future.result(), "/generate", "meta_info"))
            if call.sequence.finish is None:
                self._send(call.sequence)
            else:
                self._keys.pop(call.sequence, None)
                done.append(call.sequence.complete(call.sequence.finish))
        self._aborted &= {call.request_id for call in self._calls.values()}
        if self._aborted and time.monotonic() > self._aborted_at + AGAIN:
            self._abort_calls()  # it may have overtaken the calls, which the server did not know
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
        self._wake()
        ids = self._config.probed
        params = {"max_new_tokens": 1, "temperature": 1.0, "sampling_seed": 0}
        asked = {"input_ids": ids, "return_logprob": True, "token_ids_logprob": ids}
        asked |= {"extra_key": uuid.uuid4().hex, "sampling_params": params}  # not from the cache
        told, path = self._server.call("/generate", asked), "/generate"
        names = "meta_info", "output_token_ids_logprobs"
        rows = self._server.part(told, path, *names)[0]
        found = {token: logprob for logprob, token, _ in rows}
        return tuple(found[token] for token in ids)

    def expect(self, probe: Probe, tolerance: float) -> None:
        """After each load, the server's probe must be ``probe()`` within ``tolerance``."""
        self._expected = probe, ProbeCheck(tolerance)

    def load(self, weights: Weights) -> None:
        """New weights for all tokens from here on; samples in flight go on with them."""
        protocol.check_weights(weights, self.version, self._incarnation)
        # The server misses no tensor and ignores those that it does not know.
        self._shapes.check(weights, self.version)
        # The learner answers first: it may need the GPU's memory, which the server takes then.
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
        """Gives the GPU's memory away until the next request, probe or load."""
        if self.unfinished:
            raise EngineError(f"{self.unfinished} samples are not delivered; step until they are")
        # A server that is not idle would end; it empties its cache as soon as it is.
        self._server.call(f"/flush_cache?timeout={self._server.deadline:g}", {})
        self._server.call("/release_memory_occupation", {"tags": self._tags})
        self._is_asleep = True

    def _wake(self) -> None:
        if self._is_asleep:
            self._server.call("/resume_memory_occupation", {"tags": self._tags})
            self._is_asleep = False

    def close(self) -> None:
        """Ends the samples in flight; the server stays."""
        with suppress(EngineError):
            self._wake()
            self._server.call("/abort_request", {"abort_all": True})
        self._way.close()
        self._server.lost = "was left by this client"
        self._callers.close()

    def _send_queued(self) -> None:
        """The caller's thread sends, and the same thread loads: a call has the weights' key."""
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
            "sampling_seed": int(uniforms(*place, 0) * 2**53),
        }
        if params.stop and self._reads:  # else a response runs on, and is cut here
            drawn["stop"] = list(params.stop)
        name = uuid.uuid4().hex  # the server aborts every name that begins with the given one
        asked = {"rid": name, "input_ids": sequence.tokens, "return_logprob": True}
        if self._keeps:  # a new sample must not find keys of older weights in the cache
            key = f"{self._client}-{self._loads}"
            asked["extra_key"] = self._keys.get(sequence, key)
            self._keys.setdefault(sequence, key)
        body = asked | {"sampling_params": drawn}
        future = self._callers.submit(self._server.call, "/generate", body)
        self._calls[future] = Call(sequence, name, self.version, self._incarnation)

    def _take(self, call: Call, told: dict[str, Any]) -> None:
        """The tokens of an answer, up to the one that ends the response."""
        stamp = str(self._server.part(told, "/generate", "weight_version"))
        rows, sequence = told.get("output_token_logprobs") or [], call.sequence
        if not stamp.isdecimal():
            raise self._lose(f"was started again: its weights are {stamp!r}, and not of this run")
        is_aborted = call.request_id in self._aborted
        sent = call.version, call.incarnation
        if not rows and not is_aborted and sent == (self.version, self._incarnation):
            raise self._server.error(
                f"sampled nothing for request {call.request_id!r}: {told['finish_reason']}"
            )
        begins = len(sequence.tokens) == sequence.group.prompt_length
        if self._keeps and begins and sent != (int(stamp), self._incarnation):
            rows = []  # weights came while it was on its way: it may rest on a cache of older ones
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
            self._way.send(tensors, last)
            self._loads += 1
        except (OSError, RuntimeError, SafetensorError) as error:
            raise self._server.error(f"gets no weights: {error}") from error

    def _failed(self, error: EngineError) -> EngineError:
        """The error of a load. The server may have changed tensors or died: a probe shows it."""
        gap = math.inf
        if not self._way.has_begun:
            with suppress(EngineError):
                gap = max(abs(a - b) for a, b in zip(self.probe(), self._last, strict=True))
        if gap > SAME:
            return self._lose(f"holds no known weights after a load that failed: {error}")
        return EngineError(f"{error}; version {self.version} stays loaded")

    def _lose(self, why: str) -> EngineError:
        """The error about a server that is not asked again."""
        self._server.lost = f"{why}; start it again, and go on with `burnish resume`"
        return self._server.error(self._server.lost)
