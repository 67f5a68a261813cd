"""An engine behind the endpoint of `burnish serve`, by real HTTP, for tests."""

import asyncio
import json
import threading
from contextlib import closing, contextmanager
from functools import partial
from http.client import HTTPConnection

from burnish.engine.endpoint.app import Endpoint, make_app
from burnish.engine.endpoint.backend import ModelCard
from burnish.engine.endpoint.engine_backend import EngineBackend
from burnish.engine.endpoint.prompts import ChatPrompts
from burnish.engine.endpoint.server import listen, make_server, run_endpoint
from burnish.engine.endpoint.thread import EngineThread
from burnish.tasks.text import TODAY, encode_chat

JSON = {"Content-Type": "application/json"}


class Client:
    def __init__(self, port, thread):
        self.port, self.thread = port, thread
        self.url = f"http://127.0.0.1:{port}/v1"

    def open(self, body, path="/v1/completions", method="POST", headers=JSON):
        """Send a request, and return its connection."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        sent = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, sent, headers)
        return connection

    def ask(self, *given, **how):
        """The status and the content of a request's response."""
        with closing(self.open(*given, **how)) as connection:
            reply = connection.getresponse()
            return reply.status, json.loads(reply.read())


@contextmanager
def serving(engine, tokenizer, model="m", capacity=1024, hosts=(), key=None, context=100_000):
    """A server in a thread of its own; at the end it must stop in time."""
    with EngineThread(engine, capacity) as thread:
        prompts = ChatPrompts(tokenizer, partial(encode_chat, tokenizer), now=TODAY)
        card = ModelCard(model, context)
        backend = EngineBackend(thread, tokenizer, prompts, lambda: card)
        app = make_app(Endpoint(backend), hosts, key)
        server, listener = make_server(app), listen("127.0.0.1", 0)
        port, failed = listener.getsockname()[1], []

        def run():
            try:
                asyncio.run(run_endpoint(server, thread, listener))
            except Exception as error:
                failed.append(error)

        own = threading.Thread(target=run)
        own.start()
        client = Client(port, thread)
        client.failed, client.server, client.ended = failed, server, own
        try:
            yield client
        finally:
            server.should_exit = True
            own.join(10)
        assert not own.is_alive()
