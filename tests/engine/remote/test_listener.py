"""Whatever a stranger sends, or does not send, the next honest client is served at once."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from burnish.engine.remote import client, server, wire
from burnish.engine.remote import listener as listening
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.model import checkpoint

TOKEN = "right"
AT_ONCE = 2.0
"""Seconds for an honest client, on a busy machine; a hello that never comes takes ten."""


def framed(header: bytes | Any, body: bytes = b"", size: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return wire.LENGTHS.pack(len(text), len(body) if size is None else size) + text + body


class FakeChild:
    """Says that it is there, and ends."""

    log = Path("log")

    def __init__(self, python: str, settings: EngineSettings, connection: socket.socket) -> None:
        self.process = SimpleNamespace(is_running=False)
        wire.send(connection, {"served": True})
        connection.close()

    def close(self, grace: float = 0.0) -> None:
        """It has ended."""


class Served(SimpleNamespace):
    port: int
    told: list[str]
    thread: threading.Thread

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 5)

    def is_served(self) -> bool:
        """Whether an honest client is, at once."""
        start = time.monotonic()
        with self.connect() as honest:
            wire.send(honest, {"token": TOKEN}, seconds=5)
            answer = wire.receive(honest, 5)[0]
        return answer == {"served": True} and time.monotonic() - start < AT_ONCE


def serve(settings: EngineSettings) -> Iterator[Served]:
    listener, told = listening.open_listener("127.0.0.1", 0), list[str]()

    def accept() -> None:
        with suppress(OSError):  # the listener is closed at the end
            listening.accept(listener, TOKEN, settings, sys.executable, told.append)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield Served(port=listener.getsockname()[1], told=told, thread=thread)
    assert thread.is_alive(), "the server ended"
    listener.shutdown(socket.SHUT_RDWR)
    thread.join(20)
    assert not thread.is_alive()
    listener.close()


@pytest.fixture(scope="module")
def door() -> Iterator[Served]:
    """A server whose engines are not made."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listening, "EngineProcess", FakeChild)
        yield from serve(EngineSettings("native", "nowhere"))


PACKETS = {
    "nothing": b"",
    "a number": framed(1),
    "null": framed(None),
    "a string": framed("x"),
    "a list": framed([]),
    "nested brackets": framed(b"[" * 4000),
    "nested objects": framed(b'{"token":' * 400),
    "a lone surrogate": framed(b'{"token": "\\ud800", "arrays": []}'),
    "a token that is no text": framed({"token": [TOKEN], "arrays": []}),
    "no token": framed({"arrays": []}),
    "a wrong token": framed({"token": "wrong", "arrays": []}),
    "half a token": framed({"token": TOKEN[:3], "arrays": []}),
    "an empty header": framed(b""),
    "no JSON": framed(b"\xff\xfe{"),
    "a long number": framed(b'{"token": ' + b"1" * 4000 + b"}"),
    "a huge shape": framed({"token": TOKEN, "arrays": [["<f4", [1 << 40, 1 << 40]]]}, size=1 << 37),
    "a long header": wire.LENGTHS.pack(1 << 27, 0),
    "a longer header": wire.LENGTHS.pack(2**64 - 1, 2**64 - 1),
    "half of the lengths": b"\x01\x02\x03",
    "half of a header": framed({"token": TOKEN})[:-4],
    "HTTP": b"GET / HTTP/1.1\r\nHost: engine\r\n\r\n",
}


@pytest.mark.parametrize("name", PACKETS)
def test_no_packet_of_a_stranger_ends_the_server(door: Served, name: str) -> None:
    with door.connect() as stranger:
        stranger.sendall(PACKETS[name])
        assert door.is_served()  # while it is still connected
    assert door.is_served()
    assert door.thread.is_alive()


