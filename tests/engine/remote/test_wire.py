"""Messages between an engine and its client."""

from __future__ import annotations

import socket
import struct

import pytest

from burnish.engine.remote import wire


def test_messages_hold_numbers_alone() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        header = b'{"arrays": [["|O", [1]]]}'
        ours.sendall(wire.LENGTHS.pack(len(header), 8) + header + bytes(8))
        with pytest.raises(ValueError, match="arrays hold numbers"):
            wire.receive(theirs, 1)
        ours.sendall(struct.pack("<QQ", 1 << 60, 0))
        with pytest.raises(ValueError, match="too long"):
            wire.receive(theirs, 1)
        with pytest.raises(TimeoutError):
            wire.receive(theirs, 0.05)
        ours.close()
        with pytest.raises(EOFError):
            wire.receive(theirs, 1)
