"""The endpoint by real HTTP: its answers are the engine's, and no client harms another."""

import asyncio
import http.client
import socket
import threading
import time
from contextlib import closing, contextmanager

import pytest
import tiny

from burnish.engine.endpoint import access, app, server
from burnish.engine.endpoint.answers import AnswerWriter
from burnish.engine.endpoint.backend import AnswerPiece, Asked
from burnish.engine.endpoint.requests import CompletionRequest
from burnish.engine.native.engine import NativeEngine
from burnish.engine.protocol import Request
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.randomness import Stream
from burnish.types import SamplingParams
from tests.served import JSON, serving

TOKENIZER = tiny.tokenizer()


def make_engine():
    """An engine with a cache for long responses."""
    model = tiny.model(context=100_000)
    return NativeEngine(model, TOKENIZER, EngineSettings(kv_bytes=1 << 26, page_size=4))


def expected(text, *, n=1, group=0, **params):
    """The completions of a prompt, sampled without a server."""
    request = Request(
        "r", TOKENIZER.encode(text), n, SamplingParams(**params), group, Stream.GENERATE
    )
    done = tiny.finish(make_engine(), [request])
    return [done["r", i] for i in range(n)]


def until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture(scope="module")
def client():
    with serving(make_engine(), TOKENIZER) as found:
        yield found


PROMPT = {"model": "m", "prompt": "Hi", "max_tokens": 8}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 8}
LONG = PROMPT | {"max_tokens": 90_000, "n": 4}


def test_completions_are_the_engines(client):
    asked = PROMPT | {"n": 3, "seed": 7, "temperature": 0.7, "top_p": 0.9, "prompt": ["Hi", "you"]}
    status, found = client.ask(asked)
    how = {"seed": 7, "temperature": 0.7, "top_p": 0.9, "max_tokens": 8, "n": 3}
    alone = [*expected("Hi", **how), *expected("you", group=1, **how)]
    assert status == 200
    assert [choice["text"] for choice in found["choices"]] == [one.text for one in alone]
    assert [choice["index"] for choice in found["choices"]] == [*range(6)]
    assert [choice["finish_reason"] for choice in found["choices"]] == [
        str(one.finish) for one in alone
    ]
    used = sum(len(one.token_ids) for one in alone)
    assert found["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": used,
        "total_tokens": 5 + used,
    }


def test_a_stop_string_is_not_part_of_the_answer(client):
    (whole,) = expected("Hi", max_tokens=60)
    stop = whole.text[5:7]
    before = whole.text[: whole.text.index(stop)]
    for given in (stop, [stop, "never"]):
        _, found = client.ask(PROMPT | {"max_tokens": 60, "stop": given})
        assert found["choices"][0]["text"] == before
        assert found["choices"][0]["finish_reason"] == "stop"


def test_without_a_chat_template_messages_are_joined(client):
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": text} for role, text in zip(roles, "abcd", strict=True)]
    _, found = client.ask(CHAT | {"messages": messages}, path="/v1/chat/completions")
    (alone,) = expected("a\nb\nc\nd\n", max_tokens=8)
    message = {"role": "assistant", "content": alone.text}
    assert found["choices"][0]["message"] == message
    assert (found["object"], found["usage"]["prompt_tokens"]) == ("chat.completion", 8)


def test_equal_requests_get_equal_responses(client):
    first, again = client.ask(PROMPT), client.ask(PROMPT)
    nulls = client.ask(PROMPT | dict.fromkeys(["seed", "stop", "n", "temperature", "stream"]))
    seeded, other = client.ask(PROMPT | {"seed": 0}), client.ask(PROMPT | {"seed": 1})
    assert first == again
    texts = [found["choices"][0]["text"] for _, found in (first, nulls, seeded, other)]
    assert texts[0] == texts[1] == texts[2] != texts[3]


