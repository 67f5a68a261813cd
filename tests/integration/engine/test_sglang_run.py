"""A recipe whose engine is an SGLang server: settings that are refused, and a run."""

import json
from contextlib import closing
from pathlib import Path

import pytest
import tiny
import torch
from sglang_server import TestServer

import burnish
from burnish.engine.native.engine import NativeEngine
from burnish.engine.remote import environment
from burnish.engine.settings import EngineSettings
from burnish.errors import ConfigError, EngineError
from burnish.launch import engines, preflight
from burnish.launch.resolve import resolve
from burnish.model import checkpoint
from burnish.model.tokenizer import Tokenizer
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import make_plan

pytestmark = pytest.mark.skipif(tiny.DEVICE != "cpu", reason="the server computes on the CPU")
URL = "engine.url=http://127.0.0.1:30000"
SIZE = {"layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 64}
SMALL = {
    "model": {"name": "scratch", "tokenizer": "bytes", **SIZE},
    "rollout": {"batch": 8, "group_size": 4, "max_tokens": 6},
    "train": {"steps": 2, "batch": 8, "learning_rate": 1e-2, "precision": "fp32"},
    "task": {"chat": False},
    "device": "cpu",
}


@pytest.fixture
def server(monkeypatch, tmp_path):
    """Has the shape of the recipe's model, and other weights."""
    monkeypatch.setenv("BURNISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("BURNISH_CORES", "1")
    threads = torch.get_num_threads()
    recipe = load_recipe("keywords", [SMALL, "engine.precision=fp32"])
    folder = engines.directory_of(resolve(recipe).source, "fp32")
    model, settings = checkpoint.load_model(folder), EngineSettings(kv_bytes=2**20)
    with torch.no_grad():
        model.embed.weight.mul_(2)
    with closing(TestServer(NativeEngine(model, Tokenizer.load(folder), settings))) as server:
        yield server
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("way", "path"),
    [("disk", "/update_weights_from_disk"), ("distributed", "/update_weights_from_distributed")],
)
def test_a_run_samples_by_sglang_and_learns_from_its_logprobs(
    server, tmp_path, way, path, monkeypatch, capfd
):
    """The server has an API key, which the run neither writes down nor prints."""
    server.key = "sk-not-to-be-seen"
    monkeypatch.setenv("SGLANG_KEY", server.key)
    engine = {"name": "sglang", "url": server.url, "precision": "fp32", "weights": way}
    engine["key"] = "SGLANG_KEY"
    run = burnish.train(
        "keywords",
        prompts=["one", "two"],
        reward=lambda text, row: float(sum(letter in "aeiou" for letter in text)),
        out=tmp_path / "run",
        show=False,
        **SMALL,
        engine=engine,
    )
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["mismatch/logprob_max"] for row in rows if "mismatch/logprob_max" in row]
    assert len(gaps) == 2
    assert max(gaps) < 1e-4
    loads = [body["weight_version"] for asked, body in server.seen if asked == path]
    assert loads[-3:] == ["0", "1", "2"]
    assert not server.groups
    files = [file for file in (tmp_path / "run").rglob("*") if file.is_file()]
    assert "SGLANG_KEY" in (run / "recipe.toml").read_text()
    assert not [file for file in files if server.key.encode() in file.read_bytes()]
    assert server.key not in "".join(capfd.readouterr())


GAME = """
class Game:
    deterministic = True

    def reset(self, row, seed):
        self.turns = 0
        return "go"

    def step(self, message):
        self.turns += 1
        done, text = self.turns == 3, message["content"]
        return {"messages": "ok", "reward": float("e" in text), "done": done}
"""


