"""An engine in another process, environment or machine; to its caller it is an engine like any.

``start`` runs `burnish/engine/serving.py` under another Python and talks to it by a socket that
only the two of them have; ``connect`` reaches a `burnish engine serve` by TCP. Every call has a
deadline, and an engine that is silent or gone is an error that names it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish import folders
from burnish.checksum import checksum_of_bytes
from burnish.engine import wire
from burnish.engine.protocol import Capabilities, ProbeCheck, Request, check
from burnish.engine.serving import Settings
from burnish.errors import EngineError
from burnish.folders import SHARED
from burnish.types import Completion, Weights

if TYPE_CHECKING:
    from torch import Tensor

BUCKET = 64 << 20
"""Bytes of weights that are read at a time, and put into shared memory or sent."""
GRACE = 10.0
"""Seconds that an engine has to end by itself."""
SILENCE, PROBES = 60, 3
"""Seconds in which a machine must answer TCP, and the questions that it must not leave open."""
WORDS = 30
"""Lines of its log that an error about a dead engine quotes."""
Probe = Callable[[], tuple[float, ...]]


class Child:
    """A process that serves an engine, and its log."""

    def __init__(self, python: str, settings: Settings, connection: socket.socket) -> None:
        """``connection`` is the engine's end of a socket; this process closes its copy."""
        # The other Python must not see the packages beside burnish, so it gets burnish alone.
        self.folder = folders.claim("engine")
        root = self.folder.path
        (root / "burnish").symlink_to(Path(__file__).parents[1])
        self.python, self.log = python, root / "log.txt"
        # -P: nor the modules of the directory that it starts in.
        command = [python, "-P", "-m", "burnish.engine.serving", str(connection.fileno())]
        try:
            with self.log.open("wb") as log:
                self.process = subprocess.Popen(
                    [*command, json.dumps(asdict(settings))],
                    env=os.environ | {"PYTHONPATH": str(root), "PYTHONUNBUFFERED": "1"},
                    pass_fds=[connection.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # Ctrl-C is for the run, which ends its step first
                )
        except OSError:
            self.folder.remove()
            raise
        connection.close()

    def __str__(self) -> str:
        return f"process {self.process.pid} of {self.python}"

    def words(self) -> str:
        """The end of its log."""
        said = self.log.read_text(errors="replace").splitlines()[-WORDS:]
        return "\n".join(["; the end of its log:", *(f"  {line}" for line in said)] if said else "")

    def end(self, grace: float = GRACE) -> int | None:
        """Ends it, and all that it started -> its exit code."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(grace)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        return self.process.wait()

    def close(self, grace: float = GRACE) -> None:
        """Ends it and removes its log."""
        self.end(grace)
        self.folder.remove()


class RemoteEngine:
    def __init__(
        self, connection: socket.socket, label: str, deadline: float, child: Child | None = None
    ) -> None:
        """``label`` names the engine in errors; ``child`` is None if others started the process.

        Waits until the engine is there, for as long as ``deadline`` says in seconds.
        """
        self._connection, self._child, self._deadline = connection, child, deadline
        self.label = f"the engine {label}" + ("" if child is None else f" ({child})")
        self._end = weakref.finalize(self, _close, connection, child)
        self._lost: str | None = None
        """Why the engine can't be asked any more; None while it can."""
        self._shares = connection.family == socket.AF_UNIX and SHARED.is_dir()
        self._requests: dict[str, Request] = {}
        self._left: dict[str, int] = {}
        """Samples of each request that are not complete."""
        self._expected: tuple[Probe, ProbeCheck] | None = None
        self.version = self.unfinished = self.sampled = 0
        self.facts: dict[str, Any] = {}
        """What the engine said about itself; empty until it is there."""
        self.facts = self._receive("start")[0]
        self.capabilities = Capabilities(**self.facts["capabilities"])

    def submit(self, request: Request) -> None:
        bounds = {name: self.facts[name] for name in ("vocab_size", "context")}
        check(request, **bounds)
        header, arrays = wire.pack_request(request)
        self._call("submit", arrays, **header)
        self._requests[request.request_id], self._left[request.request_id] = request, request.n

    def step(self) -> list[Completion]:
        told, arrays = self._call("step")
        found = wire.unpack_completions(
            told["completions"], arrays, lambda name: self._requests[name].params
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
        """All tensors, and no token before they are all there; if a probe is expected, the engine's
        must agree, so that weights that are torn or stayed old are seen."""
        # The learner answers first: it may need the GPU's memory, which the engine takes then.
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
        """After each load, the engine's probe must be ``probe()`` within ``tolerance``."""
        self._expected = probe, ProbeCheck(tolerance)

    def close(self) -> None:
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
                f"weights of version {about['version']} can't be put into {SHARED} for "
                f"{self.label}: {error}; make room there"
            ) from error
        finally:
            folder.remove()

    def _stream(self, buckets: Iterator[dict[str, Tensor]], about: dict[str, Any]) -> None:
        from safetensors.torch import save

        for number, bucket in enumerate(buckets):
            data = np.frombuffer(save(bucket), np.uint8)
            self._call("bucket", [data], first=number == 0, checksum=checksum_of_bytes(data))
        self._call("load", files=[], checksums=[], **about)

    def _call(self, call: str, arrays: list[wire.Array] | None = None, **told: Any) -> wire.Message:
        if self._lost is not None:
            raise EngineError(f"{self.label} {self._lost}")
        try:
            wire.send(self._connection, {"call": call} | told, arrays or (), self._deadline)
        except TimeoutError:
            raise self._lose(f"did not take {call!r} within {self._deadline:g} s") from None
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
        code = None if self._child is None else self._child.end(1.0)
        why = str(error) or "it closed the connection"
        return self._lose(f"died at {call!r} ({why if code is None else f'exit code {code}'})")

    def _lose(self, why: str) -> EngineError:
        """The error about an engine that is not asked again."""
        words = "" if self._child is None else self._child.words()
        self._lost = why
        self._end()
        remedy = "; go on with `burnish resume`" if self.facts else ""
        return EngineError(f"{self.label} {why}{remedy}{words}")


def _close(connection: socket.socket, child: Child | None) -> None:
    connection.close()
    if child is not None:
        child.close()


def buckets(
    tensors: Mapping[str, Tensor], device: str | None = "cpu"
) -> Iterator[dict[str, Tensor]]:
    """The tensors in their order, some at a time; ``device``: None if each stays where it is."""
    bucket, size = dict[str, Any](), 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > BUCKET:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.detach().to(device or tensor.device).contiguous()
        size += tensor.nbytes
    yield bucket


def start(settings: Settings, *, python: str, deadline: float) -> RemoteEngine:
    """An engine in a process of its own under ``python``."""
    folders.remove_dead()
    ours, theirs = socket.socketpair()
    try:
        child = Child(python, settings, theirs)
    except BaseException:
        ours.close()
        theirs.close()
        raise
    return RemoteEngine(ours, settings.name, deadline, child)


def connect(url: str, token: str, *, deadline: float) -> RemoteEngine:
    """The engine that a `burnish engine serve` makes for this client; ``url``: tcp://HOST:PORT."""
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), deadline)
        keep_alive(connection)
        wire.send(connection, {"token": token}, seconds=deadline)
    except OSError as error:
        raise EngineError(
            f"no engine answers at {url}: {error}; start one there with `burnish engine serve`"
        ) from error
    return RemoteEngine(connection, f"at {url}", deadline)


def keep_alive(connection: socket.socket) -> None:
    """Lets the system notice within `SILENCE` that the other machine is gone, whether a message is
    on its way to it or none."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    first, every = SILENCE // 2, SILENCE // (2 * PROBES)
    options = {
        "TCP_NODELAY": 1,
        "TCP_KEEPIDLE": first,  # seconds of silence before the first question
        "TCP_KEEPALIVE": first,  # its name on a Mac
        "TCP_KEEPINTVL": every,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": SILENCE * 1000,  # milliseconds
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
