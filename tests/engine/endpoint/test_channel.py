"""The server as a process of its own: requests pass through its channel, and it can be killed."""

import asyncio
import json
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from multiprocessing import Pipe
from pathlib import Path

import pytest

import burnish
from burnish.engine.endpoint.server import listen
from burnish.machine.process import ChildProcess

openai = pytest.importorskip("openai", reason="openai is not installed")

CARD = {"name": "policy", "context": 77, "any_name": True}
USER = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class Answering:
    """A server process, and a thread that answers its requests by ``answer``."""

    def __init__(self, answer, prefix=()):
        """``prefix``: a command that executes the server's command."""
        self.answer, self.requests, self.prefix = answer, [], prefix
        self.listener = listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.start()

    def start(self):
        self.channel, theirs = Pipe()
        listener = self.listener.dup()
        command = [*self.prefix, sys.executable, "-P", "-m", "burnish.engine.endpoint.channel"]
        given = [str(listener.fileno()), str(theirs.fileno()), json.dumps(CARD)]
        path = {"PYTHONPATH": str(Path(burnish.__file__).parents[1])}
        self.process = ChildProcess(
            [*command, *given],
            name="the server",
            inherited=[listener, theirs],
            env=path,
        )
        self.thread = threading.Thread(target=self.run, args=[self.channel], daemon=True)
        self.thread.start()

    def run(self, channel):
        try:
            while True:
                message = json.loads(channel.recv_bytes())
                self.requests.append(message)
                found = None if "gone" in message else self.answer(message)
                if found is not None:
                    found = {"call": message["call"]} | found
                    channel.send_bytes(json.dumps(found).encode())
        except (EOFError, OSError):
            pass

    def close(self):
        with socket.fromfd(self.channel.fileno(), socket.AF_UNIX, socket.SOCK_STREAM) as shared:
            shared.shutdown(socket.SHUT_RDWR)  # closing it does not wake the thread that reads
        self.thread.join(10)
        self.channel.close()
        code = self.process.stop(10)
        self.process.close()
        self.listener.close()
        return code

    def client(self, session="s", **how):
        url = f"{self.url}/session/{session}/v1" if session else f"{self.url}/v1"
        return openai.OpenAI(**({"base_url": url, "api_key": "x", "max_retries": 0} | how))


def choices(*messages, **how):
    listed = [{"message": one, "finish_reason": "stop", "logprobs": None} | how for one in messages]
    return {"choices": listed, "prompt_tokens": 3, "completion_tokens": 4}


def echo(message):
    if message["kind"] == "text":
        texts = [text * 2 for text in message["prompt"]]
        return choices() | {"choices": [{"text": text, "finish_reason": "stop"} for text in texts]}
    said = message["messages"][-1]["content"]
    if said == "call":
        calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
        return choices(calls, finish_reason="tool_calls")
    if said == "logprobs":
        return choices({"content": "a"}, logprobs=[{"token": "a", "logprob": -1.0}])
    if said == "no":
        return {"error": {"status": 400, "message": "no", "code": "context_length_exceeded"}}
    if said == "wait":
        return None
    return choices({"role": "assistant", "content": f"{message['session']} {said}"})


@pytest.fixture(scope="module")
def server():
    with closing(Answering(echo)) as found:
        yield found


def ask(own, content, **how):
    messages = [{"role": "user", "content": content}]
    return own.chat.completions.create(model="any", messages=messages, **how)


def test_requests_arrive_as_they_were_sent(server):
    with server.client("a%20b", default_headers={"X-Session-ID": "t"}) as own:
        messages = [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None},
            {"role": "tool", "tool_call_id": "call_0", "content": "5"},
        ]
        answer = own.chat.completions.create(
            model="any", messages=messages, max_completion_tokens=5, seed=3, stop="x"
        )
        assert answer.choices[0].message.content == "a b 5"
        assert (answer.model, answer.usage.total_tokens) == ("any", 7)
        found = server.requests[-1]
        assert found.pop("digest")
        assert 0 <= time.monotonic() - found.pop("arrived") < 60
        assert found == {
            "call": found["call"],
            "session": "a b",
            "trace": "t",
            "kind": "chat",
            "messages": [
                {"role": "user", "content": "Hi"},
                {"role": "assistant", "tool_calls": [CALL]},
                {"role": "tool", "content": "5", "tool_call_id": "call_0"},
            ],
            "tools": [],
            "tool_choice": "auto",
            "max_tokens": 5,
            "temperature": None,
            "top_p": None,
            "seed": 3,
            "stop": ["x"],
            "n": 1,
            "logprobs": False,
            "retry_key": None,
            "retry": 0,
        }
        texts = own.completions.create(model="any", prompt=["a", "b"])
        assert [choice.text for choice in texts.choices] == ["aa", "bb"]
        assert (server.requests[-1]["prompt"], server.requests[-1]["kind"]) == (["a", "b"], "text")
        (model,) = own.models.list().data
        assert (model.id, model.max_model_len) == ("policy", 77)
    with server.client(None, default_headers={"X-Session-ID": "t"}) as own:
        assert ask(own, "x").choices[0].message.content == "t x"
        assert server.requests[-1]["trace"] is None


