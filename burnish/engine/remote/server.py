"""The program around an engine in a process of its own: it answers a client's calls, one by one.

It is started by its client (`burnish/engine/remote.py`) or by `burnish engine serve`, in an
environment that has the engine and perhaps none of burnish's other packages, so it imports little.
It inherits a connected socket, and ends when its client is gone.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from burnish.checksum import checksum_of_bytes
from burnish.engine import wire
from burnish.engine.environment import NEEDED
from burnish.engine.protocol import Sleeper
from burnish.errors import BurnishError, EngineError
from burnish.types import Weights

if TYPE_CHECKING:
    from burnish.engine.protocol import Engine, Request

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""torch's names of precisions."""
TAIL = 1 << 20
"""Bytes of a file's end that a fingerprint reads."""


@dataclass(frozen=True)
class Settings:
    """The engine that a process makes."""

    name: str
    """A key of ``MAKERS``."""
    model: str
    """A directory in Hugging Face's layout."""
    precision: str = "fp32"
    device: str = "cpu"
    kv_mb: int = 1024
    max_running: int = 128
    on_update: str = "recompute"
    """Whether samples in flight keep their caches when weights come, or compute them again."""
    threads: int = 1
    fp32_head: bool = False
    sleep: bool = False
    """Whether the engine can give its GPU memory away between rollouts."""


def make_native(given: Settings) -> Engine:
    from burnish import machine

    machine.set_up_torch(given.threads)
    import torch

    from burnish.engine.engine import NativeEngine
    from burnish.engine.scheduler import STEP_TOKENS, EngineSettings
    from burnish.model import checkpoint
    from burnish.model.tokenizer import Tokenizer

    how = {"dtype": getattr(torch, DTYPES[given.precision]), "fp32_head": given.fp32_head}
    model = checkpoint.load(given.model, **how).to(given.device)
    settings = EngineSettings(
        kv_bytes=given.kv_mb * 2**20,
        max_running=given.max_running,
        step_tokens=STEP_TOKENS[given.device.partition(":")[0]],
        on_update="keep" if given.on_update == "keep" else "recompute",
    )
    return NativeEngine(model, Tokenizer.load(given.model), settings)


def make_hf(given: Settings) -> Engine:
    from burnish.engine.hf import HfEngine

    return HfEngine(given)


def make_vllm(given: Settings) -> Engine:
    from burnish.engine.vllm import VllmEngine

    return VllmEngine(given)


MAKERS: dict[str, Callable[[Settings], Engine]] = {
    "native": make_native,
    "hf": make_hf,
    "vllm": make_vllm,
}


def fingerprint(model: str | Path) -> str:
    """Tells model directories apart by their weights: by size, header and end of each file."""
    digest = hashlib.sha256()
    for file in sorted(Path(model).glob("*.safetensors")):
        with file.open("rb") as opened:
            header = opened.read(int.from_bytes(opened.read(8), "little"))
            size = opened.seek(0, os.SEEK_END)
            opened.seek(max(0, size - TAIL))
            digest.update(header + opened.read() + str(size).encode())
    return digest.hexdigest()[:16]


def facts(engine: Engine, given: Settings) -> dict[str, Any]:
    """What a client learns about an engine before its first call."""
    config = json.loads((Path(given.model) / "config.json").read_text())
    package, _ = NEEDED[given.name]
    owner = metadata.packages_distributions()[package][0]
    return {
        "name": given.name,
        "package": f"{package} {metadata.version(owner)}",
        "model": fingerprint(given.model),
        "precision": given.precision,
        "on_update": given.on_update,
        "vocab_size": config["vocab_size"],
        "context": config["max_position_embeddings"],
        "capabilities": asdict(engine.capabilities),
    }


class Service:
    """Answers calls, and keeps the weights that came so far."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._buckets: list[Any] = []
        """Parts of weights that came and are not loaded yet, each in safetensors' layout."""

    def answer(self, told: dict[str, Any], arrays: list[wire.Array]) -> wire.Message:
        engine, call = self.engine, told.pop("call", None)
        if call == "submit":
            engine.submit(_request(told, arrays))
        elif call == "step":
            rows, streams = wire.pack_completions(engine.step())
            return {"completions": rows}, streams
        elif call == "probe":
            return {"probe": engine.probe()}, []
        elif call == "abort":
            engine.abort(told["request_id"])
        elif call == "sleep" and isinstance(engine, Sleeper):
            engine.sleep()
        elif call == "bucket":
            kept = [] if told["first"] else self._buckets
            self._buckets = [*kept, _checked(arrays[0], told["checksum"])]
        elif call == "load":
            engine.load(self._weights(told))
        else:
            raise EngineError(f"there is no call {call!r}; use one burnish on both sides")
        return {}, []

    def _weights(self, told: dict[str, Any]) -> Weights:
        """Of files of shared memory, or of the buckets that came before."""
        from safetensors.torch import load, load_file

        buckets, self._buckets = self._buckets, []
        tensors = {name: t for one in buckets for name, t in load(one.tobytes()).items()}
        for file, wanted in zip(told["files"], told["checksums"], strict=True):
            _checked(np.memmap(file, np.uint8, "r"), wanted)
            tensors |= load_file(file)
        if sorted(tensors) != told["names"]:
            raise EngineError(
                f"{len(tensors)} of {len(told['names'])} tensors of version {told['version']} "
                f"arrived; version {self.engine.version} stays loaded"
            )
        return Weights(told["version"], told["incarnation"], tensors, told["is_partial"])


def _request(told: dict[str, Any], arrays: list[wire.Array]) -> Request:
    try:
        return wire.unpack_request(told, arrays)
    except (LookupError, TypeError, ValueError) as error:
        raise EngineError(
            f"a request was not understood ({error}); use one burnish on both sides"
        ) from None


def _checked(data: Any, wanted: int) -> Any:
    if checksum_of_bytes(data) != wanted:
        raise EngineError(
            "weights did not arrive as they were sent: the checksum differs; the old ones stay"
        )
    return data


def serve(connection: socket.socket, engine: Engine) -> None:
    """Answers calls until the client is gone.

    An error of burnish leaves the engine as it was. Any other exception ends the engine, since
    nobody knows its state: no token ever comes from a mixture of weights. So do bytes that are no
    message, since nobody knows where the next one begins.
    """
    with suppress(OSError):  # the client is gone, or its machine
        _answer_all(connection, engine)


def _answer_all(connection: socket.socket, engine: Engine) -> None:
    service = Service(engine)
    while True:
        try:
            told, arrays = wire.receive(connection)
        except EOFError:
            return
        except ValueError as error:
            wire.send(connection, {"fatal": f"a message was not understood: {error}"})
            return
        answer: wire.Message = {}, []
        try:
            answer = service.answer(told, arrays)
        except BurnishError as error:
            answer[0]["error"] = str(error)
        except Exception as error:
            traceback.print_exc()
            wire.send(connection, {"fatal": f"{type(error).__name__}: {error}"})
            raise
        state = {key: getattr(engine, key) for key in ("version", "unfinished", "sampled")}
        wire.send(connection, answer[0] | {"state": state}, answer[1])


def main(descriptor: int, given: Settings) -> None:
    with socket.socket(fileno=descriptor) as connection:
        try:
            engine = MAKERS[given.name](given)
            wire.send(connection, facts(engine, given))
        except Exception as error:
            traceback.print_exc()
            wire.send(connection, {"fatal": f"{type(error).__name__}: {error}"})
            raise SystemExit(1) from None
        serve(connection, engine)


if __name__ == "__main__":
    main(int(sys.argv[1]), Settings(**json.loads(sys.argv[2])))
