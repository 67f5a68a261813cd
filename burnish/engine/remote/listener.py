"""Lets clients of other machines in: each gets an engine of its own, one client at a time.

A client is known by a token. The process that listens reads only that; the engine's process, which
it starts for the client, does the rest, so that the next client meets the model's own weights.
"""

from __future__ import annotations

import errno
import hmac
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from burnish import folders
from burnish.engine import wire
from burnish.engine.environment import TOKEN
from burnish.engine.remote import SILENCE, Child, keep_alive
from burnish.engine.serving import Settings
from burnish.errors import EngineError

HELLO = 10.0
"""Seconds in which a client must show its token."""
STRANGERS = 64
"""Clients that may be about to show it; when more come, the one that has waited longest goes."""
NO_HELLO = "it did not say hello"
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""The errors of a system that can't open another connection."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; port 0 takes a free one."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise EngineError(
            f"{host}:{port} can't be listened at: {error}; choose another --port, or 0 for a free "
            "one"
        ) from error


class Stranger:
    """A client that has not shown the token, and the bytes that it has sent. They are read as they
    come, without a wait, so that a client that is silent keeps nobody else waiting."""

    def __init__(self, connection: socket.socket, host: str) -> None:
        connection.setblocking(False)
        self.connection, self.host = connection, host
        self.end = time.monotonic() + HELLO
        self._bytes, self._awaited = b"", wire.LENGTHS.size
        self._has_lengths = False

    def read(self) -> bytes | None:
        """The token, once it is there; None before.

        Raises ValueError for bytes that are no hello, EOFError or OSError if the client is gone.
        """
        while len(self._bytes) < self._awaited:
            try:
                more = self.connection.recv(self._awaited - len(self._bytes))
            except BlockingIOError:
                return None
            if not more:
                raise EOFError
            self._bytes += more
            if len(self._bytes) == self._awaited and not self._has_lengths:
                self._has_lengths = True
                self._awaited += wire.hello_length(self._bytes)
        return wire.hello_token(self._bytes[wire.LENGTHS.size :])


class Door:
    """Reads hellos at a listener, of many clients at once."""

    def __init__(self, listener: socket.socket, tell: Callable[[str], None]) -> None:
        listener.setblocking(False)
        self._listener, self._tell = listener, tell
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, Stranger] = {}
        """In the order in which they came."""

    def next(self) -> tuple[Stranger, bytes]:
        """The next client that shows a token."""
        while True:
            for stranger in [s for s in self._strangers.values() if s.end <= time.monotonic()]:
                self.refuse(stranger, NO_HELLO)
            ends = [stranger.end for stranger in self._strangers.values()]
            wait = max(0.0, min(ends) - time.monotonic()) if ends else None
            for key, _ in self._selector.select(wait):
                if key.fileobj is self._listener:
                    self._let_in()
                    continue
                stranger = self._strangers.get(key.fileobj)  # type: ignore[call-overload]
                if stranger is None:
                    continue  # it was refused meanwhile
                try:
                    token = stranger.read()
                except (OSError, EOFError, ValueError):
                    self.refuse(stranger, NO_HELLO)
                    continue
                if token is not None:
                    self._forget(stranger)
                    return stranger, token

    def refuse(self, stranger: Stranger, why: str) -> None:
        self._forget(stranger)
        self._tell(f"refused {stranger.host}: {why}")
        with stranger.connection as connection, suppress(OSError):
            wire.send(connection, {"fatal": why}, seconds=0)  # or it is not told

    def close(self) -> None:
        self._selector.close()
        for stranger in self._strangers.values():
            stranger.connection.close()

    def _let_in(self) -> None:
        try:
            connection, (host, *_) = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            if error.errno not in FULL or not self._strangers:
                raise
            self._drop_oldest()
            return
        self._strangers[connection] = Stranger(connection, host)
        self._selector.register(connection, selectors.EVENT_READ)
        if len(self._strangers) > STRANGERS:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        self.refuse(next(iter(self._strangers.values())), NO_HELLO)

    def _forget(self, stranger: Stranger) -> None:
        if self._strangers.pop(stranger.connection, None) is not None:
            self._selector.unregister(stranger.connection)


def accept(
    listener: socket.socket,
    token: str,
    settings: Settings,
    python: str,
    tell: Callable[[str], None],
) -> None:
    """Serves clients until it is interrupted."""
    folders.remove_dead()
    child: Child | None = None
    door = Door(listener, tell)
    try:
        while True:
            client, shown = door.next()
            refused = _refusal(shown, token, child)
            if refused is not None:
                door.refuse(client, refused)
                continue
            if child is not None:
                child.close()
                child = None
            try:
                keep_alive(client.connection)
                client.connection.settimeout(None)
                child = Child(python, settings, client.connection)
            except OSError as error:  # the client is gone, or the system has no more processes
                door.refuse(client, f"its engine can't be started: {error}")
                continue
            tell(f"{settings.name} for {client.host}: {child}, log {child.log}")
    finally:
        door.close()
        if child is not None:
            child.close(0.0)


def _refusal(shown: bytes, token: str, child: Child | None) -> str | None:
    """Why a client is not let in; None if it is."""
    if not hmac.compare_digest(shown, token.encode()):
        return f"its token is wrong; set {TOKEN} to the token that the engine printed"
    if child is not None and child.process.poll() is None:
        return (
            f"the engine serves another client ({child}); wait until it ends, at most {SILENCE} s "
            "if its machine is gone"
        )
    return None