def test_silent_strangers_keep_nobody_waiting(
    door: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    silent = [door.connect() for _ in range(2 * listening.STRANGERS)]
    dripping = door.connect()
    for byte in framed({"token": TOKEN})[:9]:
        dripping.sendall(bytes([byte]))
        assert door.is_served()
    monkeypatch.setattr(listening, "HELLO", 0.3)
    silent.append(door.connect())
    assert wire.receive(silent[-1], 5)[0] == {"fatal": listening.NO_HELLO}
    with pytest.raises(EOFError):
        wire.receive(silent[-1], 5)
    for one in (*silent, dripping):
        one.close()
    assert door.is_served()


def test_a_system_without_room_for_connections_drops_the_oldest(
    door: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server goes on when its process may open no more files."""
    with door.connect() as silent:
        time.sleep(0.1)
        whole, failures = socket.socket.accept, [OSError(24, "too many open files")]

        def accept(listener: socket.socket) -> Any:
            if failures:
                raise failures.pop()
            return whole(listener)

        monkeypatch.setattr(socket.socket, "accept", accept)
        assert door.is_served()
        assert not failures
        assert wire.receive(silent, 5)[0] == {"fatal": listening.NO_HELLO}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)
dimensions = st.integers(-5, 5) | st.integers(-(2**70), 2**70) | st.booleans() | st.floats()
kinds = st.sampled_from(["<f4", "<i8", "|b1", "|O", "<U9", "i4,i4", "", "f4\n", "V8"]) | st.text()
array_rows = st.lists(st.tuples(kinds, st.lists(dimensions, max_size=40)) | json_values)
headers = st.dictionaries(st.sampled_from(["token", "call", "arrays"]) | st.text(), json_values)
packets = st.one_of(
    st.binary(max_size=200),
    st.builds(framed, st.binary(max_size=200), st.binary(max_size=50)),
    st.builds(framed, json_values | headers, st.binary(max_size=50)),
    st.builds(wire.LENGTHS.pack, st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)),
    st.builds(
        lambda header, rows, body, size: framed(header | {"arrays": rows}, body, size),
        headers,
        array_rows,
        st.binary(max_size=64),
        st.none() | st.integers(0, 2**40),
    ),
)
"""Random bytes, frames of random bytes and values, huge lengths, arrays of any shape."""
FUZZ = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@FUZZ
@given(packet=packets, cut=st.integers(0, 400))
def test_a_fuzzed_hello(door: Served, packet: bytes, cut: int) -> None:
    with door.connect() as stranger:
        with suppress(OSError):
            stranger.sendall(packet[: len(packet) - cut] if cut < len(packet) else packet)
        assert door.is_served()


@FUZZ
@given(packet=packets)
@example(packet=framed({"arrays": [["<f4", [-1]]]}))
@example(packet=framed({"arrays": [["<f4", [0, 2**70]]]}))
@example(packet=framed({"arrays": [["<f4", [2**32, 2**32]]]}))
@example(packet=framed({"arrays": [["<f4", [0] * 100]]}))
@example(packet=framed(b'{"arrays": ' + b"[" * 100_000))
def test_bytes_are_a_message_or_a_value_error(packet: bytes) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with ours:
            ours.sendall(packet)
        with suppress(ValueError, EOFError):
            header, arrays = wire.receive(theirs, 5)
            assert isinstance(header, dict)
            assert all(isinstance(array, np.ndarray) for array in arrays)


calls = st.sampled_from(["submit", "step", "probe", "abort", "bucket", "load", "sleep", "x", None])
VALID = wire.pack_request(tiny.request("a", 9, n=2))
fields = st.sampled_from([*VALID[0], "files", "checksums", "names", "version", "is_partial"])


def message(changes: dict[str, Any], call: Any, arrays: list[Any]) -> bytes:
    """A request with other fields or arrays; a field whose value is "gone" is left out."""
    header = {"call": call} | VALID[0] | changes
    header = {name: value for name, value in header.items() if value != "gone"}
    given = arrays or VALID[1]
    rows = [[array.dtype.str, array.shape] for array in given]
    return framed(header | {"arrays": rows}, b"".join(array.tobytes() for array in given))


@FUZZ
@given(
    packet=packets
    | st.builds(
        message,
        st.dictionaries(fields, json_values | st.just("gone"), max_size=3),
        calls,
        st.lists(st.sampled_from([VALID[1][0], np.zeros((2, 2)), np.zeros(3), np.zeros(0, "i4")])),
    )
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_fuzzed_frames_of_a_known_client_end_its_engine_or_are_answered(packet: bytes) -> None:
    """It never hangs, and the client learns of it."""
    ours, theirs = socket.socketpair()

    def answer() -> None:
        with theirs, suppress(Exception):  # a process prints it, and ends
            server.answer_calls(theirs, tiny.engine())

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    with ours:
        ours.sendall(packet)
        ours.shutdown(socket.SHUT_WR)
        with suppress(EOFError, ConnectionResetError):  # it did not read all that was sent
            while True:
                told = wire.receive(ours, 20)[0]
                assert told.keys() & {"fatal", "error", "state"}
    thread.join(20)
    assert not thread.is_alive()


def test_lengths_alone_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "AT_ONCE", 1 << 16)
    ours, theirs = socket.socketpair()
    size = 1 << 37
    with ours, theirs:
        ours.sendall(framed({"arrays": [["|u1", [size]]]}, b"few", size=size))
        ours.shutdown(socket.SHUT_WR)
        tracemalloc.start()
        with pytest.raises(EOFError):
            wire.receive(theirs, 5)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 1 << 20


def test_arrays_longer_than_a_piece_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "AT_ONCE", 1000)
    given_arrays = [np.arange(9999), np.arange(7, dtype=np.int8), np.zeros((3, 0), np.float32)]
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=wire.send, args=(ours, {"a": 1}, given_arrays))
        sender.start()
        header, arrays = wire.receive(theirs, 5)
        sender.join()
    assert header == {"a": 1}
    for ours_, theirs_ in zip(given_arrays, arrays, strict=True):
        np.testing.assert_array_equal(ours_, theirs_)
        assert ours_.shape == theirs_.shape


def test_a_machine_that_is_gone_is_noticed_in_a_minute(
    door: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ends ask by TCP, and give up after a minute, also with a message on its way."""
    seen = list[dict[str, int]]()
    names = ["TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT", "TCP_USER_TIMEOUT", "TCP_NODELAY"]

    def options(connection: socket.socket) -> dict[str, int]:
        found = {n: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, n)) for n in names}
        return found | {"alive": connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)}

    class Seen(FakeChild):
        def __init__(
            self, python: str, settings: EngineSettings, connection: socket.socket
        ) -> None:
            seen.append(options(connection))
            super().__init__(python, settings, connection)

    def receive(connection: socket.socket, *rest: Any) -> Any:
        seen.append(options(connection))
        raise EOFError

    monkeypatch.setattr(listening, "EngineProcess", Seen)
    monkeypatch.setattr(client.wire, "receive", receive)
    with pytest.raises(EngineError, match="died at 'start'"):
        client.connect_engine(f"tcp://127.0.0.1:{door.port}", TOKEN, deadline=5)
    for _ in range(100):
        if len(seen) == 2:
            break
        time.sleep(0.05)
    assert len(seen) == 2
    for found in seen:
        assert found["alive"] == found["TCP_NODELAY"] == 1
        last = found["TCP_KEEPIDLE"] + found["TCP_KEEPINTVL"] * found["TCP_KEEPCNT"]
        assert last == found["TCP_USER_TIMEOUT"] / 1000 == client.SILENCE == 60


