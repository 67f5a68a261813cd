"""A model behind an endpoint: its requests, and a run that it judges."""

import json
import threading
from contextlib import contextmanager
from http.client import HTTPConnection
from types import SimpleNamespace

import pytest

from burnish import api
from burnish.graders.judge import Judge
from burnish.model import checkpoint
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import ModelConfig, Transformer
from burnish.schema.judged import JudgeConfig
from burnish.serve import Chat, listen
from tests.tasks.test_judged import rows_of, write


@contextmanager
def serving(chat):
    with listen(chat, "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def post(port, body, path="/v1/chat/completions", kind="application/json"):
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    sent = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, sent, {"Content-Type": kind})
    reply = connection.getresponse()
    found = json.loads(reply.read())
    connection.close()
    return reply.status, found


ASKED = {"model": "m", "messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("change", "how", "message"),
    [
        ({"logprobs": True}, {}, "unknown setting 'logprobs'; there are model, messages, temp"),
        ({"messages": []}, {}, "messages must have at least 1 item"),
        ({"messages": [{"role": "root", "content": ""}]}, {}, "messages.0.role must be 'system'"),
        ({"max_tokens": 0}, {}, "max_tokens must be greater than or equal to 1, got 0"),
        ({}, {"kind": "text/plain"}, " bytes of application/json to /v1/chat/completions, got "),
        ({}, {"path": "/v1/completions"}, "bytes of application/json to /v1/completions"),
    ],
)
def test_wrong_requests_are_refused(change, how, message):
    with serving(SimpleNamespace(answer=lambda request: {"said": request.max_tokens})) as port:
        assert post(port, ASKED) == (200, {"said": 256})
        status, found = post(port, ASKED | change, **how)
        assert (status, post(port, b"{", **how)[0]) == (400, 400)
    assert message in found["error"]["message"]


def tiny(path):
    """A directory with a random model whose tokens are bytes."""
    tokenizer = Tokenizer.of_bytes()
    tokenizer.chat_template = TEMPLATE
    size = {"n_layers": 1, "d_model": 32, "n_heads": 4, "d_ff": 48, "context": 4096}
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **size)
    checkpoint.save(Transformer(config).init_weights(0), path)
    tokenizer.save(path)
    return path


TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


@pytest.mark.slow
def test_a_served_model_judges_a_run(tmp_path):
    """A random model answers bytes, so every grade is an error and none is a 0; a judge that has
    learned the form is the only difference to a real one."""
    chat = Chat(str(tiny(tmp_path / "judge")))
    with serving(chat) as port:
        url = f"http://127.0.0.1:{port}/v1"
        body = ASKED | {"model": chat.model, "temperature": 0, "max_tokens": 4}
        (status, found), again = post(port, body), post(port, body)
        assert (status, found) == again
        assert found["usage"]["prompt_tokens"] == len("user: Hi\n")
        assert found["usage"]["completion_tokens"] == 4
        assert found["choices"][0]["finish_reason"] == "length"
        assert "has the model" in post(port, body | {"model": "other"})[1]["error"]["message"]
        Judge(JudgeConfig(url=url, model=chat.model)).check()
        changes = [f"task.judge.model={chat.model}", "rollout.max_errors=1.0", "train.steps=1"]
        changes += ["task.judge.max_tokens=4", "task.judge.tries=2"]
        run = api.train(write(tmp_path, url), overrides=changes, out=tmp_path / "run", show=False)
    last = rows_of(run)[-1]
    assert last["rollout/grades_error"] == 1
    assert (last["judge/calls"], last["judge/retries"]) == (16, 8)
    assert last["judge/tokens"] > 16 * 4
    assert "rollout/reward" not in last
