"""The HTTP server of the endpoint: uvicorn with limits, and an orderly end."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Receive, Scope, Send

from burnish.engine.endpoint.answers import error_response
from burnish.engine.endpoint.backend import RequestRefused
from burnish.engine.endpoint.thread import EngineThread
from burnish.errors import EngineError, RunError
from burnish.machine.process import raise_open_files

CONNECTIONS, GRACE = 10_000, 5
"""Maximum number of connections, and the seconds in which they must end when the server stops. The
system's limit of open files may permit fewer connections."""
RESERVED = 200
"""Open files of the process that are no connections."""
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
    """Return a uvicorn server for an application, without logs. `run_endpoint` runs it.

    This process's limit of open files is raised to the system's. A request on a connection beyond
    `CONNECTIONS`, or beyond the open files, gets status 503.
    """
    most = min(CONNECTIONS, max(raise_open_files() - RESERVED, 16))

    async def limited(scope: Scope, receive: Receive, send: Send) -> None:
        answer: ASGIApp = app
        if len(server.server_state.connections) > most:
            message = f"the server has {most} open connections, its maximum; try again later"
            answer = error_response(RequestRefused(503, message))
            answer.headers["connection"] = "close"
        await answer(scope, receive, send)

    config = uvicorn.Config(
        limited,
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=GRACE,
    )
    server = uvicorn.Server(config)  # which ``limited`` needs
    return server


async def run_endpoint(
    server: uvicorn.Server, thread: EngineThread, listener: socket.socket
) -> None:
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