def test_fields_that_clients_send_by_default_change_nothing(client):
    fields = {"user": "a", "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}}
    nulls = dict.fromkeys(fields)
    (status, plain), *others = [client.ask(PROMPT | given) for given in ({}, fields, nulls)]
    assert status == 200
    assert all(found["choices"] == plain["choices"] for _, found in others)


def test_parts_of_a_content_are_joined(client):
    def ask(content):
        messages = [{"role": "user", "content": content}]
        return client.ask(CHAT | {"messages": messages}, path="/v1/chat/completions")

    parts = [{"type": "text", "text": text} for text in ("He", "llo")]
    (_, joined), (_, text) = ask(parts), ask("Hello")
    assert joined["choices"] == text["choices"]
    for part in ({"type": "image_url", "image_url": {"url": "x"}}, {"type": "text"}, "x", None):
        status, found = ask([*parts, part])
        assert status == 400
        assert "messages.0.content must be a text or parts {" in found["error"]["message"]


def test_the_server_names_its_model(client):
    status, found = client.ask(None, "/v1/models", "GET", {})
    assert (status, [model["id"] for model in found["data"]]) == (200, ["m"])
    assert client.ask(None, "/health", "GET", {}) == (200, {"status": "ok", "unfinished": 0})


@pytest.mark.parametrize(
    ("change", "how", "status", "message"),
    [
        ({"echo": True}, {}, 400, "unsupported field 'echo'; the fields are model, temp"),
        ({"logprobs": True}, {}, 400, "logprobs must be a valid integer, got True"),
        ({"max_tokns": 1}, {}, 400, "unsupported field 'max_tokns'; did you mean 'max_tokens'?"),
        ({"logprobs": 1}, {}, 400, "logprobs must be 0, which returns the sampled tokens without"),
        ({"suffix": "x"}, {}, 400, "prompt, logprobs, max_completion_tokens"),
        ({"stream_options": {}}, {}, 400, "stream_options needs stream = true"),
        ({"presence_penalty": 0.5}, {}, 400, "presence_penalty must be 0: other values are not"),
        ({"logit_bias": {"5": 1}}, {}, 400, "supported; leave the field out, got {'5': 1}"),
        ({"prompt": []}, {}, 400, "prompt List must have at least 1 item"),
        ({"prompt": ""}, {}, 400, "a prompt has 1 to 99999 tokens in this model, got 0"),
        ({"prompt": ["a"] * 20, "n": 9}, {}, 400, "may have 128 responses, got 20 prompts with"),
        ({"prompt": {"a": 1}}, {}, 400, "prompt must be a valid array"),
        ({"temperature": -1}, {}, 400, "temperature must be greater than or equal to 0, got -1"),
        ({"temperature": 1e-300}, {}, 500, "log-probabilities were not finite"),
        ({"top_p": 0}, {}, 400, "top_p must be greater than 0, got 0"),
        ({"max_tokens": 0}, {}, 400, "max_tokens must be greater than or equal to 1, got 0"),
        ({"max_tokens": "8"}, {}, 400, "max_tokens must be a valid integer, got '8'"),
        ({"max_completion_tokens": 8}, {}, 400, "'max_completion_tokens' beside 'max_tokens'"),
        ({"seed": 2**63}, {}, 400, "seed must be less than 9223372036854775808"),
        ({"stop": ["x", ""]}, {}, 400, "stop.1 String must have at least 1 character"),
        ({"model": "other"}, {}, 404, "this server has the model 'm', not 'other'"),
        ({}, {"headers": {"Content-Type": "text/plain"}}, 415, "must be application/json, got"),
        ({}, {"path": "/v1/edits"}, 404, "there is no POST '/v1/edits'; use POST /v1/chat"),
        ({}, {"method": "GET"}, 405, "there is no GET '/v1/completions'"),
        ({}, {"path": "/v1/chat/completions"}, 400, "the field 'messages' is missing"),
    ],
)
def test_wrong_requests_are_refused(client, change, how, status, message):
    found, content = client.ask(PROMPT | change, **how)
    assert found == status
    assert message in content["error"]["message"]
    assert len(content["error"]["message"]) < 1000


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"\xff", b'{"model": "\\ud800"}', b"[" * 100_000, b"null"]
)
def test_bodies_that_are_no_request_are_refused(client, body):
    assert client.ask(body)[0] == 400


@pytest.mark.parametrize(
    ("role", "message"),
    [("root", "messages.0.role must be 'system', 'user', 'assistant' or 'tool'"), ("user", "")],
)
def test_roles_are_checked(client, role, message):
    messages = [{"role": role, "content": "Hi"}]
    status, found = client.ask(CHAT | {"messages": messages}, path="/v1/chat/completions")
    assert status == (400 if message else 200)
    assert message in str(found)


@pytest.mark.parametrize(
    ("host", "is_accepted"),
    [
        *[(name, True) for name in ("localhost:8421", "127.0.0.1", "[::1]:8421", "10.0.0.7:80")],
        *[(name, True) for name in (socket.gethostname(), "LOCALHOST", "gpu-box.example:1")],
        *[(name, False) for name in ("evil.example", "127.0.0.1.evil.example:8421", "", "a b")],
        ("localhost@evil.example", False),
    ],
)
def test_a_foreign_host_header_is_refused(host, is_accepted):
    assert access.is_known(host, access.known_hosts(["GPU-box.example"])) == is_accepted


def test_dns_rebinding_reaches_no_route(client):
    for headers in ({"Host": "evil.example"}, JSON | {"Host": "evil.example:80"}):
        status, found = client.ask(PROMPT, headers=headers)
        assert status == 403
        assert "the Host header 'evil.example" in found["error"]["message"]


def test_a_defect_is_an_error_of_the_api(client, monkeypatch):
    monkeypatch.setattr(app.AnswerWriter, "whole", lambda *_: 1 / 0)
    status, found = client.ask(PROMPT)
    assert (status, found["error"]["type"]) == (500, "server_error")
    assert "ZeroDivisionError" in found["error"]["message"]
    monkeypatch.undo()
    assert client.ask(PROMPT)[0] == 200


