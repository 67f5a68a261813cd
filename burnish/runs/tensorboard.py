"""Scalars as TensorBoard reads them, without TensorBoard.

A file of events is a series of TFRecords: length, crc of the length, payload, crc of the payload,
where a crc is CRC-32C, rotated and offset. A payload is a protobuf ``Event``: wall_time = 1
(double), step = 2 (varint), file_version = 3 (string), summary = 5; a ``Summary`` holds value = 1,
each with tag = 1 (string) and simple_value = 2 (float).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

from burnish.runs.directory import EVENTS, RunDirectory


def append_scalars(
    run: RunDirectory, step: int, scalars: Mapping[str, float], *, wall_time: float
) -> None:
    """One event that holds a step's scalars; ``wall_time`` is in seconds since 1970."""
    if not (run.path / EVENTS).exists():
        run.append(EVENTS, record(_double(1, wall_time) + _bytes(3, b"brain.Event:2")))
    run.append(EVENTS, record(event(step, scalars, wall_time)))


def event(step: int, scalars: Mapping[str, float], wall_time: float) -> bytes:
    values = b"".join(
        _bytes(1, _bytes(1, tag.encode()) + _key(2, 5) + struct.pack("<f", _float32(value)))
        for tag, value in scalars.items()
    )
    return _double(1, wall_time) + _key(2, 0) + _varint(step) + _bytes(5, values)


def record(payload: bytes) -> bytes:
    length = struct.pack("<Q", len(payload))
    return length + _masked_crc(length) + payload + _masked_crc(payload)


def crc32c(data: bytes) -> int:
    """The Castagnoli checksum, bits reflected."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_remainder, range(256)))


def _masked_crc(data: bytes) -> bytes:
    crc = crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _float32(value: float) -> float:
    """What float32 can't hold becomes infinite, as it would in a tensor."""
    limit = 3.4028235677973366e38
    return float("inf") if value >= limit else float("-inf") if value <= -limit else value


def _key(field: int, wire_type: int) -> bytes:
    return bytes([field << 3 | wire_type])


def _double(field: int, value: float) -> bytes:
    return _key(field, 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _key(field, 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    """Seven bits at a time, the lowest first; negative numbers as 64 bits of two's complement."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
