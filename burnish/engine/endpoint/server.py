"""The HTTP server of the endpoint: uvicorn with limits, and an orderly end."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.applications import Starlette

from burnish.engine.endpoint.thread import EngineThread
from burnish.errors import EngineError, RunError

CONNECTIONS, GRACE = 1000, 5
"""Maximum number of connections, and the seconds in which they must end when the server stops."""
KEEP_ALIVE = 75
"""Seconds for which an idle connection stays open. Clients close theirs earlier (OpenAI's after 5
s), so that no request is sent to a connection that the server is closing."""


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on ``port`` of ``host``; port 0 selects a free port. Raise a
    RunError if that is not possible."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=CONNECTIONS)
    except OSError as error:
        raise RunError(
            f"serve can't listen on port {port} of {host}: {error.strerror}; choose another port "
            "with --port, or any free port with --port 0"
        ) from error


def make_server(app: Starlette) -> uvicorn.Server:
    """Return a uvicorn server for an application, with at most `CONNECTIONS` connections and
    without logs. `run_server` runs it."""
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=GRACE,
    )
    return uvicorn.Server(config)


async def run_server(server: uvicorn.Server, thread: EngineThread, listener: socket.socket) -> None:
    """Run ``server`` on the socket ``listener`` until it is told to exit, as by SIGINT, or until
    the engine of ``thread`` fails, which raises an EngineError.

    When the server has to exit, ``thread`` is closed: requests that are not complete get an error,
    so that the end does not wait for long responses.
    """
    serving = asyncio.create_task(server.serve([listener]))
    while not serving.done():
        server.should_exit |= thread.failure is not None
        if server.should_exit:
            await asyncio.to_thread(thread.close)
        await asyncio.wait([serving], timeout=0.1)
    await serving
    if thread.failure is not None:
        raise EngineError(thread.reason) from thread.failure
