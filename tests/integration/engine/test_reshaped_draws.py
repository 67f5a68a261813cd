"""min_p and the repetition penalty: each token is the one that the definition selects, in any batch
and after any interruption, and its log-probability is the model's."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from burnish.engine.native.engine import NativeEngine
from burnish.engine.protocol import Request
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.model.attention import causal
from burnish.model.transformer import Transformer
from burnish.randomness import Stream, uniforms
from burnish.rollout.step_values import Branching
from burnish.types import Completion

PHRASE = "</t> A:"
THINK = {"think_tokens": 6, "think_end": "</t>", "think_phrase": PHRASE, "max_tokens": 24}
MIX = [
    tiny.request("both", 9, n=3, group=1, repetition_penalty=1.8, min_p=0.1, temperature=0.9),
    tiny.request("shared", 17, n=4, group=2, repetition_penalty=0.6, max_tokens=20),
    tiny.request("greedy", 5, n=2, group=3, repetition_penalty=3.0, temperature=0.0),
    tiny.request(
        "held", 8, n=3, group=4, repetition_penalty=1.5, min_tokens=8, stop_ids=tuple(range(90))
    ),
    tiny.request("thinks", 11, n=2, group=5, repetition_penalty=2.0, min_p=0.05, **THINK),
    tiny.request("all", 6, n=2, group=6, repetition_penalty=1.3, min_p=0.02, top_k=40, top_p=0.9),
    tiny.request("free", 7, n=2, group=7, max_tokens=24),
]


@torch.no_grad()
def raw_logits(model: Transformer, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    """Of the learner's forward pass, before each token of the response [C, V]."""
    ids = torch.from_numpy(np.concatenate([prompt, response])).long()
    ids = ids.to(model.embed.weight.device)
    positions = torch.arange(len(ids), device=ids.device)
    hidden = model(ids, positions, causal([len(ids)], ids.device))
    return model.logits(hidden[len(prompt) - 1 : -1]).double().cpu().numpy()


def allowed(logits: np.ndarray, seen: set[int], ends: set[int], params: Any) -> np.ndarray:
    """The probabilities with which a token is drawn, by the definition in float64."""
    scores = logits.copy()
    for token in seen:
        score, penalty = scores[token], params.repetition_penalty
        scores[token] = score / penalty if score > 0 else score * penalty
    scores[list(ends)] = -np.inf
    if params.temperature == 0:
        return np.eye(len(scores))[scores.argmax()]
    p = np.exp((scores - scores.max()) / params.temperature)
    p /= p.sum()
    order = np.argsort(-p)[: params.top_k]
    before = np.cumsum(p[order]) - p[order]
    out = np.zeros_like(p)
    kept = order[before < params.top_p * p[order].sum()]
    out[kept] = np.where(p[kept] >= params.min_p * p.max(), p[kept], 0)
    return out / out.sum()


def check(
    request: Request, done: Completion, model: Transformer, close: float = tiny.CLOSE
) -> None:
    params, prompt, ids = request.params, request.prompt, done.token_ids
    logits, near = raw_logits(model, prompt, ids), 1e-4
    given = 0 if request.begun is None else len(request.begun.token_ids)
    place = params.seed, request.stream, request.group, request.first + done.sample_index
    points = uniforms(*place, np.arange(len(ids)))
    for t, (token, point) in enumerate(zip(ids.tolist(), points, strict=True)):
        if t < given or not done.sampled[t]:
            continue
        ends = {*params.stop_ids, tiny.END} if t < params.min_tokens else set()
        p = allowed(logits[t], {*prompt.tolist(), *ids[:t].tolist()}, ends, params)
        end = p.cumsum()[token]
        assert p[token] > 0, (request.request_id, t)
        if params.temperature:
            assert end - p[token] - near <= point < end + near, (request.request_id, t)
        scaled = logits[t] / (params.temperature or 1.0)
        wanted = scaled[token] - scaled.max() - np.log(np.exp(scaled - scaled.max()).sum())
        assert done.logprobs[t] == pytest.approx(wanted, abs=close)


@cache
def together() -> dict[tuple[str, int], Completion]:
    return tiny.finish(tiny.engine(text=True), MIX)


