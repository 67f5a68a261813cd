"""Client of an engine in another process, environment or machine. It implements `Engine` itself.

``start_engine`` runs `burnish/engine/remote/server.py` under another Python and talks to it over a
socket pair. ``connect_engine`` reaches a `burnish engine serve` over TCP. Every call has a timeout,
and the error for an engine that does not respond names it and quotes the end of its log.
"""

from __future__ import annotations

import json
import socket
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.engine.protocol import Capabilities, Probe, ProbeCheck, Request, check_request
from burnish.engine.remote import wire
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.machine import folders
from burnish.machine.folders import SHARED
from burnish.machine.process import ChildProcess, exit_status
from burnish.model.checksum import checksum_of_bytes
from burnish.types import Completion, Weights

if TYPE_CHECKING:
    from torch import Tensor

BUCKET = 64 << 20
"""Bytes of weights that are written to shared memory, or sent, at a time."""
GRACE = 10.0
"""Seconds that an engine has to exit by itself."""
SILENCE, PROBES = 60, 3
"""Seconds after which a silent machine counts as dead, and the TCP probes sent to it until then."""


class EngineProcess:
    """The child process of an engine, and the temporary folder with its log."""

    def __init__(self, python: str, settings: EngineSettings, connection: socket.socket) -> None:
        """Start the process under the interpreter ``python``. ``connection``: the engine's end of a
        socket, which the process inherits; this process closes its copy."""
        self.folder = folders.claim("engine")
        root = self.folder.path
        # The other environment must import burnish, but not the packages installed beside it.
        (root / "burnish").symlink_to(Path(__file__).parents[2])
        self.python, self.log = python, root / "log.txt"
        # -P keeps out the modules of the working directory.
        command = [python, "-P", "-m", "burnish.engine.remote.server", str(connection.fileno())]
        try:
            self.process = ChildProcess(
                [*command, json.dumps(asdict(settings))],
                name=f"the engine {settings.name}",
                inherited=[connection],
                env={"PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"},
                log=self.log,
            )
        except BaseException:
            self.folder.remove()
            raise

    def __str__(self) -> str:
        return f"process {self.process.pid} of {self.python}"

    def close(self, grace: float = GRACE) -> None:
        """Give the process ``grace`` seconds to exit, kill it otherwise, and remove the folder with
        its log."""
        self.process.close(grace)
        self.folder.remove()


class RemoteEngine:
    """Client of one engine in another process. Calls block until the engine has answered. After a
    timeout, a crash or a failed probe check, every further call raises an EngineError."""

    def __init__(
        self,
        connection: socket.socket,
        label: str,
        deadline: float,
        child: EngineProcess | None = None,
    ) -> None:
        """Wait until the engine has started and has described itself. Raise an EngineError if it
        fails or does not answer in time.

        ``label`` names the engine in errors; ``deadline`` is the timeout of each call, and of the
        start, in seconds; ``child`` is the engine's process, None if this process did not start it.
        """
        self._connection, self._child, self._deadline = connection, child, deadline
        self.label = f"the engine {label}" + ("" if child is None else f" ({child})")
        self._end = weakref.finalize(self, _close, connection, child)
        self._lost: str | None = None
        """Why the engine can't be called any more; None while it can."""
        self._shares = connection.family == socket.AF_UNIX and SHARED.is_dir()
        self._requests: dict[str, Request] = {}
        self._left: dict[str, int] = {}
        """Number of unfinished samples of each request."""
        self._expected: tuple[Probe, ProbeCheck] | None = None
        self.version = self.unfinished = self.sampled = 0
        self.facts: dict[str, Any] = {}
        """Description that the engine sends when it has started; empty before that."""
        self.facts = self._receive("start")[0]
        self.capabilities = Capabilities(**self.facts["capabilities"])

    def submit(self, request: Request) -> None:
        bounds = {name: self.facts[name] for name in ("vocab_size", "context")}
        check_request(request, **bounds)
        header, arrays = wire.pack_request(request)
        self._call("submit", arrays, **header)
        self._requests[request.request_id], self._left[request.request_id] = request, request.n

    def step(self) -> list[Completion]:
        answer, arrays = self._call("step")
        found = wire.unpack_completions(
            answer["completions"], arrays, lambda name: self._requests[name].params
        )
        for completion in found:
            name = completion.request_id
            self._left[name] -= 1
            if not self._left[name]:
                del self._left[name], self._requests[name]
        return found

    def abort(self, request_id: str) -> None:
        self._call("abort", request_id=request_id)

    def sleep(self) -> None:
        self._call("sleep")

    def probe(self) -> tuple[float, ...]:
        return tuple(self._call("probe")[0]["probe"])

    def load(self, weights: Weights) -> None:
        """Send all tensors and make the engine load them. The engine samples no token in between.

        If `expect` was called, compare the engine's probe with the expected one afterwards, which
        detects stale and partly loaded weights. If the probes differ, end the engine and raise an
        EngineError.
        """
        # The learner computes its probe before the engine wakes up and takes the GPU's memory.
        wanted = None if self._expected is None else self._expected[0]()
        about = {
            "version": weights.version,
            "incarnation": weights.incarnation,
            "is_partial": weights.is_partial,
            "names": sorted(weights.tensors),
        }
        (self._share if self._shares else self._stream)(buckets(weights.tensors), about)
        if self._expected is not None and wanted is not None:
            try:
                self._expected[1](weights.version, wanted, self.probe())
            except EngineError as error:
                raise self._lose(str(error)) from None

    def expect(self, probe: Probe, tolerance: float) -> None:
        """Check all following loads: `load` raises an EngineError and ends the engine if its probe
        after the load differs from ``probe()`` by more than ``tolerance`` nats (`ProbeCheck`)."""
        self._expected = probe, ProbeCheck(tolerance)

    def close(self) -> None:
        """Disconnect, and end the engine's process if this process started it. All following calls
        raise an EngineError; closing again does nothing."""
        self._lost = "was closed"
        self._end()

    def _share(self, buckets: Iterator[dict[str, Tensor]], about: dict[str, Any]) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        files, folder = list[Path](), folders.claim("engine", SHARED)
        try:
            for number, bucket in enumerate(buckets):
                files.append(folder.path / f"bucket-{number}")
                save_file(bucket, files[-1])
            sums = [checksum_of_bytes(np.memmap(file, np.uint8, "r")) for file in files]
            self._call("load", files=list(map(str, files)), checksums=sums, **about)
        except (OSError, SafetensorError) as error:
            raise EngineError(
                f"weights of version {about['version']} can't be written to {SHARED} for "
                f"{self.label}: {error}; free some space there"
            ) from error
        finally:
            folder.remove()

    def _stream(self, buckets: Iterator[dict[str, Tensor]], about: dict[str, Any]) -> None:
        from safetensors.torch import save

        for number, bucket in enumerate(buckets):
            data = np.frombuffer(save(bucket), np.uint8)
            self._call("bucket", [data], first=number == 0, checksum=checksum_of_bytes(data))
        self._call("load", files=[], checksums=[], **about)

    def _call(
        self, call: str, arrays: list[wire.Array] | None = None, **fields: Any
    ) -> wire.Message:
        if self._lost is not None:
            raise EngineError(f"{self.label} {self._lost}")
        try:
            wire.send(self._connection, {"call": call} | fields, arrays or (), self._deadline)
        except TimeoutError:
            raise self._lose(f"did not accept {call!r} within {self._deadline:g} s") from None
        except OSError as error:
            raise self._died(call, error) from None
        return self._receive(call)

    def _receive(self, call: str) -> wire.Message:
        try:
            answer, arrays = wire.receive(self._connection, self._deadline)
        except TimeoutError:
            late = f"did not answer {call!r} within engine.deadline = {self._deadline:g} s"
            raise self._lose(late) from None
        except (EOFError, OSError, ValueError) as error:
            raise self._died(call, error) from None
        if "fatal" in answer:
            raise self._lose(f"failed at {call!r}: {answer['fatal']}")
        for key, value in answer.get("state", {}).items():
            setattr(self, key, value)
        if "error" in answer:
            raise EngineError(f"{self.label}: {answer['error']}")
        return answer, arrays

    def _died(self, call: str, error: Exception) -> EngineError:
        how = str(error) or "it closed the connection"
        if self._child is not None:
            how = f"it {exit_status(self._child.process.stop(grace=1.0))}"
        return self._lose(f"died at {call!r} ({how})")

    def _lose(self, why: str) -> EngineError:
        """Close the connection and end the process, so that all further calls fail. Return the
        error for the caller to raise."""
        remedy = "; continue with `burnish resume`" if self.facts else ""
        text = f"{self.label} {why}{remedy}"
        if self._child is not None:
            text = self._child.process.with_tail(text)
        self._lost = why
        self._end()
        return EngineError(text)


