"""Agents in their own processes, and the clients with which they call the server."""

import json
import ssl
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest

from burnish.environments.agent import AgentSettings, proxy_exceptions
from burnish.environments.pool import EnvironmentPool
from burnish.errors import DataError

pytest.importorskip("openai", reason="openai is not installed")

AGENT = """
import asyncio
import urllib.request

import openai


def read(url):
    request = urllib.request.Request(url, b"{}", {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=20).status


async def run(client, row):
    messages = [{"role": "user", "content": "Hi"}]
    given = await client.chat.completions.create(model="policy", messages=messages)
    async with openai.AsyncOpenAI(base_url=client.base_url, api_key="x", max_retries=0) as own:
        made = await own.chat.completions.create(model="policy", messages=messages)
    status = await asyncio.to_thread(read, f"{client.base_url}chat/completions")
    texts = [one.choices[0].message.content for one in (given, made)]
    return float(texts == ["ab", "ab"] and status == 200)
"""


class Model(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"index": 0, "message": {"role": "assistant", "content": "ab"}}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [choice | {"finish_reason": "stop"}]}).encode())

    def log_message(self, *_):
        pass


@contextmanager
def serving(tls=None):
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as server:
        if tls is not None:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = Thread(target=server.serve_forever, args=[0.02])
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/session/one/v1"
        finally:
            server.shutdown()
            thread.join()


PROXY = "http://127.0.0.1:9"
"""Nobody listens at the port "discard"."""


@pytest.fixture(params=[None, "corp.example", "*"])
def proxied(monkeypatch, request):
    """An environment whose requests go to a proxy that does not exist."""
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, PROXY)
        monkeypatch.setenv(name.lower(), PROXY)
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    if request.param is not None:
        monkeypatch.setenv("NO_PROXY", request.param)


@pytest.mark.usefixtures("proxied")
def test_no_client_of_an_agent_uses_a_proxy(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    pool = EnvironmentPool(f"{tmp_path / 'agent.py'}:run", tools=AgentSettings(timeout=20))
    with closing(pool), serving() as url:
        pool.reset([("one", {}, 0)])
        (found,) = pool.step([("one", {"role": "assistant", "content": url})])
    assert (found.error, found.reward) == (None, 1.0)


ELSEWHERE = """
async def run(client, row):
    async with client.with_options(base_url=row["url"], api_key="secret") as other:
        messages = [{"role": "user", "content": "Hi"}]
        answer = await other.chat.completions.create(model="other", messages=messages)
    return float(answer.choices[0].message.content == "ab")
"""


@pytest.mark.parametrize("is_trusted", [False, True])
def test_the_agents_client_sends_a_key_only_to_trusted_servers(
    tmp_path, certificate, monkeypatch, is_trusted
):
    """An agent may call another model with a copy of its client."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    if is_trusted:
        monkeypatch.setenv("SSL_CERT_FILE", f"{certificate}.crt")
    (tmp_path / "agent.py").write_text(ELSEWHERE)
    pool = EnvironmentPool(f"{tmp_path / 'agent.py'}:run", tools=AgentSettings(timeout=20))
    with closing(pool), serving(tls) as url:
        pool.reset([("one", {"url": url.replace("http:", "https:")}, 0)])
        (found,) = pool.step([("one", {"role": "assistant", "content": url})])
    assert (found.reward == 1.0) is is_trusted
    assert is_trusted or "APIConnectionError" in found.error


def test_certificates_that_cannot_be_read_are_named(tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none.pem"))
    (tmp_path / "agent.py").write_text(AGENT)
    pool = EnvironmentPool(f"{tmp_path / 'agent.py'}:run", tools=AgentSettings())
    with closing(pool), pytest.raises(DataError, match=r"certificates.*check SSL_CERT_FILE"):
        pool.reset([("one", {}, 0)])


@pytest.mark.parametrize(
    ("given", "upper", "lower"),
    [
        ({}, "127.0.0.1,localhost", "127.0.0.1,localhost"),
        ({"NO_PROXY": "a, localhost"}, "a,localhost,127.0.0.1", "a,localhost,127.0.0.1"),
        ({"NO_PROXY": "a", "no_proxy": "b"}, "a,127.0.0.1,localhost", "b,127.0.0.1,localhost"),
        ({"no_proxy": "*"}, "*", "*"),
    ],
)
def test_hosts_without_a_proxy_are_kept(given, upper, lower):
    assert proxy_exceptions(given) == {"NO_PROXY": upper, "no_proxy": lower}
