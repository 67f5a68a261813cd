"""The server as a process of its own, whose requests another process answers, such as a training.

    python -P -m burnish.engine.endpoint.channel LISTENER CHANNEL CARD

LISTENER is the file descriptor of an inherited socket that listens for HTTP, CHANNEL the one of a
`multiprocessing` pipe, and CARD the model's `ModelCard` as JSON. The process ends when the other
end of the channel is closed. If it is killed, another one can serve the same listener.

Messages on the channel are JSON objects. ``call`` numbers a request:

    {"call": 1, "kind": "chat", "session": …, "messages": …, …}    a request; also "kind": "text";
                                                                   "arrived" is its time on the
                                                                   machine's monotonic clock
    {"call": 1, "gone": true}                                      its client has disconnected
    {"call": 1, "choices": […], "prompt_tokens": n, "completion_tokens": m}     its answer
    {"call": 1, "error": {"status": 400, "message": …, "code": …, "param": …}}  or its refusal

This module imports no torch.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from collections.abc import AsyncGenerator, Mapping
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from burnish.engine.endpoint.app import Endpoint, make_app
from burnish.engine.endpoint.backend import (
    AnswerPiece,
    Asked,
    ModelCard,
    RequestRefused,
    TokenLogprob,
)
from burnish.engine.endpoint.requests import ChatRequest
from burnish.engine.endpoint.server import make_server

SAMPLING = ("max_tokens", "temperature", "top_p", "seed", "stop", "n")
"""Fields of a request that are null on the channel if the request does not have them."""


class ChannelBackend:
    """Passes requests to the process at the other end of a channel, which answers each as a whole.
    `run` reads the answers."""

    def __init__(self, channel: Connection, card: ModelCard) -> None:
        self._channel, self._card = channel, card
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        """Futures of the answers to requests, by their numbers."""
        self._outgoing = SimpleQueue[bytes]()

    def card(self) -> ModelCard:
        return self._card

    def health(self) -> dict[str, Any]:
        return {"unfinished": len(self._answers)}

    async def answer(self, asked: Asked) -> AsyncGenerator[AnswerPiece, None]:
        answer = asyncio.get_running_loop().create_future()
        self._answers[asked.number] = answer
        self._send({**request_message(asked), "arrived": time.monotonic()})
        try:
            pieces = pieces_of(await answer, asked)
        finally:
            del self._answers[asked.number]
            if not answer.done() or answer.cancelled():
                self._send({"call": asked.number, "gone": True})
        for piece in pieces:
            yield piece

    async def run(self) -> None:
        """Pass messages on until the other end of the channel is closed. Two threads read and
        write, so that a full channel does not delay other requests."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        for target in (self._read, self._write):
            threading.Thread(target=target, args=[loop, ended], daemon=True).start()
        await ended.wait()

    def _send(self, message: Mapping[str, Any]) -> None:
        self._outgoing.put(json.dumps(message).encode())

    def _write(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        try:
            while True:
                self._channel.send_bytes(self._outgoing.get())
        except OSError:
            loop.call_soon_threadsafe(ended.set)

    def _read(self, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        try:
            while True:
                loop.call_soon_threadsafe(self._take, json.loads(self._channel.recv_bytes()))
        except (EOFError, OSError):
            loop.call_soon_threadsafe(ended.set)

    def _take(self, message: dict[str, Any]) -> None:
        answer = self._answers.get(message["call"])  # its client may have disconnected
        if answer is not None and not answer.done():
            answer.set_result(message)


def request_message(asked: Asked) -> dict[str, Any]:
    """Return a request as a message on the channel."""
    body = asked.body
    given = {name: getattr(body, name) for name in SAMPLING if name in body.model_fields_set}
    own: dict[str, Any] = {"kind": "text"}
    if isinstance(body, ChatRequest):
        own = {
            "kind": "chat",
            "messages": body.canonical_messages,
            "tools": body.canonical_tools,
            "tool_choice": body.tool_choice,
        }
    else:
        own["prompt"] = body.prompt
    return {
        "call": asked.number,
        "session": asked.session,
        "trace": asked.trace,
        **own,
        **dict.fromkeys(SAMPLING),
        **given,
        "n": body.n,
        "stop": body.stop,
        "logprobs": body.has_logprobs,
        "digest": asked.digest,
        "retry_key": asked.retry_key,
        "retry": asked.retry,
    }


def pieces_of(message: Mapping[str, Any], asked: Asked) -> list[AnswerPiece]:
    """Return the pieces of an answer on the channel. Raise RequestRefused if it is a refusal."""
    refused = message.get("error")
    if refused is not None:
        raise RequestRefused(
            refused["status"],
            refused["message"],
            code=refused.get("code"),
            param=refused.get("param"),
        )
    pieces = list[AnswerPiece]()
    for index, choice in enumerate(message["choices"]):
        said = choice.get("message") or {"content": choice["text"]}
        listed = choice.get("logprobs") if asked.body.has_logprobs else None
        pieces.append(
            AnswerPiece(
                index,
                said["content"] or "",
                tuple(said.get("tool_calls") or ()),
                0 if index else message["completion_tokens"],
                tuple(TokenLogprob(one["token"], one["logprob"]) for one in listed or ()),
                choice["finish_reason"],
                0 if index else message["prompt_tokens"],
            )
        )
    return pieces


async def serve_channel(listener: socket.socket, channel: Connection, card: ModelCard) -> None:
    """Serve HTTP on a listening socket until the other end of the channel is closed."""
    backend = ChannelBackend(channel, card)
    server = make_server(make_app(Endpoint(backend)))
    serving = asyncio.create_task(server.serve([listener]))
    running = asyncio.create_task(backend.run())
    await asyncio.wait([serving, running], return_when=asyncio.FIRST_COMPLETED)
    server.should_exit = server.force_exit = True
    await asyncio.wait([serving], timeout=1)


def main(listener: str, channel: str, card: str) -> None:
    """Run the process. The arguments are those of the command line."""
    with socket.socket(fileno=int(listener)) as opened:
        asyncio.run(serve_channel(opened, Connection(int(channel)), ModelCard(**json.loads(card))))


if __name__ == "__main__":
    main(*sys.argv[1:])