def _close(connection: socket.socket, child: EngineProcess | None) -> None:
    connection.close()
    if child is not None:
        child.close()


def buckets(
    tensors: Mapping[str, Tensor], device: str | None = "cpu"
) -> Iterator[dict[str, Tensor]]:
    """Yield the tensors, in their order, in buckets of at most `BUCKET` bytes; a larger tensor has
    its own bucket. The tensors of a bucket are detached and contiguous. Without tensors, yield one
    empty bucket.

    ``device``: where the tensors are copied to; None to leave each tensor on its device.
    """
    bucket, size = dict[str, Any](), 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.detach().to(device or tensor.device).contiguous()
        size += tensor.nbytes
    yield bucket


def start_engine(settings: EngineSettings, *, python: str, deadline: float) -> RemoteEngine:
    """Start an engine in a child process under the interpreter ``python``, wait until it has loaded
    its model, and return its client. Raise an EngineError if the engine does not start, or a
    ChildError if ``python`` can't be run.

    ``deadline``: timeout of the start and of each call, in seconds. Temporary folders of burnish
    processes that have ended are removed.
    """
    folders.remove_dead()
    ours, theirs = socket.socketpair()
    try:
        child = EngineProcess(python, settings, theirs)
    except BaseException:
        ours.close()
        theirs.close()
        raise
    return RemoteEngine(ours, settings.name, deadline, child)


def connect_engine(url: str, token: str, *, deadline: float) -> RemoteEngine:
    """Connect to the `burnish engine serve` at ``url``, tcp://HOST:PORT, which starts an engine for
    this client; return the client when the engine has started. Raise an EngineError if nothing
    responds there or the server refuses the client.

    ``token`` authenticates the client. ``deadline``: timeout of each call in seconds.
    """
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), deadline)
        keep_alive(connection)
        wire.send(connection, {"token": token}, seconds=deadline)
    except OSError as error:
        raise EngineError(
            f"no engine responds at {url}: {error}; start one there with `burnish engine serve`"
        ) from error
    return RemoteEngine(connection, f"at {url}", deadline)


def keep_alive(connection: socket.socket) -> None:
    """Configure TCP to detect within `SILENCE` seconds that the other machine is gone, whether or
    not a message is being sent to it."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    first, every = SILENCE // 2, SILENCE // (2 * PROBES)
    options = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": first,  # seconds of silence before the first probe
        "TCP_KEEPALIVE": first,  # its name on macOS
        "TCP_KEEPINTVL": every,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": SILENCE * 1000,  # milliseconds
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
