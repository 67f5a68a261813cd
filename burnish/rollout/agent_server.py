"""The HTTP server of agents during training: a process of its own, which this process starts.

    agent ──HTTP──► server's process ──JSON──► AgentServer (in the process that samples)

The server parses and checks HTTP requests (`burnish.engine.endpoint.channel`) and passes them on.
This process only listens: it keeps the socket, so that another server can take its place on the
same port if the first one is killed, while clients that connect in between wait.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from multiprocessing.connection import Connection, Pipe
from typing import Any
from urllib.parse import quote

from burnish.errors import ChildError, EngineError
from burnish.machine.process import ChildProcess

HOST = "127.0.0.1"
BACKLOG = 1024
"""Connections that wait for a server."""
SEND_SECONDS = 60
"""Seconds that a server has to take an answer, and to send the rest of a request."""
CHUNK = 1 << 16
"""Bytes that are read at once."""
LENGTH = struct.Struct("!i")
"""Encoding of a message's length in `multiprocessing.connection`."""
MOST_STARTS = 20
"""Servers that may fail in a row, without a request in between, before the run ends."""
GRACE_SECONDS = 5.0
"""Seconds that a server has to exit when it is closed."""
LOG_BYTES = 1 << 20
"""Size at which a server's log is emptied."""


class AgentServer:
    """The server's process, its socket, and the requests that it passes on. It starts with the
    first call of ``start``. Close it after use."""

    def __init__(self, name: str, context: int) -> None:
        """``name`` of the model, and the maximum number of tokens of a prompt with its response."""
        self._card = {"name": name, "context": context, "any_name": True}
        self._listener: socket.socket | None = None
        self._process: ChildProcess | None = None
        self._connection: Connection | None = None
        self._socket: socket.socket | None = None
        """The connection as a socket, which is read without waiting."""
        self._incoming = bytearray()
        self._moved = 0.0
        """Time at which the last bytes arrived."""
        self._failures = 0
        self.generation = 0
        """Number of servers that have been started, which the numbers of their calls belong to."""

    @property
    def pid(self) -> int:
        """Process id of the server, which must have been started."""
        assert self._process is not None
        return self._process.pid

    @property
    def readable(self) -> list[Connection]:
        """The connection on which requests arrive; empty before the start."""
        return [] if self._connection is None else [self._connection]

    def base_url(self, session: str) -> str:
        """Return the base URL of a session, for clients of the OpenAI API."""
        assert self._listener is not None
        port = self._listener.getsockname()[1]
        return f"http://{HOST}:{port}/session/{quote(session, safe='')}/v1"

    def start(self) -> None:
        """Start a server unless it is running. Raise an EngineError if servers fail again and
        again."""
        if self._connection is not None:
            return
        if self._failures >= MOST_STARTS:
            raise EngineError(
                f"the server of agents ended {MOST_STARTS} times without a request: "
                f"{self._process.with_tail('the last one') if self._process else ''}"
            )
        if self._process is not None:
            self._process.close()
        self._failures += 1
        if self._listener is None:
            self._listener = socket.create_server((HOST, 0), backlog=BACKLOG)
        ours, theirs = Pipe()
        limit = struct.pack("ll", SEND_SECONDS, 0)
        with closing(socket.socket(fileno=os.dup(ours.fileno()))) as end:
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        listening = self._listener.dup()
        module = "burnish.engine.endpoint.channel"
        command = [sys.executable, "-P", "-m", module]
        arguments = [str(listening.fileno()), str(theirs.fileno()), json.dumps(self._card)]
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
        try:
            self._process = ChildProcess(
                [*command, *arguments],
                name="the server of agents",
                inherited=[listening, theirs],
                env={"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        except ChildError as error:
            ours.close()
            theirs.close()
            listening.close()
            raise EngineError(str(error)) from error
        self._open(ours)
        self.generation += 1

    def _open(self, connection: Connection) -> None:
        self._connection, self._incoming = connection, bytearray()
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))

    def receive(self) -> list[dict[str, Any]] | None:
        """Return the requests that have arrived as a whole, without waiting; None if the server has
        died, or does not send the rest of a request. Nobody awaits the calls of such a server."""
        found = list[dict[str, Any]]()
        if self._connection is None:
            return found
        assert self._process is not None
        self._process.limit_log(LOG_BYTES)
        try:
            self._read(time.monotonic())
            while (content := self._take_message()) is not None:
                found.append(json.loads(content))
                self._failures = 0
        except (EOFError, OSError, ValueError):
            self._drop()
            return None
        return found

    def _read(self, now: float) -> None:
        """Read the bytes that have arrived. Raise EOFError if the server has died, or if it began a
        request `SEND_SECONDS` ago and sends nothing more."""
        assert self._socket is not None
        try:
            while part := self._socket.recv(CHUNK, socket.MSG_DONTWAIT):
                self._incoming += part
                self._moved = now
        except BlockingIOError:
            if self._incoming and now - self._moved > SEND_SECONDS:
                raise EOFError from None
        else:
            raise EOFError

    def _take_message(self) -> bytes | None:
        """Remove the first message from the bytes that were read; None if it is not complete."""
        if len(self._incoming) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._incoming)[0]
        if len(self._incoming) < end:
            return None
        content = bytes(self._incoming[LENGTH.size : end])
        del self._incoming[:end]
        return content

    def answer(self, generation: int, call: int, reply: Mapping[str, Any]) -> None:
        """Send the answer to a call, or its error. Calls of a server that has died are ignored."""
        if self._connection is None or generation != self.generation:
            return
        try:
            self._connection.send_bytes(json.dumps({"call": call, **reply}).encode())
        except OSError:  # it has died, or does not read
            if self._process is not None:
                self._process.kill()  # `receive` finds the end of the connection

    def close(self) -> None:
        """Stop the server and close the socket. Closing again does nothing."""
        self._drop()
        if self._process is not None:
            self._process.close(GRACE_SECONDS)
        if self._listener is not None:
            self._listener.close()
        self._listener = self._process = None

    def _drop(self) -> None:
        for end in (self._connection, self._socket):
            if end is not None:
                end.close()
        self._connection = self._socket = None