@pytest.mark.parametrize("pace", ["lockstep", "free"])
def test_episodes_on_an_sglang_server(server, tmp_path, pace):
    """The server receives token ids, whose log-probabilities are the learner's; weights are
    compared after each load, as without episodes."""
    (tmp_path / "game.py").write_text(GAME)
    run = burnish.train(
        "keywords",
        prompts=[{"n": n} for n in range(8)],
        environment=f"{tmp_path / 'game.py'}:Game",
        out=tmp_path / "run",
        show=False,
        **SMALL
        | {"rollout": {"batch": 8, "group_size": 4, "max_tokens": 40}}
        | {"task": {"turn_tokens": 4, "live": 6, "pace": pace, "validation_rows": 2}},
        engine={"name": "sglang", "url": server.url, "precision": "fp32"},
        overrides=["log.rollouts=8"],
    )
    gaps = [step["mismatch/logprob_mean"] for step in run.metrics[1:]]
    assert len(gaps) == 2
    assert max(gaps) < 1e-5
    rows = [json.loads(line) for line in (run / "rollouts.jsonl").read_text().splitlines()]
    assert {len(row["turns"]) for row in rows} == {3}
    assert all(row["forced"] for row in rows)


def test_settings_of_sglang():
    recipe = load_recipe("keywords", ["engine.name=sglang", URL])
    assert dict(make_plan(recipe, Path("out")))["engine"] == [
        ("engine", "sglang, served at http://127.0.0.1:30000"),
        ("weights", "through files in /dev/shm, on the machine of the run"),
    ]
    settings = [URL, "engine.weights=distributed", "engine.sleep=true"]
    recipe = load_recipe("keywords", ["engine.name=sglang", *settings])
    assert dict(make_plan(recipe, Path("out")))["engine"][1:] == [
        ("weights", "broadcast by a process group, to any machine"),
        ("sleep", "caches, and weights with a copy in main memory, leave the GPU"),
    ]
    wrong = {
        "engine.kv_mb has no effect": [URL, "engine.kv_mb=9"],
        "engine.url is missing: 'sglang' needs it": [],
        "url of an SGLang server.*got 'tcp://host:1'": ["engine.url=tcp://host:1"],
        "mask of rollout.min_tokens": [URL, "rollout.min_tokens=3"],
        "phrase of rollout.think": [URL, "rollout.think.tokens=3"],
        "engine.python has no effect": [URL, "engine.python=p"],
        "sglang' serves one sampler": [URL, "runtime.name=ray"],
        "engine.weights": [URL, "engine.weights=carrier-pigeon"],
        "engine.key must match": [URL, "engine.key=sk-123"],
        "engine.url must match": ["engine.url=https://user:word@host"],
        "engine.sleep = true needs a loop": [URL, "engine.sleep=true", "loop.lag=1"],
    }
    for message, settings in wrong.items():
        with pytest.raises(ConfigError, match=message):
            load_recipe("keywords", ["engine.name=sglang", *settings])
    with pytest.raises(ConfigError, match=r"engine\.weights has no effect"):
        load_recipe("keywords", ["engine.name=vllm", "engine.weights=tensor"])
    with pytest.raises(ConfigError, match=r"engine\.key has no effect"):
        load_recipe("keywords", ["engine.url=tcp://host:1", "engine.key=KEY"])
    for url in (URL, "engine.url=https://host:8422"):
        with pytest.raises(ConfigError, match=r"no other engine.*through an SSH tunnel"):
            load_recipe("keywords", [url])


@pytest.mark.parametrize("url", ["https://host", "https://host:1/sglang", "http://host:1/sglang"])
def test_a_key_comes_from_the_environment(monkeypatch, url):
    given = ["engine.name=sglang", f"engine.url={url}", "engine.key=SGLANG_KEY"]
    recipe = load_recipe("keywords", given)
    for wrong in (None, "", "two words", "sk-12\n3"):
        monkeypatch.delenv("SGLANG_KEY", raising=False)
        if wrong is not None:
            monkeypatch.setenv("SGLANG_KEY", wrong)
        with pytest.raises(EngineError, match=r"engine\.key = 'SGLANG_KEY' .*export it") as error:
            preflight.check_engine(recipe.engine)
        assert not wrong or wrong not in str(error.value)
    monkeypatch.setenv("SGLANG_KEY", "sk-123\n")
    preflight.check_engine(recipe.engine)
    assert environment.read_key(recipe.engine.key, url) == "sk-123"


def test_a_server_of_another_precision_is_refused(server):
    given = [SMALL, "engine.name=sglang", f"engine.url={server.url}", "engine.precision=bf16"]
    with pytest.raises(EngineError, match="has precision = 'fp32', and this run needs 'bf16'"):
        engines.build_engine(resolve(load_recipe("keywords", given)))
