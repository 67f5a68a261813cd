"""The conformance suite: whether an engine does what the protocol says, before anyone trusts it.

It knows the protocol and an oracle, which gives a model's log-probabilities by burnish's own
forward pass, and weights to load. A check passes, fails, or is not offered: then the engine refuses
what it can't do, and a recipe that needs it is refused as well.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from burnish.engine.protocol import Engine, Request
from burnish.errors import EngineError
from burnish.types import Completion, Finish, FloatArray, IntArray, SamplingParams, Weights

PASS, FAIL, NOT_OFFERED = "pass", "fail", "not offered"
BOUNDS = {"fp32": (1e-4, 5e-3), "bf16": (0.1, 3.0), "fp16": (0.02, 0.3)}
"""The mean and the largest gap between log-probabilities of engine and oracle, by precision. The
oracle itself was seen to be 1.7 off in bf16, on a token that follows a prompt of one token."""
TIE = 3
"""Mean gaps by which the log-probabilities of two tokens may differ at a tie: rounding, which is
not the same for all samples, makes one or the other the likeliest."""
TEMPERATURES = (0.7, 1.0, 1.3)
TOKENS = 32
LONG = 1024
"""Tokens of a response that will be interrupted: a fast engine must not be done with it by then."""
EARLY = 3
"""Steps before it is interrupted."""
SAMPLES = 4
CHANGE = 0.02
"""New weights are the first ones times 1 plus or minus this. It compounds over the layers: with
much more, logits are so large that rounding alone exceeds the bounds."""
LIMIT = 20_000
"""Steps in which a request must be complete."""
SPAN = 3 * 128 + 5
"""Tokens of a prompt that spans several blocks of a prefix cache, and a part of another. Engines
were seen with blocks of 1, 16 and 128 tokens."""
BLOCK = 16
"""A model with a short context gets a prompt of whole blocks of this size, and 5 tokens."""
BRIEF = 8
"""Tokens of the responses that are compared after an update of the weights."""
FEW = 3
"""The mean gap of these few tokens may be this many times the bound for many tokens."""
UPDATES = (
    "requests after a part of the weights",
    "requests after new weights",
    "weights in flight",
)
"""The checks that depend on ``on_update``."""


class Oracle(Protocol):
    def score(self, prompt: IntArray, response: IntArray, temperature: float) -> FloatArray:
        """Log-probabilities [C] of a response's tokens, by the weights that were taken last."""

    def take(self, change: float, *, turned: bool = False, part: bool = False) -> dict[str, Any]:
        """The tensors of the model, each of them times 1 + ``change``, which are scored from now
        on.

        turned: queries, keys, values and the projection after the attention have the other sign.
        The model computes the same function with them, but not with keys and values that were
        cached before: these make its log-probabilities wrong by far more than any rounding.
        part: only the tensors of the attention change and are returned; the others are as at first.
        """

    def probe(self) -> tuple[float, ...]: ...


class Result(NamedTuple):
    name: str
    status: str
    told: str


class Broken(Exception):
    """The engine does not do what a check asks for."""