@pytest.mark.parametrize("one", MIX, ids=lambda request: request.request_id)
def test_each_token_is_the_one_of_the_definition(one: Request) -> None:
    for sample in range(one.n):
        done = together()[one.request_id, sample]
        check(one, done, tiny.model())
        assert one.request_id != "held" or len(done.token_ids) >= 8
        assert one.request_id != "thinks" or len(done.token_ids) - done.sampled.sum() == 7


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_each_token_is_the_one_of_the_definition_on_a_gpu() -> None:
    own = tiny.model(d_model=64).cuda()  # heads that the kernels can read
    engine = NativeEngine(own, tiny.tokenizer(), EngineSettings(kv_bytes=1 << 22, page_size=4))
    for (name, _), done in tiny.finish(engine, MIX).items():
        check(next(one for one in MIX if one.request_id == name), done, own, 1e-4)


def test_the_settings_change_the_draws() -> None:
    """Otherwise the other tests would compare nothing."""
    off = {"repetition_penalty": 1.0, "min_p": 0.0}
    plain = [replace(one, params=replace(one.params, **off)) for one in MIX]
    done = tiny.finish(tiny.engine(text=True), plain)
    for one in MIX[:-1]:
        pairs = [(together()[one.request_id, i], done[one.request_id, i]) for i in range(one.n)]
        assert any(a.token_ids.tolist() != b.token_ids.tolist() for a, b in pairs), one.request_id


@pytest.mark.parametrize(
    "settings", [{"max_running": 3}, {"tokens": 128}, {"step_tokens": 5}], ids=str
)
def test_draws_do_not_depend_on_the_batch(settings: dict[str, int]) -> None:
    """Few at a time, preempted for lack of pages, or in chunks; and one request after another."""
    tiny.assert_same(together(), tiny.finish(tiny.engine(text=True, **settings), MIX[::-1]))
    for one in MIX:
        found = tiny.finish(tiny.engine(text=True), [one])
        tiny.assert_same({key: together()[key] for key in found}, found)


@pytest.mark.parametrize("mode", ["recompute", "keep"])
def test_an_update_of_the_weights_does_not_change_what_was_seen(mode: str) -> None:
    """The same weights are loaded again and again under new versions."""
    engine = tiny.engine(text=True, on_update=mode)

    def between(step: int) -> None:
        engine.load(tiny.weights(tiny.model(), step + 1))

    tiny.assert_same(together(), tiny.finish(engine, MIX, between))


@pytest.mark.parametrize("tokens", [1, 5, 9])
def test_a_response_that_has_begun_goes_on_as_it_would_have(tokens: int) -> None:
    for one in MIX:
        for sample in range(one.n):
            whole = together()[one.request_id, sample]
            if one.request_id != "thinks" and tokens < len(whole.token_ids):
                names = ("token_ids", "logprobs", "versions", "sampled")
                part = {name: getattr(whole, name)[:tokens] for name in names}
                rest = replace(one, n=1, first=sample, begun=replace(whole, **part))
                (found,) = tiny.finish(tiny.engine(text=True), [rest]).values()
                assert found.token_ids.tolist() == whole.token_ids.tolist()
                np.testing.assert_allclose(found.logprobs, whole.logprobs, atol=tiny.CLOSE)


def test_continuations_of_steps_see_prompt_and_response() -> None:
    """VinePPO's, with draws of their own."""
    one, whole = MIX[0], together()["both", 2]
    branching = Branching(
        steps=4, continuations=3, group_size=one.n, decode=lambda ids: [""] * len(ids)
    )
    further = branching._request(one, whole, 4)
    assert further.stream is Stream.CONTINUATION
    for done in tiny.finish(tiny.engine(text=True), [further]).values():
        assert done.token_ids[:4].tolist() == whole.token_ids[:4].tolist()
        check(further, done, tiny.model())


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"min_p": -0.1}, r"min_p must lie in \[0, 1\], got -0.1; 0 turns it off"),
        ({"min_p": 1.1}, "min_p must lie in"),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be at least 0.01, got 0.0"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty must be"),
    ],
)
def test_what_has_no_meaning_is_refused(wrong: dict[str, float], rule: str) -> None:
    with pytest.raises(EngineError, match=rule):
        tiny.engine().submit(tiny.request("a", **wrong))
