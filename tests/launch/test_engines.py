"""A run whose engine is in a process of its own, and the settings that name an engine."""

import os
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import burnish
from burnish.engine.remote import client, environment, server
from burnish.errors import ConfigError, EngineError
from burnish.launch import engines, memory, preflight
from burnish.launch.resolve import Resolved, resolve
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import make_plan
from burnish.recipe.runtime import FreeLoop

SIZE = {"layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 64}
SMALL = {
    "model": {"name": "scratch", "tokenizer": "bytes", **SIZE},
    "rollout": {"batch": 8, "group_size": 4, "max_tokens": 6},
    "train": {"steps": 3, "batch": 8, "learning_rate": 1e-3},
    "checkpoint": {"every": 1},
    "task": {"chat": False},
    "device": "cpu",
}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch, tmp_path):
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BURNISH_CORES", "1")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def vowels(text, row):
    return float(sum(letter in "aeiou" for letter in text))


@pytest.mark.slow
def test_a_run_whose_engine_dies_is_resumed_to_the_same_bits(tmp_path, monkeypatch):
    """The native engine in another process, killed after step 1, against one that lives here."""
    given = SMALL | {"reward": vowels, "show": False}
    here = burnish.train("keywords", prompts=["one", "two"], out=tmp_path / "here", **given)
    children = []

    class Known(client.EngineProcess):
        def __init__(self, *given):
            super().__init__(*given)
            children.append(self)

    def kill(progress):
        if progress.phase == "step" and progress.step == 1:
            os.kill(children[0].process.pid, signal.SIGKILL)

    monkeypatch.setattr(client, "EngineProcess", Known)
    apart = given | {"engine": {"python": sys.executable}}
    told = (
        r"(?s)engine native \(process \d+ of .*died at 'submit' \(it was killed by SIGKILL\); con"
    )
    with pytest.raises(EngineError, match=told):
        burnish.train(
            "keywords", prompts=["one", "two"], out=tmp_path / "apart", **apart | {"show": kill}
        )
    there = burnish.resume(tmp_path / "apart", reward=vowels, show=False)
    assert (there / "metrics.jsonl").read_text() == (here / "metrics.jsonl").read_text()
    assert len(children) == 2
    assert not any(child.process.is_running for child in children)


def test_an_engine_that_serves_another_model_is_refused(monkeypatch, tmp_path):
    closed, served_model = [], "0123"

    class Served:
        def __init__(self):
            self.facts = {"name": "native", "precision": "fp32", "on_update": "recompute"}
            self.facts["model"] = served_model

        def close(self):
            closed.append(1)

    monkeypatch.setenv(environment.TOKEN, "t")
    monkeypatch.setattr(client, "connect_engine", lambda url, token, deadline: Served())
    recipe = load_recipe(
        "keywords", [{"model": SMALL["model"]}, "engine.url=tcp://host:1", "engine.precision=fp32"]
    )
    with pytest.raises(EngineError, match=r"at tcp://host:1 has model = '0123', and this run"):
        engines.build_engine(resolve(recipe))
    assert closed
    served_model = server.fingerprint(engines.directory_of(resolve(recipe).source, "fp32"))
    assert engines.build_engine(resolve(recipe))
    other = recipe.model_copy(update={"loop": FreeLoop(on_update="keep")})
    with pytest.raises(EngineError, match="has on_update = 'recompute', and this run needs 'keep'"):
        engines.build_engine(resolve(other))


def plan_of(recipe):
    """The lines about the engine."""
    return dict(make_plan(recipe, Path("out")))["engine"]


def test_settings_of_an_engine(monkeypatch):
    monkeypatch.delenv(environment.TOKEN, raising=False)
    served = load_recipe("keywords", "engine.url=tcp://host:8422")
    with pytest.raises(EngineError, match="needs a token: set BURNISH_ENGINE_TOKEN"):
        preflight.check_engine(served.engine)
    wrong = {
        "engine.deadline has no effect with engine.name": ["engine.deadline=5"],
        "engine.kv_mb has no effect with engine.url": ["engine.url=tcp://a:1", "engine.kv_mb=9"],
        "engine.url must match pattern": ["engine.url=host:1"],
        "rollout.min_tokens needs the native engine": ["engine.name=vllm", "rollout.min_tokens=2"],
        "rollout.top_k needs the native engine": [
            *("engine.name=vllm", "rollout.top_k=9", "rollout.truncated=true")
        ],
        "rollout.min_p needs the native engine": [
            *("engine.name=vllm", "rollout.min_p=0.1", "rollout.truncated=true")
        ],
        "before rollout.repetition_penalty": [
            *("engine.name=sglang", "engine.url=http://a:1", "rollout.truncated=true"),
            "rollout.repetition_penalty=1.1",
        ],
        "model.fp32_head needs the native engine": ["engine.name=vllm", "model.fp32_head=true"],
        "can't reproduce a lost rollout": ["engine.name=vllm", "runtime.name=ray"],
        "no effect with engine = 'native'; remove it, or use engine.name = 'vllm'": [
            "engine.sleep=true"
        ],
        "engine.sleep has no effect with engine.url": [
            *("engine.name=vllm", "engine.url=tcp://a:1", "engine.sleep=true")
        ],
        "engine.sleep = true needs a loop that samples and learns in turns": [
            *("engine.name=vllm", "engine.sleep=true", "loop.lag=1")
        ],
        "names one that runs; remove one": ["engine.url=tcp://a:1", "engine.python=p"],
    }
    for message, settings in wrong.items():
        with pytest.raises(ConfigError, match=message):
            load_recipe("keywords", settings)
    sections = dict(make_plan(served, Path("out")))
    assert sections["engine"] == [("engine", "native, served at tcp://host:8422")]
    other = plan_of(load_recipe("keywords", "engine.name=vllm"))
    assert other[0] == ("engine", "vllm, a separate process of this Python")
    assert other[1][0] == "draws"
    assert "engine" not in dict(make_plan(load_recipe("keywords"), Path("out")))


def test_an_engine_sleeps_on_a_gpu_alone():
    recipe = load_recipe("keywords", ["engine.name=vllm", "engine.sleep=true"])
    told = ("sleep", "caches, and weights with a copy in main memory, leave the GPU")
    assert told in plan_of(recipe)
    assert engines.settings_of(Resolved(recipe, "cuda"), Path("model")).sleep
    with pytest.raises(ConfigError, match=r"engine\.sleep = true frees memory of a GPU"):
        memory.check_device("cpu", sleep=recipe.engine.sleep)


def test_an_environment_without_the_engine_is_named():
    recipe = load_recipe("keywords", "engine.name=vllm")
    if find_spec("vllm") is None:
        with pytest.raises(EngineError, match=r"needs vllm 0\.24 to 0\.32, and has none; install"):
            preflight.check_engine(recipe.engine)
    else:
        preflight.check_engine(recipe.engine)
