"""The two engines behind one protocol agree where both are exact: greedy, and log-probabilities."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

from burnish.engine.engine import EngineSettings, NativeEngine
from burnish.engine.hf import HFEngine
from burnish.engine.protocol import Engine, Request, require
from burnish.errors import EngineError
from burnish.model.checkpoint import load, save
from burnish.types import Completion, Finish, SamplingParams


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save(tiny.model(), path)
    tiny.tokenizer().save(path)
    return path


@pytest.fixture
def engines(directory: Path) -> tuple[Engine, Engine]:
    config = EngineSettings(kv_bytes=1 << 20, page_size=4)
    own: Engine = NativeEngine(load(directory), tiny.tokenizer(), config)
    peer: Engine = HFEngine.open(directory)
    return own, peer


def test_greedy_is_the_same(engines: tuple[Engine, Engine]) -> None:
    requests = [
        tiny.request("a", 5, n=2, temperature=0.0),
        tiny.request("b", 17, temperature=0.0),
        tiny.request("c", 11, temperature=0.0, min_tokens=6),
        tiny.request("d", 11, temperature=0.0, max_tokens=1),
    ]
    own, peer = (tiny.finish(engine, requests) for engine in engines)
    tiny.assert_same(own, peer)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_logprobs_are_the_learners(
    engines: tuple[Engine, Engine], temperature: float
) -> None:
    one = tiny.request("a", 13, n=3, temperature=temperature, top_k=20, top_p=0.9)
    for engine in engines:
        for done in tiny.finish(engine, [one]).values():
            oracle = tiny.learner_logprobs(tiny.model(), one.prompt, done.token_ids, temperature)
            np.testing.assert_allclose(done.logprobs, oracle, atol=1e-5)


def test_stops_are_cut_alike(engines: tuple[Engine, Engine]) -> None:
    probe = tiny.finish(engines[0], [tiny.request("p", temperature=0.0)])["p", 0]
    stop_id = int(probe.token_ids[5])
    text = probe.text[2:4]
    for params in ({"stop_ids": (stop_id,)}, {"stop": (text,), "include_stop": False}):
        one = tiny.request("a", temperature=0.0, **params)
        own, peer = (tiny.finish(engine, [one]) for engine in engines)
        tiny.assert_same(own, peer)
        assert own["a", 0].finish is Finish.STOP


def test_what_it_can_not_do_is_refused(engines: tuple[Engine, Engine]) -> None:
    peer = engines[1]
    peer.submit(tiny.request("a", n=2))
    peer.abort("a")
    assert peer.unfinished == 2
    gone = peer.step()
    assert [(e.finish, len(e.token_ids)) for e in gone if isinstance(e, Completion)] == [
        (Finish.ABORT, 0)
    ] * 2
    with pytest.raises(EngineError, match="takes no weights"):
        peer.load(tiny.weights(tiny.model(1), 3))
    with pytest.raises(EngineError, match="at least one token"):
        peer.submit(Request("b", np.array([], np.int32), 1, SamplingParams()))
    with pytest.raises(EngineError, match="not in flight"):
        peer.abort("b")


def test_an_engine_is_refused_for_what_it_does_not_give(engines: tuple[Engine, Engine]) -> None:
    own, peer = (engine.capabilities for engine in engines)
    require(own, repeats=True)
    require(peer, repeats=False)
    with pytest.raises(EngineError, match="must give draws that repeat"):
        require(peer, repeats=True)
    lacking = replace(own, model_logprobs=False, token_versions=False)
    with pytest.raises(EngineError, match=r"log-probabilities .* and the version of every token"):
        require(lacking, repeats=False)
