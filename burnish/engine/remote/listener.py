"""Accept clients from other machines, one at a time, and start an engine for each of them.

A token authenticates a client. The listening process reads only the token and passes the connection
to the engine's process, so every client starts with the model's own weights.
"""

from __future__ import annotations

import errno
import hmac
import selectors
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from burnish.engine.remote import wire
from burnish.engine.remote.client import SILENCE, EngineProcess, keep_alive
from burnish.engine.remote.environment import TOKEN
from burnish.engine.settings import EngineSettings
from burnish.errors import ChildError, EngineError
from burnish.machine import folders

HELLO = 10.0
"""Seconds in which a client must send its token."""
STRANGERS = 64
"""Maximum number of clients that have not sent their token yet; beyond that, the oldest one is
refused."""
NO_HELLO = "it did not say hello"
FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
"""Error numbers of a system that can't open another connection."""


def open_listener(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket; port 0 selects a free port. Raise an EngineError if this is not
    possible, for example because the port is in use."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise EngineError(
            f"can't listen on {host}:{port}: {error}; choose another --port, or 0 for a free one"
        ) from error


class Stranger:
    """A connected client that has not sent its token yet, and the bytes that have arrived from it.

    The bytes are read without blocking, so that a silent client does not delay others.
    """

    def __init__(self, connection: socket.socket, host: str) -> None:
        """``host``: the client's address, for messages. The client must send its token within
        `HELLO` seconds from now."""
        connection.setblocking(False)
        self.connection, self.host = connection, host
        self.end = time.monotonic() + HELLO
        self._bytes, self._awaited = b"", wire.LENGTHS.size
        self._has_lengths = False

    def read(self) -> bytes | None:
        """Read the bytes that have arrived. Return the token, or None if the hello is not complete
        yet.

        Raises ValueError for an invalid hello, EOFError or OSError if the client is gone.
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
    """Accepts connections, and reads the first message of many clients at the same time: the hello,
    which contains a token.

    ``report`` is called with one line of text for each client that is refused.
    """

    def __init__(self, listener: socket.socket, report: Callable[[str], None]) -> None:
        listener.setblocking(False)
        self._listener, self._tell = listener, report
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._strangers: dict[socket.socket, Stranger] = {}
        """Clients that have not sent a token yet, in order of arrival."""

    def next(self) -> tuple[Stranger, bytes]:
        """Wait until a client has sent a token; return the client and its token, which is not
        checked here. Refuse clients whose hello is invalid or late."""
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
                    continue  # it has been refused
                try:
                    token = stranger.read()
                except (OSError, EOFError, ValueError):
                    self.refuse(stranger, NO_HELLO)
                    continue
                if token is not None:
                    self._forget(stranger)
                    return stranger, token

    def refuse(self, stranger: Stranger, why: str) -> None:
        """Send the client the reason ``why``, report it, and close the connection. The client may
        be one that `next` has returned."""
        self._forget(stranger)
        self._tell(f"refused {stranger.host}: {why}")
        with stranger.connection as connection, suppress(OSError):
            wire.send(
                connection, {"fatal": why}, seconds=0
            )  # without waiting: the client may not read it

    def close(self) -> None:
        """Disconnect the clients that have not sent a token. The listener stays open."""
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
    settings: EngineSettings,
    python: str,
    report: Callable[[str], None],
) -> None:
    """Accept clients from ``listener`` forever, one at a time. Start a new engine process under the
    interpreter ``python`` for each client that has the right token; refuse a client if the token is
    wrong or another client is being served.

    ``report`` is called with one line of text for each client. An exception, such as
    KeyboardInterrupt, ends the loop, kills the running engine process and propagates.
    """
    folders.remove_dead()
    child: EngineProcess | None = None
    door = Door(listener, report)
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
                child = EngineProcess(python, settings, client.connection)
            except (ChildError, OSError) as error:  # the client is gone, or the process can't start
                door.refuse(client, f"its engine can't be started: {error}")
                continue
            report(f"{settings.name} for {client.host}: {child}, log {child.log}")
    finally:
        door.close()
        if child is not None:
            child.close(0.0)


def _refusal(shown: bytes, token: str, child: EngineProcess | None) -> str | None:
    """Return the reason why a client is refused; None if it is accepted."""
    if not hmac.compare_digest(shown, token.encode()):
        return f"its token is wrong; set {TOKEN} to the token that the engine printed"
    if child is not None and child.process.is_running:
        return (
            f"the engine serves another client ({child}); wait until that client ends, which takes "
            f"at most {SILENCE} s if its machine is gone"
        )
    return None
