"""transformers as an engine draws the native engine's tokens, and takes its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny

from burnish.cli.engine import Reference
from burnish.engine.conformance import PASS, UPDATES, Suite
from burnish.engine.remote.hf import HfEngine
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.machine import hardware
from burnish.model import checkpoint

pytestmark = pytest.mark.skipif(tiny.DEVICE != "cpu", reason="the tiny model is on the CPU")


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HfEngine:
    monkeypatch.setattr(hardware, "set_up_torch", lambda threads: None)
    checkpoint.save_model(tiny.model(), tmp_path)
    tiny.tokenizer().save(tmp_path)
    return HfEngine(EngineSettings("hf", str(tmp_path), max_running=4))


def test_it_draws_the_same_tokens(engine: HfEngine) -> None:
    """In batches of four, which the native engine does not have."""
    asked = [
        tiny.request("a", 9, n=3, group=4, min_tokens=6, stop=("e", "xy")),
        tiny.request("b", 12, n=2, temperature=0.7, stop_ids=(7, 9), group=1),
        tiny.request("c", 3, temperature=0.0),
        tiny.request("d", 5, top_p=0.8, top_k=9),
        tiny.request("e", 7, n=2, min_p=0.05, repetition_penalty=1.4, group=2),
        tiny.request("f", 4, temperature=0.0, repetition_penalty=2.0),
    ]
    ours = tiny.engine(text=True)
    for version, model in enumerate([tiny.model(), tiny.model(5)]):
        for one in (engine, ours):
            one.load(tiny.weights(model, version))
        np.testing.assert_allclose(engine.probe(), model.probe(), atol=tiny.CLOSE)
        found = tiny.finish(engine, asked)
        tiny.assert_same(found, tiny.finish(ours, asked))
        assert engine.sampled == ours.sampled
        assert {int(v) for c in found.values() for v in c.versions} == {version}


def test_weights_that_would_mix_are_refused(engine: HfEngine) -> None:
    one, two = tiny.weights(tiny.model(1), 1), tiny.weights(tiny.model(2), 2)
    names = list(one.tensors)
    engine.load(one._replace(tensors={n: one.tensors[n] for n in names[:2]}, is_partial=True))
    before = engine.probe()
    with pytest.raises(EngineError, match=r"do not fit.*version 1 stays loaded"):
        engine.load(two._replace(tensors={names[0]: two.tensors[names[0]]}, is_partial=True))
    assert engine.probe() == before
    engine.load(two)
    np.testing.assert_allclose(engine.probe(), tiny.model(2).probe(), atol=tiny.CLOSE)


def test_new_requests_have_the_new_weights(engine: HfEngine, tmp_path: Path) -> None:
    suite = Suite(engine, Reference(tmp_path, "fp32", "cpu"), [tiny.prompt(20)], room=75)
    for name in UPDATES[:2]:
        found = suite.run(name)
        assert found.status == PASS, found


def test_abort_gives_back_what_waits(engine: HfEngine) -> None:
    for name in ("a", "b"):
        engine.submit(replace(tiny.request(name), n=2))
    engine.abort("a")
    done = tiny.finish(engine, [])
    assert {(c.request_id, str(c.finish), len(c.token_ids) > 0) for c in done.values()} >= {
        ("a", "abort", False)
    }
    assert len(done) == 4
