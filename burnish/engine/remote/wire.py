"""Messages between an engine and its client: JSON and raw arrays, never a pickle.

A message consists of two lengths of 8 bytes, a JSON header, and the bytes of its arrays; the header
contains their types and shapes. Every wait has a timeout. Invalid bytes raise ValueError and occupy
no more memory than has arrived.
"""

from __future__ import annotations

import json
import math
import re
import socket
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt

from burnish.engine.protocol import Request
from burnish.randomness import Stream
from burnish.types import Completion, Finish, SamplingParams

Array = npt.NDArray[Any]
Message = tuple[dict[str, Any], list[Array]]
"""A header and its arrays."""
LENGTHS = struct.Struct("<QQ")
LONGEST = 1 << 28
"""Maximum bytes of a header."""
LARGEST = 1 << 38
"""Maximum bytes of a message's arrays."""
AT_ONCE = 4 << 20
"""Maximum bytes that are allocated before any have arrived."""
KIND = re.compile(r"[<>|=]?([iuf][248]|[iub]1)")
"""Pattern of numpy's names of numeric types."""
DIMENSIONS = 32
HELLO_LENGTH = 4096
"""Maximum bytes of a header from a client that is not authenticated."""
HELLO_DEPTH = 4
"""Maximum number of objects and lists in such a header."""
STREAMS = ("token_ids", "logprobs", "versions", "sampled")
"""The arrays of a completion."""
FIELDS = ("sample_index", "finish", "stop", "text")
"""The other fields of a completion that are sent; the client has its sampling parameters."""


def send(
    connection: socket.socket,
    header: dict[str, Any],
    arrays: Sequence[Array] = (),
    seconds: float | None = None,
) -> None:
    """Send a message. Raises TimeoutError if the header or one of the arrays can't be sent within
    ``seconds``, because the receiver does not read; None to wait without limit."""
    connection.settimeout(seconds)
    kinds = [[array.dtype.str, array.shape] for array in arrays]
    text = json.dumps(header | {"arrays": kinds}).encode()
    size = sum(array.nbytes for array in arrays)
    connection.sendall(LENGTHS.pack(len(text), size) + text)
    for array in arrays:
        if array.nbytes:
            connection.sendall(np.ascontiguousarray(array).data.cast("B"))


def receive(connection: socket.socket, seconds: float | None = None) -> Message:
    """Receive the next message; return its header and its arrays.

    Raises TimeoutError if it does not arrive within ``seconds`` (None: no limit), EOFError if the
    sender is gone, and ValueError if the bytes are not a message. After a TimeoutError or
    ValueError the connection can't be used, because a part of the message may have been read.
    """
    end = math.inf if seconds is None else time.monotonic() + seconds
    length, size = LENGTHS.unpack(_read(connection, LENGTHS.size, end))
    if length > LONGEST or size > LARGEST:
        raise ValueError(f"a message of {length} and {size} bytes is too long")
    header = _header(bytes(_read(connection, length, end)))
    kinds = [_kind(given) for given in _listed(header.pop("arrays", None))]
    if sum(dtype.itemsize * math.prod(shape) for dtype, shape in kinds) != size:
        raise ValueError(f"the arrays of a message must have the {size} bytes that it announces")
    body, arrays, offset = _read(connection, size, end), list[Array](), 0
    for dtype, shape in kinds:
        array = np.frombuffer(body, dtype, math.prod(shape), offset).reshape(shape)
        arrays.append(array)
        offset += array.nbytes
    return header, arrays


def hello_length(lengths: bytes) -> int:
    """Return the length of the header of a hello, a client's first message, from the 16 bytes that
    precede the header and contain the message's two lengths. Raises ValueError if the header is too
    long or arrays would follow."""
    length, size = LENGTHS.unpack(lengths)
    if length > HELLO_LENGTH or size:
        raise ValueError(f"a hello of {length} and {size} bytes is too long")
    return int(length)