def test_large_and_slow_bodies_are_refused(client, monkeypatch):
    monkeypatch.setattr(app, "LARGEST", 100)
    monkeypatch.setattr(app, "PATIENCE", 0.1)
    assert client.ask(PROMPT | {"prompt": "x" * 100})[0] == 413
    chunks = JSON | {"Transfer-Encoding": "chunked"}
    assert client.ask(b"65\r\n" + b" " * 101 + b"\r\n0\r\n\r\n", headers=chunks)[0] == 413
    assert client.ask(b"{", headers=JSON | {"Content-Length": "5"})[0] == 408


def test_a_client_that_disconnects_aborts_its_request(client):
    connection = client.open(LONG)
    until(lambda: client.thread.unfinished == 4)
    connection.close()
    until(lambda: client.thread.unfinished == 0)
    assert client.ask(PROMPT)[0] == 200


def test_a_client_that_does_not_read_loses_its_stream(monkeypatch):
    monkeypatch.setattr(app, "PATIENCE", 0.1)
    sent, ended = [], []

    async def pieces():
        try:
            while True:
                yield AnswerPiece(0, "b")
        finally:
            ended.append(True)

    async def send(message):
        sent.append(message)
        if len(sent) > 3:
            await asyncio.sleep(60)

    body = CompletionRequest(**PROMPT, stream=True)
    stream = app.EventStream(AnswerWriter(Asked(0, body, "x"), "m"), AnswerPiece(0, "a"), pieces())
    asyncio.run(asyncio.wait_for(stream({}, None, send), 10))
    assert (len(sent), ended) == (4, [True])


def test_a_refused_prompt_aborts_the_others_of_its_request(client):
    status, found = client.ask(LONG | {"prompt": ["Hi", ""]})
    assert (status, found["error"]["type"]) == (400, "invalid_request_error")
    until(lambda: client.thread.unfinished == 0)


def test_thirty_clients_at_once(client):
    """Some ask, some disconnect, some send what is no request; every answer is the one that the
    client gets alone."""
    alone = {seed: client.ask(PROMPT | {"seed": seed, "max_tokens": 20}) for seed in range(20)}
    found, start = {}, threading.Barrier(30)

    def ask(number):
        start.wait(20)
        if number < 20:
            found[number] = client.ask(PROMPT | {"seed": number, "max_tokens": 20})
        elif number < 25:
            with closing(client.open(LONG | {"seed": number})):
                time.sleep(0.05)
        else:
            found[number] = client.ask(b"{" * number)

    threads = [threading.Thread(target=ask, args=[number]) for number in range(30)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert {number: found[number] for number in range(20)} == alone
    assert [found[number][0] for number in range(25, 30)] == [400] * 5
    until(lambda: client.thread.unfinished == 0)


@contextmanager
def busy(capacity=1024):
    """A server with a long request in flight, and the connection that waits for it."""
    with (
        serving(make_engine(), TOKENIZER, capacity=capacity) as client,
        closing(client.open(LONG)) as connection,
    ):
        until(lambda: client.thread.unfinished == 4)
        yield client, connection


def test_a_full_queue_refuses_requests():
    with busy(capacity=5) as (client, _):
        assert client.ask(PROMPT)[0] == 200
        status, found = client.ask(PROMPT | {"n": 2})
        assert (status, "try again later" in found["error"]["message"]) == (429, True)


def test_a_connection_beyond_the_maximum_is_refused(monkeypatch):
    monkeypatch.setattr(server, "CONNECTIONS", 4)
    with serving(make_engine(), TOKENIZER) as client:
        kept = [client.open(PROMPT) for _ in range(4)]
        assert [connection.getresponse().status for connection in kept] == [200] * 4
        for _ in range(3):
            status, found = client.ask(PROMPT)
            assert (status, found["error"]["type"]) == (503, "server_error")
            assert "the server has 4 open connections" in found["error"]["message"]
        kept.pop().close()
        until(lambda: client.ask(PROMPT)[0] == 200)
        for connection in kept:
            connection.close()


def test_a_server_that_stops_answers_and_ends():
    with busy() as (client, connection):
        client.server.should_exit = True
        reply = connection.getresponse()
        assert (reply.status, b"the server is stopping" in reply.read()) == (503, True)
        client.ended.join(10)
    assert not client.failed
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        client.ask(PROMPT)


def test_an_engine_that_fails_ends_the_server():
    engine = make_engine()
    with serving(engine, TOKENIZER) as client:
        engine.step = lambda: 1 / 0
        status, found = client.ask(PROMPT)
        assert (status, found["error"]["type"]) == (503, "server_error")
        client.ended.join(10)
    (error,) = client.failed
    assert isinstance(error, EngineError)
    assert "the engine failed: ZeroDivisionError" in str(error)
