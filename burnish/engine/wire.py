"""Messages between an engine and its client: JSON and raw arrays, never a pickle.

A message is two lengths of 8 bytes, a header in JSON, and the bytes of its arrays one after the
other; the header says their types and shapes. Every wait for bytes has an end.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from burnish.checksum import checksum_of_bytes as checksum  # noqa: F401
from burnish.draws import Stream
from burnish.engine.protocol import Request
from burnish.types import Completion, Finish, SamplingParams

Array = npt.NDArray[Any]
Message = tuple[dict[str, Any], list[Array]]
"""A header and its arrays."""
LENGTHS = struct.Struct("<QQ")
LONGEST = 1 << 28
"""Bytes of a header."""
LARGEST = 1 << 38
"""Bytes of a message's arrays."""
STREAMS = ("token_ids", "logprobs", "versions", "sampled")
"""The arrays of a completion."""
TOLD = ("sample_index", "finish", "stop", "text")
"""The rest of a completion that travels; the client knows its sampling settings."""


def send(
    connection: socket.socket,
    header: dict[str, Any],
    arrays: Sequence[Array] = (),
    seconds: float | None = None,
) -> None:
    """Raises TimeoutError if the other side does not take the message within ``seconds``."""
    connection.settimeout(seconds)
    kinds = [[array.dtype.str, array.shape] for array in arrays]
    text = json.dumps(header | {"arrays": kinds}).encode()
    size = sum(array.nbytes for array in arrays)
    connection.sendall(LENGTHS.pack(len(text), size) + text)
    for array in arrays:
        if array.nbytes:
            connection.sendall(np.ascontiguousarray(array).data.cast("B"))


def receive(
    connection: socket.socket, seconds: float | None = None, longest: int = LONGEST
) -> Message:
    """The next message.

    Raises TimeoutError if it is not there after ``seconds``, EOFError if the other side is gone,
    and ValueError if it is no message of this kind.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    length, size = LENGTHS.unpack(_read(connection, LENGTHS.size, end))
    if length > longest or size > (LARGEST if longest == LONGEST else 0):
        raise ValueError(f"a message of {length} and {size} bytes is too long")
    header = json.loads(bytes(_read(connection, length, end)))
    body, arrays, offset = _read(connection, size, end), list[Array](), 0
    for kind, shape in header.pop("arrays"):
        dtype = np.dtype(kind)
        if dtype.kind not in "iufb":
            raise ValueError(f"arrays hold numbers, got {kind!r}")
        array = np.frombuffer(body, dtype, math.prod(shape), offset).reshape(shape)
        arrays.append(array)
        offset += array.nbytes
    return header, arrays


def _read(connection: socket.socket, count: int, end: float) -> bytearray:
    found, got = bytearray(count), 0
    view = memoryview(found)
    while got < count:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(None if math.isinf(left) else left)
        more = connection.recv_into(view[got:])
        if not more:
            raise EOFError
        got += more
    return found


def pack_request(request: Request) -> Message:
    header = {
        "request_id": request.request_id,
        "n": request.n,
        "params": asdict(request.params),
        "group": request.group,
        "stream": int(request.stream),
        "first": request.first,
    }
    begun = [] if request.begun is None else [request.begun]
    rows, streams = pack_completions(begun)
    return header | {"begun": rows}, [np.asarray(request.prompt), *streams]


def unpack_request(header: dict[str, Any], arrays: list[Array]) -> Request:
    given = header["params"]
    params = SamplingParams(
        **given | {"stop": tuple(given["stop"]), "stop_ids": tuple(given["stop_ids"])}
    )
    begun = unpack_completions(header["begun"], arrays[1:], lambda name: params)
    return Request(
        header["request_id"],
        arrays[0],
        header["n"],
        params,
        header["group"],
        Stream(header["stream"]),
        begun[0] if begun else None,
        header["first"],
    )


def pack_completions(completions: Sequence[Completion]) -> tuple[list[Any], list[Array]]:
    """A row for each, and the four streams of all of them."""
    rows = [
        [c.request_id, len(c.token_ids), *(getattr(c, name) for name in TOLD)] for c in completions
    ]
    if not rows:
        return [], []
    return rows, [np.concatenate([getattr(c, name) for c in completions]) for name in STREAMS]


def unpack_completions(
    rows: list[Any], arrays: list[Array], params_of: Callable[[str], SamplingParams]
) -> list[Completion]:
    found, start = [], 0
    for name, length, sample, finish, stop, text in rows:
        ids, logprobs, versions, sampled = (x[start : start + length].copy() for x in arrays)
        own = ids, logprobs, versions, sampled, params_of(name)
        found.append(Completion(name, sample, *own, Finish(finish), stop, text))
        start += length
    return found