def hello_token(text: bytes) -> bytes:
    """Return the authentication token from a hello, the first message of a client. ``text`` is the
    JSON header alone, without the two length fields. Raise a ValueError if the header is invalid or
    has no token."""
    if sum(map(text.count, (b"[", b"{"))) > HELLO_DEPTH:
        raise ValueError("a hello must be a flat object")
    token = _header(text).get("token")
    if not isinstance(token, str):
        raise ValueError("a hello must have a token")
    return token.encode()  # a lone surrogate also raises ValueError


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except RecursionError:
        raise ValueError("a message's header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError(f"a message's header must be an object, got {type(header).__name__}")
    return header


def _listed(given: Any) -> list[Any]:
    if not isinstance(given, list):
        raise ValueError("a message's header must list its arrays")
    return given


def _kind(given: Any) -> tuple[np.dtype[Any], list[int]]:
    """Return the type and shape of an array as the header states them. Raises ValueError if they
    are invalid."""
    kind, shape = given if isinstance(given, list) and len(given) == 2 else (None, None)
    if not isinstance(kind, str) or not KIND.fullmatch(kind):
        raise ValueError(f"arrays hold numbers, got {kind!r:.40}")
    lengths = _listed(shape)
    is_sound = all(type(length) is int and 0 <= length <= LARGEST for length in lengths)
    if not is_sound or len(lengths) > DIMENSIONS:
        raise ValueError(f"an array can't have the shape {shape!r:.40}")
    return np.dtype(kind), lengths


def _read(connection: socket.socket, count: int, end: float) -> bytearray:
    """Read ``count`` bytes before the time ``end``. The buffer grows as they arrive, so that a
    false length allocates little."""
    found, got = bytearray(min(count, AT_ONCE)), 0
    while got < count:
        if got == len(found):
            found += bytes(min(count - got, max(got, AT_ONCE)))
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        connection.settimeout(None if math.isinf(left) else left)
        with memoryview(found) as view:
            more = connection.recv_into(view[got:])
        if not more:
            raise EOFError
        got += more
    return found


def pack_request(request: Request) -> Message:
    """Return the header and arrays of a message from which `unpack_request` rebuilds the
    request."""
    header = {
        "request_id": request.request_id,
        "n": request.n,
        "params": asdict(request.params),
        "group": request.group,
        "stream": int(request.stream),
        "first": request.first,
        "turn": request.turn,
        "position": request.position,
        "continues": request.continues,
    }
    begun = [] if request.begun is None else [request.begun]
    rows, streams = pack_completions(begun)
    return header | {"begun": rows}, [np.asarray(request.prompt), *streams]


def unpack_request(header: dict[str, Any], arrays: list[Array]) -> Request:
    """Rebuild a request from its message. Raises ValueError, KeyError, TypeError or IndexError if
    the message is not a request."""
    given = header["params"]
    tuples = {name: tuple(given[name]) for name in ("stop", "stop_ids", "turn_temperatures")}
    params = SamplingParams(**given | tuples)
    begun = unpack_completions(header["begun"], arrays[1:], lambda name: params)
    prompt = arrays[0]
    if prompt.ndim != 1 or prompt.dtype.kind not in "iu":
        raise ValueError(
            f"a prompt must be a row of token ids, got {prompt.dtype} of {prompt.shape}"
        )
    return Request(
        str(header["request_id"]),
        prompt,
        header["n"],
        params,
        header["group"],
        Stream(header["stream"]),
        begun=begun[0] if begun else None,
        first=header["first"],
        turn=header["turn"],
        position=header["position"],
        continues=header["continues"],
    )


def pack_completions(completions: Sequence[Completion]) -> tuple[list[Any], list[Array]]:
    """Return one row of JSON fields per completion, and the arrays `STREAMS`, each concatenated
    over all completions; two empty lists if there are no completions."""
    rows = [
        [c.request_id, len(c.token_ids), *(getattr(c, name) for name in FIELDS)]
        for c in completions
    ]
    if not rows:
        return [], []
    return rows, [np.concatenate([getattr(c, name) for c in completions]) for name in STREAMS]


def unpack_completions(
    rows: list[Any], arrays: list[Array], params_of: Callable[[str], SamplingParams]
) -> list[Completion]:
    """Rebuild completions from the rows and arrays of `pack_completions`. ``params_of`` returns a
    request's sampling parameters, which are not sent, by the request's id."""
    found, start = [], 0
    for name, length, sample, finish, stop, text in rows:
        ids, logprobs, versions, sampled = (x[start : start + length].copy() for x in arrays)
        own = ids, logprobs, versions, sampled, params_of(name)
        found.append(Completion(name, sample, *own, Finish(finish), stop, text))
        start += length
    return found
