"""The conformance suite checks whether an engine implements the protocol.

It compares the engine with an oracle, which provides log-probabilities from burnish's own forward
pass, and weights to load. The result of a check is pass, fail, or not offered, which means that the
engine lacks an optional feature; a recipe that needs the feature is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from burnish.engine.protocol import Engine, Request
from burnish.engine.remote.wire import STREAMS
from burnish.errors import EngineError
from burnish.types import Completion, Finish, FloatArray, IntArray, SamplingParams, Weights

PASS, FAIL, NOT_OFFERED = "pass", "fail", "not offered"
BOUNDS = {"fp32": (1e-4, 5e-3), "bf16": (0.1, 3.0), "fp16": (0.02, 0.3)}
"""Bounds on the mean and the largest gap between log-probabilities of engine and oracle, by
precision. In bf16 the oracle itself was once off by 1.7, on a token after a prompt of one token."""
TIE = 3
"""Two tokens are tied, so that rounding decides which one is the most likely, if their
log-probabilities differ by at most this multiple of the bound on the mean gap."""
TEMPERATURES = (0.7, 1.0, 1.3)
TOKENS = 32
LONG = 1024
"""Maximum length of a response that a check interrupts: long enough that a fast engine has not
finished it by then."""
EARLY = 3
"""Number of engine steps before a check interrupts a response."""
SAMPLES = 4
CHANGE = 0.02
"""New weights are the initial ones times 1 plus or minus this. The change compounds over layers: if
it were much larger, rounding of the large logits would exceed the bounds."""
LIMIT = 20_000
"""Number of engine steps after which a check fails if samples are still unfinished."""
SPAN = 3 * 128 + 5
"""Length of a prompt that spans several blocks of a prefix cache and a part of another. Known
engines have blocks of 1, 16 and 128 tokens."""
BLOCK = 16
"""Block size for a model with a short context: a prompt that spans blocks then has whole blocks of
this size plus 5 tokens."""
BRIEF = 8
"""Length of the responses that are compared after an update of the weights."""
FEW = 3
"""Factor that relaxes the bound on the mean gap for the short responses of `BRIEF` tokens."""
LARGE_PENALTY = 1e4
"""Repetition penalty after which a token that has occurred is never the most likely one."""
UPDATES = (
    "requests after a part of the weights",
    "requests after new weights",
    "weights in flight",
)
"""Names of the checks that depend on the engine's setting ``on_update``."""


class Oracle(Protocol):
    """burnish's own model, which provides the log-probabilities that an engine should return, and
    the weights to load into it."""

    def score(self, prompt: IntArray, response: IntArray, temperature: float) -> FloatArray:
        """Return the log-probabilities [C] of a response's tokens at ``temperature``, with the
        weights of the last `take`, or the initial weights before the first one."""

    def take(self, change: float, *, turned: bool = False, part: bool = False) -> dict[str, Any]:
        """Make new weights by multiplying the model's initial tensors by 1 + ``change``. Use them
        in `score` and `probe` from now on, and return them for the engine to load.

        ``turned``: also negate the projections of queries, keys, values and of the attention's
        result. The model still computes the same function, unless it reads keys and values that
        were cached before: they make its log-probabilities wrong by far more than rounding.
        ``part``: change and return only the attention's tensors; the others have their initial
        values.
        """

    def probe(self) -> tuple[float, ...]:
        """Return the log-probabilities of fixed tokens after a fixed context, as `Engine.probe`
        does, with the weights of the last `take`."""


class Result(NamedTuple):
    """Result of one check. ``status`` is ``PASS``, ``FAIL`` or ``NOT_OFFERED``; ``detail`` explains
    it in the report."""

    name: str
    status: str
    detail: str


class Broken(Exception):
    """Raised by a check if the engine violates the protocol."""