VANISHES = """
import socket, subprocess, sys, time
from burnish.engine.remote import client, server, wire

def run(*words):
    subprocess.run(words, check=True)

client.SILENCE = 6
listener = socket.create_server(("0.0.0.0", 0))
hold = subprocess.Popen(["unshare", "-n", "sleep", "60"])
time.sleep(0.5)
inside = ["nsenter", "-t", str(hold.pid), "-n"]
run("ip", "link", "add", "here", "type", "veth", "peer", "name", "there")
run("ip", "link", "set", "there", "netns", str(hold.pid))
run("ip", "addr", "add", "10.9.0.1/24", "dev", "here")
run("ip", "link", "set", "here", "up")
run(*inside, "ip", "addr", "add", "10.9.0.2/24", "dev", "there")
run(*inside, "ip", "link", "set", "there", "up")
code = "import socket, time; s = socket.create_connection(('10.9.0.1', %d)); time.sleep(60)"
other = subprocess.Popen([*inside, sys.executable, "-c", code % listener.getsockname()[1]])
try:
    connection, _ = listener.accept()
    client.keep_alive(connection)
    if sys.argv[1] == "sends":
        wire.send(connection, {"some": "answer"})
    run(*inside, "ip", "link", "set", "there", "down")
    if sys.argv[1] == "sends":
        wire.send(connection, {"some": "answer"})
    start = time.monotonic()
    server.answer_calls(connection, None)
    print(f"gone {time.monotonic() - start:.1f}")
finally:
    other.kill()
    hold.kill()
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["waits", "sends"])
def test_a_client_whose_network_is_cut_is_left(how: str) -> None:
    """In a network namespace of its own: the client's end of the wire goes down, and no packet says
    so. The server may wait for a call, or have sent an answer."""
    tools = [shutil.which(tool) for tool in ("unshare", "nsenter", "ip")]
    if os.geteuid() or not all(tools):
        pytest.skip("it needs root, unshare, nsenter and ip, to make a network")
    given_ = ["unshare", "-n", sys.executable, "-c", VANISHES, how]
    done = subprocess.run(given_, capture_output=True, text=True, timeout=60, check=False)
    if "Operation not permitted" in done.stderr or "Unknown device type" in done.stderr:
        pytest.skip(f"no network can be made here: {done.stderr[-200:]}")
    assert done.stdout.startswith("gone "), done.stderr
    assert 1 < float(done.stdout.split()[1]) < 15


@pytest.fixture
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of real engines."""
    path = tmp_path_factory.mktemp("model")
    checkpoint.save_model(tiny.model(), path)
    tiny.tokenizer().save(path)
    yield from serve(EngineSettings("native", str(path), kv_bytes=1 << 20))


@pytest.mark.slow
@pytest.mark.skipif(tiny.DEVICE != "cpu", reason="the process computes on the CPU")
def test_a_known_client_that_sends_garbage_makes_room_for_the_next(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = list[client.EngineProcess]()

    class Known(client.EngineProcess):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            started.append(self)

    monkeypatch.setattr(listening, "EngineProcess", Known)
    url = f"tcp://127.0.0.1:{served.port}"
    with closing(client.connect_engine(url, TOKEN, deadline=120)) as engine:
        engine._connection.sendall(framed(b"[" * 100_000))
        with pytest.raises(EngineError, match="nested too deeply"):
            engine.step()
    started[0].process.wait(60)
    with closing(client.connect_engine(url, TOKEN, deadline=120)) as engine:
        assert len(tiny.finish(engine, [tiny.request("a")])) == 1
