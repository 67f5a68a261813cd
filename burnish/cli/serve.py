"""``burnish serve``: a model of this machine behind an OpenAI-compatible endpoint, for chats.

It listens on 127.0.0.1 unless told otherwise, and refuses a field that it does not know, since the
field would have no effect. Requests are answered one at a time: an answer then depends on nothing
but its request, to the last bit.
"""

from __future__ import annotations

import json
import threading
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError
from typer import Argument, Option, echo

from burnish import config
from burnish.api import open_engine, shown
from burnish.draws import Stream
from burnish.errors import BurnishError, ConfigError
from burnish.sections import Section
from burnish.types import Prompt, SamplingParams

PATH, JSON = "/v1/chat/completions", "application/json"
LARGEST = 10_000_000
"""Bytes of a request that are read."""


class Message(Section):
    role: Literal["system", "user", "assistant"]
    content: str


class ChatRequest(Section):
    """The fields of a request, by their names in OpenAI's interface."""

    model: str
    messages: list[Message] = Field(min_length=1)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    max_tokens: int = Field(256, ge=1)


class Chat:
    """A language model that answers chats, one at a time."""

    def __init__(self, model: str) -> None:
        """model: a name, a directory, hf:ORG/NAME or a run."""
        recipe = config.load({"task": "keywords", "model": {"name": model}})
        self.model, self._lock = model, threading.Lock()
        self._engine, self._tokenizer = open_engine(recipe)

    def answer(self, request: ChatRequest) -> dict[str, Any]:
        from burnish.rollout.rollout import sample
        from burnish.tasks.text import encode

        if request.model != self.model:
            raise ConfigError(f"this server has the model {self.model!r}, not {request.model!r}")
        messages = [message.model_dump() for message in request.messages]
        text, ids = encode(self._tokenizer, messages, chat=True)
        params = SamplingParams(request.temperature, max_tokens=request.max_tokens)
        with self._lock:
            asked = [(0, Prompt("chat", text, ids, "serve"))]
            ((said,),) = sample(self._engine, asked, 1, params, Stream.GENERATE)
        message = {"role": "assistant", "content": said.text}
        choice = {"index": 0, "message": message, "finish_reason": str(said.finish)}
        used = {"prompt_tokens": len(ids), "completion_tokens": len(said.token_ids)}
        used["total_tokens"] = sum(used.values())
        fixed = {"id": "chat", "object": "chat.completion", "created": 0, "model": self.model}
        return fixed | {"choices": [choice], "usage": used}


class Handler(BaseHTTPRequestHandler):
    timeout = 60

    def __init__(self, chat: Chat, *given: Any) -> None:
        self.chat = chat
        super().__init__(*given)

    def do_POST(self) -> None:
        status, content = 400, dict[str, Any]()
        try:
            content = self.chat.answer(ChatRequest.model_validate_json(self._read()))
            status = 200
        except ValidationError as error:
            content["error"] = {"message": config.explain(error, [*ChatRequest.model_fields])}
        except BurnishError as error:
            content["error"] = {"message": str(error)}
        body = json.dumps(content).encode()
        with suppress(ConnectionError):  # a client may have gone
            self.send_response(status)
            self.send_header("Content-Type", JSON)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def _read(self) -> bytes:
        length, kind = self.headers.get("Content-Length", ""), self.headers.get_content_type()
        # A page of another origin can't send JSON unasked.
        if (self.path, kind) != (PATH, JSON) or not length.isdigit() or int(length) > LARGEST:
            got = f"{length or 'unknown'} bytes of {kind} to {self.path}"
            raise ConfigError(f"send at most {LARGEST} bytes of {JSON} to {PATH}, got {got}")
        return self.rfile.read(int(length))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed for each request."""


def listen(chat: Chat, host: str, port: int) -> ThreadingHTTPServer:
    """A server that listens already; ``serve_forever`` answers."""
    return ThreadingHTTPServer((host, port), partial(Handler, chat))


def serve(
    model: Annotated[str, Argument(help="a name, a directory, hf:ORG/NAME or a run")],
    port: Annotated[int, Option(min=0, max=65535, help="0 takes a free one")] = 8421,
    host: Annotated[str, Option(help="0.0.0.0 lets other machines in: no key")] = "127.0.0.1",
) -> None:
    """Answer chats by a model of this machine, as a judge does, until Ctrl-C."""
    with shown(None, model):
        chat = Chat(model)
    with listen(chat, host, port) as server, suppress(KeyboardInterrupt):
        echo(f"serving {model} at http://{host}:{server.server_port}/v1")
        server.serve_forever()