class Suite:
    """Runs the checks on an engine, which must have the oracle's initial weights and no requests.
    Checks sample from the engine and load weights into it."""

    def __init__(
        self,
        engine: Engine,
        oracle: Oracle,
        prompts: Sequence[IntArray],
        *,
        room: int = TOKENS,
        precision: str = "fp32",
        on_update: str = "recompute",
        running: int = 8,
    ) -> None:
        """``prompts``: a few prompts. The first one is the longest; after it, the context has
        ``room`` tokens left for a response. ``precision`` selects the `BOUNDS`; ``on_update`` is
        the engine's setting.

        ``running``: number of requests that are submitted just before weights are loaded. It should
        exceed the number that the engine can start at once, so that some have not started by then.
        """
        self.engine, self.oracle, self.prompts = engine, oracle, prompts
        self.bounds, self.on_update, self.running = BOUNDS[precision], on_update, running
        self.room, self.context = min(room, LONG), len(prompts[0]) + room
        self.version, self._turned = 0, False
        self._prompts: dict[str, IntArray] = {}
        """The prompt of each request, by the request's id."""

    @property
    def checks(self) -> dict[str, Callable[[], tuple[str, str]]]:
        """Checks by name. Each returns a status and a detail, or raises `Broken`. Run them in this
        order: later checks depend on the loads of earlier ones."""
        heats = {f"log-probabilities at temperature {t:g}": t for t in TEMPERATURES}
        return {
            **{name: partial(self.logprobs, heat) for name, heat in heats.items()},
            "greedy tokens": self.greedy,
            "samples differ": self.differ,
            "a seed repeats": self.repeats,
            "end ids": self.end_ids,
            "stop strings": self.stop_strings,
            "min_tokens": self.min_tokens,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "a response that has begun": self.begun,
            "abort": self.abort,
            "requests after a part of the weights": partial(self.after_update, part=True),
            "requests after new weights": partial(self.after_update, part=False),
            "new weights are in use": self.load,
            "weights in flight": self.in_flight,
            "a failed load": self.failed_load,
            "an older incarnation": self.older,
            "ten loads without learning": self.still,
        }

    def run(self, name: str) -> Result:
        """Run the check ``name``, a key of `checks`, and return its result. An EngineError counts
        as a failure; other exceptions propagate."""
        try:
            return Result(name, *self.checks[name]())
        except Broken as broken:
            return Result(name, FAIL, str(broken))
        except EngineError as error:
            return Result(name, FAIL, f"the engine says: {error}")

    def logprobs(self, temperature: float) -> tuple[str, str]:
        """Check that the log-probabilities of samples at this temperature equal the oracle's,
        within the bounds."""
        return PASS, self._close(self._sample(temperature=temperature))

    def greedy(self) -> tuple[str, str]:
        """Check that greedy log-probabilities are those at temperature 1, and that the samples of a
        prompt diverge only where two tokens are equally likely up to rounding."""
        done = self._sample(temperature=0.0)
        for other in done[1:SAMPLES]:
            self._part_at_a_tie(done[0], other)
        return PASS, self._close(done)

    def _part_at_a_tie(self, one: Completion, other: Completion) -> None:
        both = list(zip(one.token_ids, other.token_ids, strict=False))
        parted = next((i for i, (ours, theirs) in enumerate(both) if ours != theirs), 0)
        gap = abs(float(one.logprobs[parted] - other.logprobs[parted]))
        message = f"two samples of a prompt part at no tie: they are {gap:.2g} nats apart there"
        _demand(gap <= TIE * self.bounds[0], message)

    def differ(self) -> tuple[str, str]:
        """Check that the samples of a prompt differ: more than half of the texts are distinct."""
        kinds = len({tuple(c.token_ids) for c in self._sample()[:SAMPLES]})
        _demand(kinds > SAMPLES // 2, f"{SAMPLES} samples of a prompt are {kinds} texts")
        return PASS, f"{kinds} of {SAMPLES}"

    def repeats(self) -> tuple[str, str]:
        """Check that the same seed gives the same tokens, and that another seed gives others. Not
        offered if the tokens differ and the engine does not promise reproducible draws."""
        one, two, three = (
            [c.token_ids.tolist() for c in self._sample(seed=seed)] for seed in (1, 1, 2)
        )
        if one != two and not self.engine.capabilities.counter_draws:
            return NOT_OFFERED, "draws are the engine's own"
        _demand(one == two, "the same seed gives other tokens")
        _demand(one != three, "another seed gives the same tokens")
        return PASS, "the same tokens by the same seed, others by another"

    def end_ids(self) -> tuple[str, str]:
        """Check that each response stops at the first end id that it contains, with that id as its
        last token, and that at least one response does.

        The end ids are taken from responses that the check samples first. Return ``PASS`` and a
        detail for the report; raise ``Broken`` if the check fails.
        """
        ends = {int(t) for c in self._sample() for t in c.token_ids[4:12]}
        done, stopped = self._sample(stop_ids=tuple(ends)), 0
        for c in done:
            hits = [i for i, token in enumerate(c.token_ids.tolist()) if token in ends]
            if c.stop in ends:
                stopped += 1
                found = c.finish, c.stop, hits
                last = len(c.token_ids) - 1
                _demand(found == (Finish.STOP, c.token_ids[last], [last]), f"it ended by {found}")
            else:
                _demand(not hits, f"{c.token_ids[hits].tolist()} did not end a response")
        _demand(stopped > 0, "no response ended")
        return PASS, f"{stopped} of {len(done)} responses ended by one, which is their last token"

    def stop_strings(self) -> tuple[str, str]:
        """Check that each response that contains the stop string ends with its first occurrence,
        and that at least one response does. The stop string is a frequent character of earlier
        responses."""
        texts = "".join(c.text for c in self._sample())
        _demand(bool(texts), "the responses have no text")
        stop = max(sorted(set(texts)), key=texts.count)
        done, stopped = self._sample(stop=(stop,)), 0
        for c in done:
            if c.stop == stop:
                stopped += 1
                _demand(c.finish is Finish.STOP, f"it finished by {c.finish}")
                _demand(c.text.find(stop) + len(stop) == len(c.text), f"the text is {c.text!r}")
            else:
                _demand(stop not in c.text, f"{stop!r} did not end {c.text!r}")
        _demand(stopped > 0, "no response ended")
        return PASS, f"{stopped} of {len(done)} responses ended at {stop!r}; {self._close(done)}"

    def min_tokens(self) -> tuple[str, str]:
        """Check that no response ends before min_tokens, and that log-probabilities are computed
        before the mask of end ids. Not offered if the engine refuses min_tokens."""
        ends = tuple({int(t) for c in self._sample() for t in c.token_ids[:3]})
        how = {"stop_ids": ends, "min_tokens": 8}
        if (done := self._offered(**how)) is None:
            return NOT_OFFERED, "the engine refuses it"
        early = [c for c in done if len(c.token_ids) < 8 or set(c.token_ids[:7]) & set(ends)]
        _demand(not early, f"{len(early)} responses ended before 8 tokens")
        return PASS, f"none ended before; before the mask, {self._close(done)}"

    def top_p(self) -> tuple[str, str]:
        """Check that log-probabilities are computed before the truncation. Not offered if the
        engine refuses top_p."""
        if (done := self._offered(top_p=0.5)) is None:
            return NOT_OFFERED, "the engine refuses it"
        return PASS, f"before the truncation, {self._close(done)}"

    def min_p(self) -> tuple[str, str]:
        """Check that log-probabilities are computed before the truncation, and that a min_p of 1
        leaves only the most likely token. Not offered if the engine refuses min_p."""
        if (done := self._offered(min_p=0.3)) is None:
            return NOT_OFFERED, "the engine refuses it"
        greedy, strictest = self._sample(1, temperature=0.0), self._sample(1, min_p=1.0)
        for one, other in zip(greedy, strictest, strict=True):
            self._part_at_a_tie(one, other)
        return PASS, f"before the truncation, {self._close(done + strictest)}"

    def repetition_penalty(self) -> tuple[str, str]:
        """Check that log-probabilities are computed before the penalty, and that a large penalty
        prevents the repetition of any token of the prompt or of the response, also if the request
        has a partial response. Not offered if the engine refuses repetition_penalty."""
        how = {"repetition_penalty": LARGE_PENALTY, "temperature": 0.0}
        if (done := self._offered(**how)) is None:
            return NOT_OFFERED, "the engine refuses it"
        halves = [
            replace(
                self._request(prompt, 1, **how), begun=_beginning(whole, len(whole.token_ids) // 2)
            )
            for prompt, whole in zip(self.prompts, done[::SAMPLES], strict=True)
        ]
        for c in done + self._finish(halves):
            fresh = {*c.token_ids.tolist()} - {*self._prompts[c.request_id].tolist()}
            again = len(c.token_ids) - len(fresh)
            _demand(again == 0, f"{again} of {len(c.token_ids)} tokens had occurred before")
        return PASS, f"no token was repeated; before the penalty, {self._close(done)}"

    def begun(self) -> tuple[str, str]:
        """Check that responses to a request with a partial response begin with its unchanged
        tokens, log-probabilities and versions, and continue after them."""
        whole = max(self._sample()[:SAMPLES], key=lambda c: len(c.token_ids))
        kept = len(whole.token_ids) // 2
        half = _beginning(whole, kept)
        done = self._finish([replace(self._request(self.prompts[0], SAMPLES), begun=half)])
        for c in done:
            both = [(getattr(c, name)[:kept], getattr(half, name)) for name in STREAMS]
            same = all(np.array_equal(ours, theirs) for ours, theirs in both)
            _demand(same and len(c.token_ids) > kept, "its beginning was not kept")
        return PASS, f"goes on from {kept} tokens; {self._close(done)}"

    def abort(self) -> tuple[str, str]:
        """Check that an abort ends unfinished samples, and that all samples are returned with their
        tokens so far. Not offered if a step samples whole responses."""
        request = self._request(self.prompts[0], SAMPLES, max_tokens=self.room)
        self.engine.submit(request)
        early = [c for _ in range(EARLY) for c in self.engine.step()]
        if not self.engine.unfinished:
            return NOT_OFFERED, "a step samples whole responses"
        self.engine.abort(request.request_id)
        done = early + self._drain()
        _demand(len(done) == SAMPLES, f"{len(done)} of {SAMPLES} came back")
        _demand(all(c.finish is not Finish.LENGTH for c in done), "samples went on")
        cut = [len(c.token_ids) for c in done if c.finish is Finish.ABORT]
        _demand(bool(cut), "all samples had ended before; try another model")
        return PASS, f"{len(cut)} samples came back with {cut[0]} tokens so far"

    def load(self) -> tuple[str, str]:
        """Load new weights, and check that the probe moves and that tokens have the new version and
        log-probabilities. The prompts were sampled before, which reveals a stale cache."""
        before = self.engine.probe()
        self._load(CHANGE)
        moved = float(np.abs(np.subtract(before, self.engine.probe())).max())
        gap = float(np.abs(np.subtract(self.oracle.probe(), self.engine.probe())).max())
        _demand(moved > 3 * gap, f"the probe moved by {moved:.2g}, with a gap of {gap:.2g}")
        done = self._sample()
        _demand(all(set(c.versions) == {self.version} for c in done), "tokens have other versions")
        return PASS, f"the probe moved by {moved:.2g}, gap {gap:.2g}; {self._close(done)}"

    def in_flight(self) -> tuple[str, str]:
        """Load weights while samples are in flight; check that their tokens have the old and the
        new version. Unless caches are kept, also check the log-probabilities after the load. Not
        offered if a step samples whole responses."""
        request = self._request(self.prompts[0], SAMPLES, max_tokens=self.room)
        self.engine.submit(request)
        mixed = [c for _ in range(EARLY) for c in self.engine.step()]
        if not self.engine.unfinished:
            return NOT_OFFERED, "a step samples whole responses"
        old = self.version
        self._load(-CHANGE)
        mixed += [c for _ in range(TOKENS // 4) for c in self.engine.step()]
        self.engine.abort(request.request_id)
        mixed += self._drain()
        stamps = {int(stamp) for c in mixed for stamp in c.versions}
        _demand(stamps == {old, self.version}, f"tokens have the versions {stamps}")
        gaps = np.concatenate([self._gaps(c)[c.versions == self.version] for c in mixed])
        keeps = self.on_update == "keep"
        how = "are kept" if keeps else "are computed again"
        return PASS, f"caches {how}: {self._near(gaps, demanded=not keeps)} after the update"

    def after_update(self, *, part: bool) -> tuple[str, str]:
        """Check that a request that starts after an update does not read a cache of older weights.

        This must hold for any ``on_update``, for caches of completed requests and of one in flight,
        and even if the request was submitted before the update. The prompts span several blocks and
        share a prefix. ``part``: update only the attention's tensors.
        """
        span, fork = self._spanning()
        found = self._updated(part, span, fork)
        gaps = {
            kind: np.concatenate([self._gaps(c)[c.versions == self.version] for c in done])
            for kind, done in found.items()
        }
        mean, most = FEW * self.bounds[0], self.bounds[1]
        for kind, of in gaps.items():
            is_near = of.mean() <= mean and of.max() <= most
            _demand(is_near, f"{kind} read a cache of older weights: {_gap_text(of)}")
        return PASS, f"prompts of {len(span)} tokens: {_gap_text(np.concatenate([*gaps.values()]))}"

    def _updated(self, part: bool, span: IntArray, fork: IntArray) -> dict[str, list[Completion]]:
        """Load new weights while requests are in flight and queued. Return, by the kind of request,
        completions whose new tokens must not depend on a cache of older weights."""

        def submit(prompt: IntArray, samples: int = SAMPLES) -> Request:
            request = self._request(prompt, samples, max_tokens=BRIEF)
            self.engine.submit(request)
            return request

        first = submit(span, 1)
        submit(fork, 1)
        (answer,) = (c for c in self._drain() if c.request_id == first.request_id)
        flight = self._request(span, SAMPLES, max_tokens=min(LONG, self.context - len(span)))
        self.engine.submit(flight)
        done = [c for _ in range(EARLY) for c in self.engine.step()]
        waited = [submit(fork, 1) for _ in range(self.running)]
        self._turned = not self._turned
        self._load(CHANGE * self._turned, turned=self._turned, part=part)
        kinds = {
            "a request with the prompt of one in flight": [submit(span)],
            "a request that shares a prompt's beginning": [submit(fork)],
            "a request that goes on from an older response": [
                submit(np.concatenate([span, answer.token_ids]))
            ],
            "a request that waited during the update": waited,
        }
        done += self._drain([request for of in kinds.values() for request in of])
        self.engine.abort(flight.request_id)
        done += self._drain()
        kinds["a request with a prompt of before"] = [submit(span)]
        done += self._drain()
        found = dict[str, list[Completion]]()
        for kind, requests in kinds.items():
            names = {request.request_id for request in requests}
            own = [c for c in done if c.request_id in names]
            found[kind] = [c for c in own if set(c.versions) == {self.version}]
            # A server keeps sampling between two steps, so some queued requests have started.
            is_new = len(found[kind]) == len(own) or requests is waited
            _demand(is_new, f"{kind} has tokens of other versions")
        if self.on_update != "keep":
            cut = [c for c in done if c.request_id == flight.request_id]
            found["a request in flight"] = [c for c in cut if self.version in c.versions]
        return {kind: of for kind, of in found.items() if of}

    def _spanning(self) -> tuple[IntArray, IntArray]:
        """Return two prompts that span several cache blocks and share their first two thirds. They
        are different for each version, so that no earlier check has cached them."""
        whole = (self.context // 2 - 5) // BLOCK * BLOCK
        tokens = np.roll(np.concatenate(self.prompts), self.version)
        span = np.resize(tokens, min(SPAN, max(whole, 0) + 5))
        shared = len(span) * 2 // 3
        return span, np.concatenate([span[:shared], span[::-1][: len(span) - shared]])

    def failed_load(self) -> tuple[str, str]:
        """Check that the engine refuses weights that are not finite, incomplete or of the wrong
        shape, and that its weights and version do not change."""
        before, tensors = self.engine.probe(), self.oracle.take(-CHANGE)
        name = min(tensors, key=lambda name: tensors[name].numel())
        broken = {
            "not finite": tensors | {name: tensors[name] * np.nan},
            "a tensor short": {k: v for k, v in tensors.items() if k != name},
            "of another shape": tensors | {name: tensors[name][:1]},
        }
        for kind, bad in broken.items():
            try:
                self.engine.load(Weights(self.version + 1, 0, bad))
            except EngineError:
                continue
            raise Broken(f"weights that are {kind} were loaded")
        gap = float(np.abs(np.subtract(before, self.engine.probe())).max())
        _demand(gap == 0, f"the probe moved by {gap:.2g} after failed loads")
        _demand(self.engine.version == self.version, f"the version is {self.engine.version}")
        return PASS, f"{', '.join(broken)}: refused, and version {self.version} stays"

    def older(self) -> tuple[str, str]:
        """Check that the engine refuses weights from before a restart of the run: incarnation 1
        after incarnation 2, which stays loaded."""
        self._load(CHANGE, incarnation=2)
        try:
            self._load(CHANGE, incarnation=1)
        except EngineError:
            self.version -= 1
            return PASS, "refused"
        raise Broken("weights of incarnation 1 were loaded after incarnation 2")

    def still(self) -> tuple[str, str]:
        """Load the same weights ten times, and check that the mean gap to the oracle stays the
        same, within the bound."""
        gaps = []
        for _ in range(10):
            self._load(CHANGE, incarnation=2)
            gaps.append(float(np.mean([self._gaps(c).mean() for c in self._sample(1)])))
        spread = max(gaps) - min(gaps)
        _demand(
            spread <= self.bounds[0], f"the mean gap goes from {min(gaps):.2g} to {max(gaps):.2g}"
        )
        return PASS, f"mean gap {min(gaps):.2g} to {max(gaps):.2g}"

    def _request(self, prompt: IntArray, samples: int, **params: Any) -> Request:
        name = f"check-{len(self._prompts)}"
        self._prompts[name] = prompt
        how = SamplingParams(**{"max_tokens": TOKENS} | params)
        return Request(
            name, prompt, samples, how, group=len(self._prompts) * ("seed" not in params)
        )

    def _sample(self, samples: int = SAMPLES, **params: Any) -> list[Completion]:
        """Sample whole responses of all prompts; return the completions in the order of the
        prompts."""
        return self._finish([self._request(prompt, samples, **params) for prompt in self.prompts])

    def _offered(self, **params: Any) -> list[Completion] | None:
        """Sample as `_sample` does. If the engine refuses a request, complete the others and return
        None."""
        try:
            return self._sample(**params)
        except EngineError:
            self._drain()
            return None

    def _finish(self, requests: list[Request]) -> list[Completion]:
        for request in requests:
            self.engine.submit(request)
        order = [request.request_id for request in requests]
        return sorted(self._drain(), key=lambda c: (order.index(c.request_id), c.sample_index))

    def _drain(self, awaited: list[Request] | None = None) -> list[Completion]:
        """Step until the engine has no unfinished sample, or, if there are ``awaited`` requests,
        until all their samples are complete. Return the completions of all requests. Raise `Broken`
        after `LIMIT` steps."""
        done: list[Completion] = []
        names = [request.request_id for request in awaited or () for _ in range(request.n)]
        for _ in range(LIMIT):
            is_there = awaited and len(names) == sum(c.request_id in names for c in done)
            if not self.engine.unfinished or is_there:
                return done
            done += self.engine.step()
        raise Broken(f"{self.engine.unfinished} samples are not complete after {LIMIT} steps")

    def _load(
        self, change: float, incarnation: int = 0, *, turned: bool = False, part: bool = False
    ) -> None:
        self.version += 1
        tensors = self.oracle.take(change, turned=turned, part=part)
        self.engine.load(Weights(self.version, incarnation, tensors, part))
        found = self.engine.version
        _demand(found == self.version, f"its version is {found} after a load of {self.version}")

    def _gaps(self, c: Completion) -> FloatArray:
        heat = c.params.temperature or 1.0
        scores = self.oracle.score(self._prompts[c.request_id], c.token_ids, heat)
        found: FloatArray = np.abs(c.logprobs - scores)
        return found

    def _close(self, completions: list[Completion]) -> str:
        return self._near(np.concatenate([self._gaps(c) for c in completions]))

    def _near(self, gaps: FloatArray, *, demanded: bool = True) -> str:
        """Return a description of the gaps; raise `Broken` if they exceed the bounds and
        ``demanded`` is true."""
        found, (mean, most) = _gap_text(gaps), self.bounds
        is_near = gaps.mean() <= mean and gaps.max() <= most
        _demand(is_near or not demanded, f"{found}, over {mean:g} or {most:g}")
        return found


def _beginning(completion: Completion, count: int) -> Completion:
    """Return the partial response that consists of the first ``count`` tokens."""
    return replace(completion, **{name: getattr(completion, name)[:count] for name in STREAMS})


def _gap_text(gaps: FloatArray) -> str:
    return f"gap {gaps.mean():.2g} on average, {gaps.max():.2g} at most"


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)