def test_answers_and_streams_have_the_same_content(server):
    with server.client() as own:
        for content in ("call", "logprobs", "é"):
            (choice,) = ask(own, content, logprobs=content == "logprobs").choices
            chunks = list(ask(own, content, logprobs=content == "logprobs", stream=True))
            deltas = [chunk.choices[0].delta for chunk in chunks]
            assert "".join(d.content or "" for d in deltas) == (choice.message.content or "")
            calls = [call for delta in deltas for call in delta.tool_calls or ()]
            assert [call.id for call in calls] == [
                call.id for call in choice.message.tool_calls or ()
            ]
            assert chunks[-1].choices[0].finish_reason == choice.finish_reason
            listed = [one.choices[0].logprobs for one in chunks if one.choices[0].logprobs]
            assert len(listed) == (content == "logprobs")
        for how in ({}, {"stream": True}):
            with pytest.raises(openai.BadRequestError) as raised:
                ask(own, "no", **how)
            assert raised.value.code == "context_length_exceeded"


def test_a_client_that_gives_up_is_told(server):
    with server.client(timeout=1) as own, pytest.raises(openai.APITimeoutError):
        ask(own, "wait")
    number = server.requests[-1]["call"]
    for _ in range(500):
        if {"call": number, "gone": True} in server.requests:
            break
        threading.Event().wait(0.01)
    assert {"call": number, "gone": True} in server.requests
    with server.client() as own:
        assert ask(own, "x").choices


def test_many_requests_at_once_keep_their_answers(server):
    with server.client() as own, ThreadPoolExecutor(16) as pool:
        found = pool.map(lambda i: ask(own, str(i)).choices[0].message.content, range(100))
        assert list(found) == [f"s {i}" for i in range(100)]


def test_the_server_raises_its_limit_of_open_files():
    """All 240 clients are connected at the same time: none is answered before the last one asks."""
    waiting, everyone = [], threading.Event()

    def answer(message):
        waiting.append(message["call"])
        if len(waiting) == 240:
            everyone.set()
            for call in waiting[:-1]:
                server.channel.send_bytes(json.dumps({"call": call} | echo(message)).encode())
            return echo(message)
        return None

    async def ask_all():
        given = {"base_url": f"{server.url}/v1", "api_key": "x", "max_retries": 0, "timeout": 120}
        async with openai.AsyncOpenAI(**given) as own:
            body = {"model": "any", "messages": [USER]}
            return await asyncio.gather(*(own.chat.completions.create(**body) for _ in range(240)))

    limit = ("sh", "-c", 'ulimit -S -n 100; exec "$@"', "sh")
    with closing(Answering(answer, limit)) as server:
        found = asyncio.run(ask_all())
    assert everyone.is_set()
    assert len(found) == 240


def test_a_killed_server_is_replaced_on_the_same_port():
    server = Answering(echo)
    with ThreadPoolExecutor(2) as pool, server.client() as own:
        waits = pool.submit(ask, own, "wait")
        while not server.requests:
            threading.Event().wait(0.01)
        os.kill(server.process.pid, signal.SIGKILL)
        with pytest.raises(openai.APIConnectionError):
            waits.result(20)
        server.thread.join(10)  # the channel tells that the server is gone
        assert not server.thread.is_alive()
        server.process.close()
        early = pool.submit(ask, own, "x")  # it waits in the listener's queue
        server.start()
        assert early.result(30).choices[0].message.content == "s x"
    assert server.close() == 0


def test_the_server_loads_no_torch():
    code = "import sys, burnish.engine.endpoint.channel; assert 'torch' not in sys.modules"
    path = {"PYTHONPATH": str(Path(burnish.__file__).parents[1])}
    with closing(ChildProcess([sys.executable, "-P", "-c", code], name="python", env=path)) as one:
        assert one.wait(60) == 0
