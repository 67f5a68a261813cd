"""A model behind an endpoint: the command, and a run that the model judges."""

import json
import signal
import socket
import subprocess
import sys
from http.client import HTTPConnection

import pytest
from typer.testing import CliRunner

from burnish import api
from burnish.cli.main import app
from burnish.cli.serve import open_named_model
from burnish.engine.endpoint.server import listen
from burnish.errors import MissingExtra, RunError
from burnish.graders.judge import Judge
from burnish.launch import preflight
from burnish.model import checkpoint
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe.judge import JudgeConfig
from tests.served import serving
from tests.tasks.test_judged import rows_of, write

CHAT = "/v1/chat/completions"


def tiny(path):
    """A directory with a random model whose tokens are bytes."""
    tokenizer = Tokenizer.of_bytes()
    tokenizer.chat_template = TEMPLATE
    size = {"n_layers": 1, "d_model": 32, "n_heads": 4, "d_ff": 48, "context": 4096}
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **size)
    checkpoint.save_model(Transformer(config).init_weights(0), path)
    tokenizer.save(path)
    return path


TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
ASKED = {"messages": [{"role": "user", "content": "Hi"}]}


def test_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(preflight.EXTRAS, "serve", ("no_such_package", "nothing"))
    error = CliRunner().invoke(app, ["serve", "smollm2-135m"]).exception
    assert isinstance(error, MissingExtra)
    assert "[serve]" in str(error)


def test_a_port_that_is_taken_is_an_error():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RunError, match=rf"port {port} of 127.0.0.1: .*; choose another port"):
            listen("127.0.0.1", port)


def test_it_listens_on_addresses_of_both_kinds():
    for host in ("127.0.0.1", "::1"):
        try:
            listener = listen(host, 0)
        except RunError:
            assert host == "::1"  # this machine has no IPv6
            continue
        with listener, socket.create_connection((host, listener.getsockname()[1]), 5):
            pass


@pytest.mark.slow
def test_a_served_model_judges_a_run(tmp_path):
    """A random model answers bytes, so every grade is an error and none is a 0; a judge that has
    learned the form is the only difference to a real one."""
    model = str(tiny(tmp_path / "judge"))
    with serving(*open_named_model(model), model) as client:
        body = ASKED | {"model": model, "temperature": 0, "max_tokens": 4}
        (status, found), again = client.ask(body, CHAT), client.ask(body, CHAT)
        assert (status, found) == again
        assert found["usage"]["prompt_tokens"] == len("user: Hi\n")
        assert found["usage"]["completion_tokens"] == 4
        assert found["choices"][0]["finish_reason"] == "length"
        Judge(JudgeConfig(url=client.url, model=model)).check()
        changes = [f"task.judge.model={model}", "rollout.max_errors=1.0", "train.steps=1"]
        changes += ["task.judge.max_tokens=4", "task.judge.tries=2"]
        path = write(tmp_path, client.url)
        run = api.train(path, overrides=changes, out=tmp_path / "run", show=False)
    last = rows_of(run)[-1]
    assert last["rollout/grades_error"] == 1
    assert (last["judge/calls"], last["judge/retries"]) == (16, 8)
    assert last["judge/tokens"] > 16 * 4
    assert "rollout/reward" not in last


@pytest.mark.slow
def test_other_machines_need_a_key(tmp_path):
    model = str(tiny(tmp_path / "model"))
    command = [sys.executable, "-m", "burnish", "serve", model, "--port", "0", "--host", "0.0.0.0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        port = int(server.stdout.readline().rpartition(":")[2].removesuffix("/v1\n"))
        name, _, key = server.stdout.readline().rstrip().partition("=")
        assert (name, len(key) > 20) == ("BURNISH_SERVE_KEY", True)
        found = []
        for shown in ("", "Bearer x", f"Bearer {key}"):
            connection = HTTPConnection("127.0.0.1", port, timeout=60)
            connection.request("GET", "/v1/models", headers={"Authorization": shown})
            found.append(connection.getresponse().status)
            connection.close()
        assert found == [401, 401, 200]
    finally:
        server.kill()
        server.communicate()


@pytest.mark.slow
def test_the_command_answers_as_generate_and_ends_by_ctrl_c(tmp_path):
    model = str(tiny(tmp_path / "model"))
    command = [sys.executable, "-m", "burnish", "serve", model, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline()
        assert line.startswith(f"serving {model} at http://127.0.0.1:")
        port = int(line.rpartition(":")[2].removesuffix("/v1\n"))
        body = {"model": model, "prompt": "Hi", "max_tokens": 16, "seed": 3}
        connection = HTTPConnection("127.0.0.1", port, timeout=60)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        found = json.loads(connection.getresponse().read())
        connection.close()
        how = {"chat": False, "max_tokens": 16, "seed": 3, "show": False}
        (answer,) = api.generate("Hi", model=model, **how)
        assert found["choices"][0]["text"] == answer.text
        server.send_signal(signal.SIGINT)
        _, said = server.communicate(timeout=20)
        assert (server.returncode, "Traceback" in said) == (0, False)
    finally:
        server.kill()
        server.communicate()
