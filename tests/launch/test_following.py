"""A server follows a run: which checkpoints it loads, and what a damaged one does."""

import json
import os
import subprocess
import sys
import time
from concurrent.futures import Future
from http.client import HTTPConnection

import pytest

from burnish import api
from burnish.errors import ConfigError, EngineError, RunError
from burnish.launch import following
from burnish.launch.following import RunFollower
from burnish.model.transformer import ModelConfig, Transformer

SHAPE = {"vocab_size": 32, "n_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 8, "context": 16}


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run, whose checkpoint holds the number of its weights, or is damaged."""

    def opened(source, path):
        text = path.read_text()
        if not text.isdigit():
            raise RunError(f"{path.name} is damaged")
        model = Transformer(ModelConfig(**SHAPE)).init_weights(int(text))
        return model, model

    monkeypatch.setattr(following, "open_run", opened)
    monkeypatch.setattr(following, "_find_source", lambda run: None)
    monkeypatch.setattr(following, "INTERVAL", 0.01)
    (tmp_path / "checkpoints").mkdir()
    return tmp_path


class Loads:
    """Loads weights at once, or refuses their version."""

    def __init__(self):
        self.loaded, self.refused, self.told = [], set(), []

    def __call__(self, weights):
        done = Future()
        if weights.version in self.refused:
            done.set_exception(EngineError("they do not fit"))
        else:
            self.loaded.append(weights)
            done.set_result(None)
        return done


def save(run, step, content):
    new = run / "checkpoints" / ".new"
    new.write_text(str(content))
    os.replace(new, run / "checkpoints" / f"step-{step}")


def test_the_newest_checkpoint_is_loaded_once(run):
    loads = Loads()
    with RunFollower(run, "bf16", loads, loads.told.append):
        assert not loads.loaded
        save(run, 2, 5)
        until(lambda: loads.told)
        save(run, 10, 6)
        until(lambda: len(loads.told) == 2)
        assert [weights.version for weights in loads.loaded] == [2, 10]
        expected = Transformer(ModelConfig(**SHAPE)).init_weights(6)
        for name, tensor in loads.loaded[-1].tensors.items():
            assert str(tensor.dtype) == "torch.bfloat16"
            assert (tensor == expected.exchange()[name].bfloat16()).all()
        (run / "checkpoints" / "step-10").unlink()  # the run returns to step 2
        until(lambda: len(loads.told) == 3)
    assert [weights.version for weights in loads.loaded] == [2, 10, 2]
    assert loads.told[0] == f"loaded step 2 of {run}"


def test_a_checkpoint_that_fails_is_told_once_and_the_next_one_is_loaded(run):
    loads = Loads()
    save(run, 1, "x")
    with pytest.raises(RunError, match="step-1 is damaged"):
        RunFollower(run, "fp32", loads, loads.told.append).__enter__()
    save(run, 1, 0)
    loads.refused = {3}
    with RunFollower(run, "fp32", loads, loads.told.append):
        save(run, 2, "x")
        until(lambda: len(loads.told) == 2)
        save(run, 3, 0)
        until(lambda: len(loads.told) == 3)
        save(run, 4, 0)
        until(lambda: len(loads.told) == 4)
    assert loads.told[1:3] == [
        "the old weights stay loaded: step-2 is damaged",
        "the old weights stay loaded: they do not fit",
    ]
    assert [weights.version for weights in loads.loaded] == [1, 4]


@pytest.mark.slow
def test_a_server_follows_a_run_that_goes_on(tmp_path):
    """`burnish serve --follow` loads the weights of the run's second part, and then answers as
    `burnish generate` with them."""
    changes = [
        *("model=scratch", "model.tokenizer=bytes", "model.layers=1", "model.width=32"),
        *("model.heads=4", "model.d_ff=48", "model.context=256", "rollout.batch=4"),
        *("rollout.group_size=4", "rollout.max_tokens=6", "train.batch=4", "train.steps=2"),
        *("task.chat=false", "task.must_end=false", "task.validation_rows=2"),
        *("checkpoint.every=1", "device=cpu", "train.learning_rate=0.1"),
    ]
    (tmp_path / "reward.py").write_text("def score(response, row): return len(response) % 2")
    run = api.train(
        "demo-small",
        prompts=[{"prompt": str(i)} for i in range(8)],
        reward=f"{tmp_path}/reward.py:score",
        overrides=changes,
        out=tmp_path / "run",
        show=False,
    )
    command = [sys.executable, "-m", "burnish", "serve", str(run), "--port", "0", "--follow", run]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert server.stdout.readline() == f"loaded step 2 of {run}\n"
        line = server.stdout.readline()
        port = int(line.rpartition(":")[2].removesuffix("/v1\n"))

        def ask(path, body=None):
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            headers = {"Content-Type": "application/json"}
            method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
            connection.request(method, path, content, headers)
            found = json.loads(connection.getresponse().read())
            connection.close()
            return found

        def answer():
            body = {"model": str(run), "prompt": "Hi", "max_tokens": 16, "seed": 3}
            return ask("/v1/completions", body)["choices"][0]["text"]

        assert ask("/health") == {"status": "ok", "unfinished": 0, "version": 2}
        assert ask("/v1/models")["data"][0]["version"] == 2
        first = answer()
        api.resume(run, overrides=["train.steps=4"], show=False)
        until(lambda: ask("/health")["version"] == 4)
        last = tmp_path / "last"
        api.export(run, last, which="last", dtype="fp32")
        how = {"chat": False, "max_tokens": 16, "seed": 3, "show": False, "precision": "fp32"}
        (expected,) = api.generate("Hi", model=str(last), **how)
        assert answer() == expected.text != first
    finally:
        server.kill()
        server.communicate()


def test_only_a_run_can_be_followed(tmp_path):
    with pytest.raises(ConfigError, match=r"has no recipe\.toml"):
        RunFollower(tmp_path, "fp32", None, print)
