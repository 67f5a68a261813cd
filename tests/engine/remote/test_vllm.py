"""vLLM in an environment of its own. BURNISH_TEST_VLLM names its Python, ENV/bin/python."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

from burnish.cli.engine import Reference
from burnish.engine.conformance import FAIL, NOT_OFFERED, PASS, UPDATES, Result, Suite
from burnish.engine.remote import client
from burnish.engine.remote.client import RemoteEngine
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.model import checkpoint

PYTHON = os.environ.get("BURNISH_TEST_VLLM")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PYTHON is None, reason="BURNISH_TEST_VLLM names no environment with vLLM"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's kernels for a CPU read heads of 32 numbers and more."""
    path = tmp_path_factory.mktemp("model")
    checkpoint.save_model(tiny.model(d_model=128, context=1024), path)
    tiny.tokenizer().save(path)
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[RemoteEngine]:
    settings = EngineSettings(
        "vllm", str(model), device=tiny.DEVICE, kv_bytes=64 << 20, max_running=9000
    )
    assert PYTHON is not None
    with closing(client.start_engine(settings, python=PYTHON, deadline=300)) as started:
        yield started


def examined(engine: RemoteEngine, model: Path, mode: str, names: Any = None) -> dict[str, Result]:
    prompts = [tiny.prompt(60), tiny.prompt(3)]
    how = {"room": 1024 - 61, "on_update": mode}
    suite = Suite(engine, Reference(model, "fp32", "cpu"), prompts, **how)
    return {name: suite.run(name) for name in names or suite.checks}


def test_it_does_what_an_engine_does(engine: RemoteEngine, model: Path) -> None:
    found = examined(engine, model, "recompute")
    refused = {name for name, result in found.items() if result.status == NOT_OFFERED}
    assert refused == {"min_tokens", "top_p", "min_p", "repetition_penalty"}
    assert {r.status for name, r in found.items() if name not in refused} == {PASS}, found


@pytest.mark.parametrize("has_salt", [True, False])
def test_new_requests_never_read_a_cache_that_is_kept(
    has_salt: bool, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the salt of the prefix cache, they do, and the check sees it."""
    copy = shutil.copytree(Path(client.__file__).parents[2], tmp_path / "burnish")
    file, salt = copy / "engine" / "remote" / "vllm.py", '"cache_salt": str(self._loads)'
    text = file.read_text()
    assert text.count(salt) == 1
    file.write_text(text if has_salt else text.replace(salt, '"cache_salt": "0"'))
    monkeypatch.setattr(client, "__file__", str(copy / "engine" / "remote" / "client.py"))
    settings = EngineSettings(
        "vllm", str(model), kv_bytes=64 << 20, max_running=8, on_update="keep"
    )
    assert PYTHON is not None
    with closing(client.start_engine(settings, python=PYTHON, deadline=300)) as engine:
        found = examined(engine, model, "keep", UPDATES)
    wanted = PASS if has_salt else FAIL
    assert [result.status for result in found.values()] == [wanted, wanted, PASS], found


def test_more_prompts_may_come_than_a_step_computes(engine: RemoteEngine) -> None:
    """vLLM would cut a prompt that crosses the bound, and fail at its seed on a CPU."""
    asked = [tiny.request(f"r{number}", 99, n=8, group=number) for number in range(12)]
    assert len(tiny.finish(engine, asked)) == 96


def test_a_part_of_the_weights_is_loaded_over_the_first_ones(
    engine: RemoteEngine, model: Path
) -> None:
    """The incarnation follows those of the suite, and so do the tensors that must be named."""
    own = tiny.model(d_model=128, context=1024)
    whole = {name: tensor.clone() for name, tensor in own.exchange().items()}
    weights = tiny.weights(own, 90)._replace(incarnation=5)
    engine.load(weights._replace(is_partial=True))
    part = {name: whole[name] for name in list(whole)[:3]}
    with pytest.raises(EngineError, match="do not fit"):
        engine.load(weights._replace(version=91, tensors=part, is_partial=True))
    assert engine.version == 90
    assert np.allclose(engine.probe(), own.probe(), atol=1e-4)


@pytest.mark.skipif(tiny.DEVICE == "cpu", reason="only on a GPU vLLM gives its memory away")
def test_it_gives_its_memory_away_while_it_sleeps(model: Path) -> None:
    """Weights and caches leave the GPU; afterwards the same seed draws the same tokens."""
    settings = EngineSettings(
        "vllm", str(model), device=tiny.DEVICE, kv_bytes=2048 << 20, sleep=True
    )
    assert PYTHON is not None
    with closing(client.start_engine(settings, python=PYTHON, deadline=300)) as engine:
        asked = [tiny.request("a", 9, n=4)]
        first, probe = tiny.finish(engine, asked), engine.probe()
        engine.submit(asked[0])
        with pytest.raises(EngineError, match="4 samples are not delivered"):
            engine.sleep()
        while engine.unfinished:
            engine.step()
        awake = torch.cuda.mem_get_info()[0]
        engine.sleep()
        assert torch.cuda.mem_get_info()[0] - awake > 1900 << 20
        assert np.allclose(engine.probe(), probe, atol=1e-4)
        assert awake > torch.cuda.mem_get_info()[0] - (100 << 20)
        for key, completion in tiny.finish(engine, asked).items():
            assert np.array_equal(completion.token_ids, first[key].token_ids)
        engine.sleep()
        engine.load(tiny.weights(tiny.model(3, d_model=128, context=1024), 1))
        assert not np.allclose(engine.probe(), probe, atol=1e-2)