class Suite:
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
        """``prompts``: a few, of which the first is the longest and leaves ``room`` for tokens.

        ``running``: the number of requests that wait while weights come. With the engine's
        max_running, some of them have not begun by then.
        """
        self.engine, self.oracle, self.prompts = engine, oracle, prompts
        self.bounds, self.on_update, self.running = BOUNDS[precision], on_update, running
        self.room, self.context = min(room, LONG), len(prompts[0]) + room
        self.version, self._turned = 0, False
        self._asked: dict[str, IntArray] = {}
        """The prompt of each request."""

    @property
    def checks(self) -> dict[str, Callable[[], tuple[str, str]]]:
        """In an order in which later ones need earlier ones."""
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
        """The result of a check by its name."""
        try:
            return Result(name, *self.checks[name]())
        except Broken as broken:
            return Result(name, FAIL, str(broken))
        except EngineError as error:
            return Result(name, FAIL, f"the engine says: {error}")

    def logprobs(self, temperature: float) -> tuple[str, str]:
        return PASS, self._close(self._sample(temperature=temperature))

    def greedy(self) -> tuple[str, str]:
        """Its log-probabilities are those at temperature 1. The samples of a prompt may part where
        two tokens are equally likely but for rounding."""
        done = self._sample(temperature=0.0)
        for other in done[1:SAMPLES]:
            both = list(zip(done[0].token_ids, other.token_ids, strict=False))
            parted = next((i for i, (ours, theirs) in enumerate(both) if ours != theirs), 0)
            gap = abs(float(done[0].logprobs[parted] - other.logprobs[parted]))
            told = f"two samples of a prompt part at no tie: they are {gap:.2g} nats apart there"
            _demand(gap <= TIE * self.bounds[0], told)
        return PASS, self._close(done)

    def differ(self) -> tuple[str, str]:
        kinds = len({tuple(c.token_ids) for c in self._sample()[:SAMPLES]})
        _demand(kinds > SAMPLES // 2, f"{SAMPLES} samples of a prompt are {kinds} texts")
        return PASS, f"{kinds} of {SAMPLES}"

    def repeats(self) -> tuple[str, str]:
        one, two, three = (
            [c.token_ids.tolist() for c in self._sample(seed=seed)] for seed in (1, 1, 2)
        )
        if one != two and not self.engine.capabilities.counter_draws:
            return NOT_OFFERED, "draws are the engine's own"
        _demand(one == two, "the same seed gives other tokens")
        _demand(one != three, "another seed gives the same tokens")
        return PASS, "the same tokens by the same seed, others by another"

    def end_ids(self) -> tuple[str, str]:
        """Some tokens of earlier responses are end ids now: a response ends with the first."""
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
        ends = tuple({int(t) for c in self._sample() for t in c.token_ids[:3]})
        how = {"stop_ids": ends, "min_tokens": 8}
        if (done := self._offered(**how)) is None:
            return NOT_OFFERED, "the engine refuses it"
        early = [c for c in done if len(c.token_ids) < 8 or set(c.token_ids[:7]) & set(ends)]
        _demand(not early, f"{len(early)} responses ended before 8 tokens")
        return PASS, f"none ended before; before the mask, {self._close(done)}"

    def top_p(self) -> tuple[str, str]:
        if (done := self._offered(top_p=0.5)) is None:
            return NOT_OFFERED, "the engine refuses it"
        return PASS, f"before the truncation, {self._close(done)}"

    def begun(self) -> tuple[str, str]:
        whole = max(self._sample()[:SAMPLES], key=lambda c: len(c.token_ids))
        names = ("token_ids", "logprobs", "versions", "sampled")
        half = {name: getattr(whole, name)[: len(whole.token_ids) // 2] for name in names}
        request = replace(self._request(self.prompts[0], SAMPLES), begun=replace(whole, **half))
        done, kept = self._finish([request]), len(half["token_ids"])
        for c in done:
            same = all(np.array_equal(getattr(c, name)[:kept], half[name]) for name in names)
            _demand(same and len(c.token_ids) > kept, "its beginning was not kept")
        return PASS, f"goes on from {kept} tokens; {self._close(done)}"

    def abort(self) -> tuple[str, str]:
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
        """The same prompts again: a cache of the old weights would be seen."""
        before = self.engine.probe()
        self._load(CHANGE)
        moved = float(np.abs(np.subtract(before, self.engine.probe())).max())
        gap = float(np.abs(np.subtract(self.oracle.probe(), self.engine.probe())).max())
        _demand(moved > 3 * gap, f"the probe moved by {moved:.2g}, with a gap of {gap:.2g}")
        done = self._sample()
        _demand(all(set(c.versions) == {self.version} for c in done), "tokens have other versions")
        return PASS, f"the probe moved by {moved:.2g}, gap {gap:.2g}; {self._close(done)}"

    def in_flight(self) -> tuple[str, str]:
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
        """A request that begins after an update never reads a cache of older weights, in any mode:
        neither of requests that are complete nor of one in flight, and even if it was submitted
        before the update. The prompts span several blocks and share their beginning."""
        span, fork = self._spanning()
        found = self._updated(part, span, fork)
        gaps = {
            kind: np.concatenate([self._gaps(c)[c.versions == self.version] for c in done])
            for kind, done in found.items()
        }
        mean, most = FEW * self.bounds[0], self.bounds[1]
        for kind, of in gaps.items():
            is_near = of.mean() <= mean and of.max() <= most
            _demand(is_near, f"{kind} read a cache of older weights: {_told(of)}")
        return PASS, f"prompts of {len(span)} tokens: {_told(np.concatenate([*gaps.values()]))}"

    def _updated(self, part: bool, span: IntArray, fork: IntArray) -> dict[str, list[Completion]]:
        """Completions that must be the new weights' alone, by the kind of their request."""

        def asked(prompt: IntArray, samples: int = SAMPLES) -> Request:
            request = self._request(prompt, samples, max_tokens=BRIEF)
            self.engine.submit(request)
            return request

        first = asked(span, 1)
        asked(fork, 1)
        (told,) = (c for c in self._drain() if c.request_id == first.request_id)
        flight = self._request(span, SAMPLES, max_tokens=min(LONG, self.context - len(span)))
        self.engine.submit(flight)
        done = [c for _ in range(EARLY) for c in self.engine.step()]
        waited = [asked(fork, 1) for _ in range(self.running)]
        self._turned = not self._turned
        self._load(CHANGE * self._turned, turned=self._turned, part=part)
        kinds = {
            "a request with the prompt of one in flight": [asked(span)],
            "a request that shares a prompt's beginning": [asked(fork)],
            "a request that goes on from an older response": [
                asked(np.concatenate([span, told.token_ids]))
            ],
            "a request that waited during the update": waited,
        }
        done += self._drain([request for of in kinds.values() for request in of])
        self.engine.abort(flight.request_id)
        done += self._drain()
        kinds["a request with a prompt of before"] = [asked(span)]
        done += self._drain()
        found = dict[str, list[Completion]]()
        for kind, requests in kinds.items():
            names = {request.request_id for request in requests}
            own = [c for c in done if c.request_id in names]
            found[kind] = [c for c in own if set(c.versions) == {self.version}]
            # A server samples on between two steps: some that waited had begun by then.
            is_new = len(found[kind]) == len(own) or requests is waited
            _demand(is_new, f"{kind} has tokens of other versions")
        if self.on_update != "keep":
            cut = [c for c in done if c.request_id == flight.request_id]
            found["a request in flight"] = [c for c in cut if self.version in c.versions]
        return {kind: of for kind, of in found.items() if of}

    def _spanning(self) -> tuple[IntArray, IntArray]:
        """Two prompts of several blocks that have two thirds in common, others for each version."""
        whole = (self.context // 2 - 5) // BLOCK * BLOCK
        tokens = np.roll(np.concatenate(self.prompts), self.version)
        span = np.resize(tokens, min(SPAN, max(whole, 0) + 5))
        shared = len(span) * 2 // 3
        return span, np.concatenate([span[:shared], span[::-1][: len(span) - shared]])

    def failed_load(self) -> tuple[str, str]:
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
        self._load(CHANGE, incarnation=2)
        try:
            self._load(CHANGE, incarnation=1)
        except EngineError:
            self.version -= 1
            return PASS, "refused"
        raise Broken("weights of incarnation 1 were loaded after incarnation 2")

    def still(self) -> tuple[str, str]:
        """A learning rate of 0: the same weights again and again leave the gap as it is."""
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
        name = f"check-{len(self._asked)}"
        self._asked[name] = prompt
        how = SamplingParams(**{"max_tokens": TOKENS} | params)
        return Request(name, prompt, samples, how, group=len(self._asked) * ("seed" not in params))

    def _sample(self, samples: int = SAMPLES, **params: Any) -> list[Completion]:
        """Completions of all prompts; those of the first come first."""
        return self._finish([self._request(prompt, samples, **params) for prompt in self.prompts])

    def _offered(self, **params: Any) -> list[Completion] | None:
        """As `_sample`; None if the engine refuses it."""
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
        """Completions until no sample is unfinished, or none of the ``awaited`` requests'."""
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
        scores = self.oracle.score(self._asked[c.request_id], c.token_ids, heat)
        found: FloatArray = np.abs(c.logprobs - scores)
        return found

    def _close(self, completions: list[Completion]) -> str:
        return self._near(np.concatenate([self._gaps(c) for c in completions]))

    def _near(self, gaps: FloatArray, *, demanded: bool = True) -> str:
        """The gaps in words; raises if they are too large."""
        found, (mean, most) = _told(gaps), self.bounds
        is_near = gaps.mean() <= mean and gaps.max() <= most
        _demand(is_near or not demanded, f"{found}, over {mean:g} or {most:g}")
        return found


def _told(gaps: FloatArray) -> str:
    return f"gap {gaps.mean():.2g} on average, {gaps.max():.2g} at most"


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Broken(otherwise)
