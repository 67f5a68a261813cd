"""Lets clients of other machines in: each gets an engine of its own, one client at a time.

A client is known by a token. The process that listens reads only that; the engine's process, which
it starts for the client, does the rest, so that the next client meets the model's own weights.
"""

from __future__ import annotations

import hmac
import socket
from collections.abc import Callable
from contextlib import suppress

from burnish.engine import wire
from burnish.engine.environment import TOKEN
from burnish.engine.remote import Child, keep_alive
from burnish.engine.serving import Settings
from burnish.errors import EngineError

HELLO = 10.0
"""Seconds in which a client must show its token."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise EngineError(
            f"{host}:{port} can't be listened at: {error}; choose another --port, or 0 for a free "
            "one"
        ) from error


def accept(
    listener: socket.socket,
    token: str,
    settings: Settings,
    python: str,
    tell: Callable[[str], None],
) -> None:
    """Serves clients until it is interrupted."""
    child: Child | None = None
    try:
        while True:
            connection, (host, *_) = listener.accept()
            with connection:
                refused = _refusal(connection, token, child)
                if refused is not None:
                    tell(f"refused {host}: {refused}")
                    with suppress(OSError):
                        wire.send(connection, {"fatal": refused}, seconds=HELLO)
                    continue
                if child is not None:
                    child.close()
                keep_alive(connection)
                connection.settimeout(None)
                child = Child(python, settings, connection)
            tell(f"{settings.name} for {host}: {child}, log {child.log}")
    finally:
        if child is not None:
            child.close(0.0)


def _refusal(connection: socket.socket, token: str, child: Child | None) -> str | None:
    """Why a client is not let in; None if it is."""
    try:
        hello, _ = wire.receive(connection, HELLO, longest=4096)
        shown = str(hello["token"])
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return "it did not say hello"
    if not hmac.compare_digest(shown.encode(), token.encode()):
        return f"its token is wrong; set {TOKEN} to the token that the engine printed"
    if child is not None and child.process.poll() is None:
        return f"the engine serves another client ({child}); wait until it ends"
    return None
