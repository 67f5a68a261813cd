"""How weights travel from the learner to the generators, with a checksum for every tensor.

A ``WeightsHandle`` is a small record that describes tensors in a buffer: their names, dtypes,
shapes and offsets. The buffer is a shared-memory file that both processes map, or memory of the
sender whose bytes are sent separately (``Sender.data``). The first access to new memory is slow, so
buffers are reused.
"""

from __future__ import annotations

import errno
import mmap
import os
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from burnish.errors import EngineError
from burnish.model.checksum import WORD, checksum
from burnish.types import Weights

PREFIX = "weights-"
"""Prefix of the names of shared-memory files."""


class Entry(NamedTuple):
    """Describes one tensor in a buffer."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the start of the buffer."""
    checksum: int


class WeightsHandle(NamedTuple):
    """Describes weights in a buffer, without their bytes."""

    version: int
    incarnation: int
    entries: tuple[Entry, ...]
    buffer: str
    """Name of the buffer that holds the bytes; the path of the file if ``is_file``."""
    probe: tuple[float, ...] = ()
    """Log-probabilities of fixed tokens under the sender's model; empty if the sender has no
    model."""
    is_partial: bool = False
    """See ``Weights``."""
    is_file: bool = False
    """Whether the buffer is a shared-memory file."""


class Sender:
    """Copies weights into buffers that other processes can read, and describes them in handles."""

    def __init__(self, transport: str, folder: str) -> None:
        """``transport`` is the name of the weight transport. "shared" creates files in ``folder``,
        and falls back to private memory if shared memory is full."""
        self._transport, self._folder = transport, folder
        self._buffers: dict[str, Tensor] = {}
        self._files: set[str] = set()

    def send(self, weights: Weights, in_use: Collection[str] = ()) -> WeightsHandle:
        """Copy weights, at least one tensor, into a buffer, and return a handle that describes
        them. ``in_use``: names of buffers that must not be overwritten because a receiver may still
        read them; any other buffer of the same size is reused."""
        sizes = {name: _padded(t.numel() * t.itemsize) for name, t in weights.tensors.items()}
        device = next(iter(weights.tensors.values())).device
        buffer, memory = self._reserve(sum(sizes.values()), device, in_use)
        entries, offset = [], 0
        for name, tensor in weights.tensors.items():
            place, length = memory[offset : offset + sizes[name]], tensor.numel() * tensor.itemsize
            place[:length].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
            shape = tuple(tensor.shape)
            found = _checksum(place[:length], name, tensor.dtype, shape)
            entries.append(Entry(name, tensor.dtype, shape, offset, found))
            offset += sizes[name]
        is_file = buffer in self._files
        return WeightsHandle(
            weights.version,
            weights.incarnation,
            tuple(entries),
            buffer,
            is_partial=weights.is_partial,
            is_file=is_file,
        )

    def data(self, buffer: str) -> Any:
        """Return the content of a buffer, given by its name (``WeightsHandle.buffer``), in the form
        that the transport sends: a tensor, an array, or a CUDA IPC handle. Return None if the
        buffer is a shared-memory file, which the receiver maps itself."""
        memory = self._buffers[buffer]
        if self._transport == "ipc":
            return reduce_tensor(memory)  # type: ignore[no-untyped-call]
        if buffer in self._files:
            return None
        return memory.numpy() if self._transport in ("store", "shared") else memory

    def _reserve(self, size: int, device: Any, in_use: Collection[str]) -> tuple[str, Tensor]:
        """Return the name and the memory of a buffer with ``size`` bytes: an existing buffer of
        this size that is not ``in_use``, or else a new one."""
        for buffer, memory in self._buffers.items():
            if buffer not in in_use and len(memory) == size:
                return buffer, memory
        buffer = str(Path(self._folder, f"{PREFIX}{uuid4().hex}"))
        if self._transport == "shared" and _create_file(buffer, max(size, 1)):
            self._buffers[buffer] = _map_file(buffer)[:size]
            self._files.add(buffer)
        else:
            where = {"nccl": "cuda", "ipc": "cuda", "nixl": device}.get(self._transport, "cpu")
            self._buffers[buffer] = torch.empty(size, dtype=torch.uint8, device=where)
        return buffer, self._buffers[buffer]


class Receiver:
    """Reads weights from a sender's buffers and verifies their checksums."""

    def __init__(self) -> None:
        self._mapped: dict[str, Tensor] = {}
        """Buffers of senders that this process has mapped, by name."""

    @contextmanager
    def opened(self, handle: WeightsHandle, data: Any = None) -> Iterator[Weights]:
        """Yield the weights of a handle, as views of the buffer that are valid only inside the
        block. ``data`` is the result of ``Sender.data`` for the handle's buffer. Raise an
        EngineError if a tensor's checksum differs from the sender's."""
        memory, tensors = self._memory(handle.buffer, data), dict[str, Any]()
        for name, dtype, shape, offset, expected in handle.entries:
            length = int(np.prod(shape)) * dtype.itemsize
            if _checksum(memory[offset : offset + length], name, dtype, shape) != expected:
                raise EngineError(
                    f"weights of version {handle.version} were corrupted on the way: the "
                    f"checksum of {name} differs; the old weights stay loaded"
                )
            tensors[name] = memory[offset : offset + length].view(dtype).reshape(shape)
        yield Weights(handle.version, handle.incarnation, tensors, handle.is_partial)

    def _memory(self, buffer: str, data: Any) -> Tensor:
        if isinstance(data, torch.Tensor):
            return data
        if isinstance(data, np.ndarray):
            with warnings.catch_warnings():  # the object store is read-only; nothing writes to it
                warnings.simplefilter("ignore", UserWarning)
                return torch.from_numpy(data)
        if buffer not in self._mapped:
            self._mapped[buffer] = _map_file(buffer) if data is None else data[0](*data[1])
        return self._mapped[buffer]


def _checksum(place: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return checksum(place, f"{name} {dtype} {shape}")


def discard(handle: WeightsHandle) -> None:
    """Remove the shared-memory file of a handle; do nothing if its buffer is not a file. Nobody may
    open the handle afterwards."""
    if handle.is_file:
        Path(handle.buffer).unlink(missing_ok=True)


def discard_stale_files(folder: str, in_use: Collection[str]) -> None:
    """Remove the shared-memory files of weights in ``folder``, which a sender that has died has
    left there, except files whose paths are ``in_use``."""
    for file in Path(folder).glob(f"{PREFIX}*"):
        if str(file) not in in_use:
            file.unlink(missing_ok=True)


def _padded(size: int) -> int:
    """Return ``size`` rounded up to whole words, because tensors start at word boundaries."""
    return -(-size // WORD) * WORD


def _create_file(file: str, size: int) -> bool:
    """Create a file of ``size`` bytes; return True, or False if there is not enough room.

    Its memory is allocated at once: a process that writes to a mapped file when shared memory is
    full is killed.
    """
    try:
        with open(file, "wb") as made:
            os.posix_fallocate(made.fileno(), 0, size)
    except OSError as error:
        Path(file).unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


def _map_file(file: str) -> Tensor:
    """Map a file into memory; return its bytes as a tensor that shares this memory."""
    with open(file, "r+b") as opened:
        return torch.frombuffer(mmap.mmap(opened.fileno(), 0), dtype=torch.uint8)
