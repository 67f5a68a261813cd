"""The equalities on the default model, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import tiny
import torch

from burnish.cli.engine import Reference
from burnish.engine.conformance import PASS, Suite
from burnish.engine.native.engine import NativeEngine
from burnish.engine.protocol import Request
from burnish.engine.settings import EngineSettings
from burnish.errors import ModelError
from burnish.model import hub
from burnish.model.checkpoint import load_model
from burnish.model.tokenizer import Tokenizer
from burnish.types import SamplingParams

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return hub.resolve_model(hub.DEFAULT)
    except ModelError as error:
        pytest.skip(f"the default model is not at hand: {error}")


def test_decode_equals_the_learners_forward_and_greedy_equals_transformers(path: Path) -> None:
    tokenizer = Tokenizer.load(path)
    text = tokenizer.chat([{"role": "user", "content": "Name three colours of the rainbow."}])
    ids = tokenizer.encode(text, add_special=False)
    sampled = Request("sampled", ids, 3, SamplingParams(max_tokens=24), 1)
    greedy = Request("greedy", ids, 1, SamplingParams(max_tokens=24, temperature=0.0), 2)
    model = load_model(path)
    engine = NativeEngine(model, tokenizer, EngineSettings(kv_bytes=1 << 28))
    done = tiny.finish(engine, [sampled, greedy])
    for completion in done.values():
        oracle = tiny.learner_logprobs(model, ids, completion.token_ids, 1.0)
        np.testing.assert_allclose(completion.logprobs, oracle, atol=1e-4)
    from transformers import AutoModelForCausalLM

    peer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    theirs = peer.generate(torch.tensor(ids[None]).long(), do_sample=False, max_new_tokens=24)
    assert done["greedy", 0].token_ids.tolist() == theirs[0, len(ids) :].tolist()
    assert done["greedy", 0].text


def test_new_weights_of_a_deep_model_pass_the_check(path: Path) -> None:
    """A change compounds over thirty layers, and rounding with it: it must stay in the bounds."""
    tokenizer = Tokenizer.load(path)
    engine = NativeEngine(load_model(path), tokenizer, EngineSettings(kv_bytes=1 << 28))
    suite = Suite(engine, Reference(path, "fp32", "cpu"), [tokenizer.encode("1 2 3")], room=64)
    for name in ("new weights are in use", "weights in flight"):
        found = suite.run(name)
        assert found.status == PASS, found
