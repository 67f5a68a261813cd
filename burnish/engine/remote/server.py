"""Server program of an engine in its own process: it answers the calls of one client in order.

Its client (`burnish/engine/remote/client.py`) or `burnish engine serve` starts it, in an
environment that has the engine's package but perhaps not burnish's dependencies, so it imports
little. It inherits a connected socket and exits when its client disconnects.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.engine.build import make_engine
from burnish.engine.protocol import Sleeper
from burnish.engine.remote import wire
from burnish.engine.remote.environment import NEEDED
from burnish.engine.settings import EngineSettings
from burnish.errors import BurnishError, EngineError
from burnish.model.checksum import checksum_of_bytes
from burnish.types import Weights

if TYPE_CHECKING:
    from burnish.engine.protocol import Engine, Request

TAIL = 1 << 20
"""Bytes at the end of a file that enter its fingerprint."""


def fingerprint(model: str | Path) -> str:
    """Return a hash of a model directory's weights, as 16 hexadecimal digits. It covers only the
    size, the header and the last `TAIL` bytes of each safetensors file."""
    digest = hashlib.sha256()
    for file in sorted(Path(model).glob("*.safetensors")):
        with file.open("rb") as opened:
            header = opened.read(int.from_bytes(opened.read(8), "little"))
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - TAIL))
            digest.update(header + opened.read() + str(size).encode())
    return digest.hexdigest()[:16]


def engine_facts(engine: Engine, settings: EngineSettings) -> dict[str, Any]:
    """Return the description of an engine that its client receives before the first call, as JSON
    fields: name, package with version, fingerprint of the model directory, settings, size of the
    vocabulary, context length and capabilities."""
    config = json.loads((settings.directory / "config.json").read_text())
    package, _ = NEEDED[settings.name]
    owner = metadata.packages_distributions()[package][0]
    return {
        "name": settings.name,
        "package": f"{package} {metadata.version(owner)}",
        "model": fingerprint(settings.directory),
        "precision": settings.precision,
        "on_update": settings.on_update,
        "vocab_size": config["vocab_size"],
        "context": config["max_position_embeddings"],
        "capabilities": asdict(engine.capabilities),
    }


class Service:
    """Carries out the client's calls on the engine, and collects buckets of weights until they are
    loaded."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._buckets: list[Any] = []
        """Received weights that are not loaded yet, each bucket in safetensors' layout."""

    def answer(self, fields: dict[str, Any], arrays: list[wire.Array]) -> wire.Message:
        """Carry out one call, and return the header and the arrays of the answer. ``fields`` and
        ``arrays`` are the client's message; ``fields["call"]`` names the call and is removed. Raise
        an EngineError if the call is unknown or the engine refuses it."""
        engine, call = self.engine, fields.pop("call", None)
        if call == "submit":
            engine.submit(_request(fields, arrays))
        elif call == "step":
            rows, streams = wire.pack_completions(engine.step())
            return {"completions": rows}, streams
        elif call == "probe":
            return {"probe": engine.probe()}, []
        elif call == "abort":
            engine.abort(fields["request_id"])
        elif call == "sleep" and isinstance(engine, Sleeper):
            engine.sleep()
        elif call == "bucket":
            kept = [] if fields["first"] else self._buckets
            self._buckets = [*kept, _checked(arrays[0], fields["checksum"])]
        elif call == "load":
            engine.load(self._weights(fields))
        else:
            raise EngineError(
                f"unknown call {call!r}; use the same version of burnish on both sides"
            )
        return {}, []

    def _weights(self, fields: dict[str, Any]) -> Weights:
        """Assemble the weights of a load from files in shared memory, or from the received buckets,
        which are then forgotten. Raise an EngineError if tensors are missing or a checksum is
        wrong."""
        from safetensors.torch import load, load_file

        buckets, self._buckets = self._buckets, []
        tensors = {name: t for one in buckets for name, t in load(one.tobytes()).items()}
        for file, wanted in zip(fields["files"], fields["checksums"], strict=True):
            _checked(np.memmap(file, np.uint8, "r"), wanted)
            tensors |= load_file(file)
        version = fields["version"]
        if sorted(tensors) != fields["names"]:
            raise EngineError(
                f"{len(tensors)} of {len(fields['names'])} tensors of version {version} arrived; "
                f"version {self.engine.version} stays loaded"
            )
        return Weights(version, fields["incarnation"], tensors, fields["is_partial"])


def _request(fields: dict[str, Any], arrays: list[wire.Array]) -> Request:
    try:
        return wire.unpack_request(fields, arrays)
    except (LookupError, TypeError, ValueError) as error:
        raise EngineError(
            f"a request can't be decoded ({error}); use the same version of burnish on both sides"
        ) from None


def _checked(data: Any, wanted: int) -> Any:
    if checksum_of_bytes(data) != wanted:
        raise EngineError(
            "the weights' checksum differs from the sender's; the old weights stay loaded"
        )
    return data


def answer_calls(connection: socket.socket, engine: Engine) -> None:
    """Answer calls on the engine until the client disconnects.

    A burnish error is sent to the client and leaves the engine's state unchanged. Any other
    exception is sent to the client and must end the process: the engine's state is unknown then,
    and no token may come from a mixture of weights. Bytes that are not a message end the calls,
    too, because the start of the next message is unknown.
    """
    with suppress(OSError):  # the client or its machine is gone
        _answer_all(connection, engine)


def _answer_all(connection: socket.socket, engine: Engine) -> None:
    service = Service(engine)
    while True:
        try:
            fields, arrays = wire.receive(connection)
        except EOFError:
            return
        except ValueError as error:
            wire.send(connection, {"fatal": f"a message can't be decoded: {error}"})
            return
        answer: wire.Message = {}, []
        try:
            answer = service.answer(fields, arrays)
        except BurnishError as error:
            answer[0]["error"] = str(error)
        except Exception as error:
            traceback.print_exc()
            wire.send(connection, {"fatal": f"{type(error).__name__}: {error}"})
            raise
        state = {key: getattr(engine, key) for key in ("version", "unfinished", "sampled")}
        wire.send(connection, answer[0] | {"state": state}, answer[1])


def run_server(descriptor: int, settings: EngineSettings) -> None:
    """Build the engine, send its description to the client, and answer the client's calls until it
    disconnects. If the engine can't be built, send the error and exit with status 1.

    ``descriptor``: file descriptor of the inherited socket, whose other end the client has.
    """
    with socket.socket(fileno=descriptor) as connection:
        try:
            engine = make_engine(settings)
            wire.send(connection, engine_facts(engine, settings))
        except Exception as error:
            traceback.print_exc()
            wire.send(connection, {"fatal": f"{type(error).__name__}: {error}"})
            raise SystemExit(1) from None
        answer_calls(connection, engine)


if __name__ == "__main__":
    run_server(int(sys.argv[1]), EngineSettings(**json.loads(sys.argv[2])))
