"""How weights travel from the learner to the generators, with a checksum for every tensor.

A ``Parcel`` is small and says how the tensors lie in a space: a file of shared memory that both
processes map, or a buffer of the sender whose bytes travel beside the parcel (``Sender.data``).
Memory that a process has not touched before is slow, so spaces are used again.
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

from burnish.checksum import WORD, checksum
from burnish.errors import EngineError
from burnish.types import Weights

FILE = "weights-"
"""How the names of files begin."""


class Entry(NamedTuple):
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning."""
    checksum: int


class Parcel(NamedTuple):
    version: int
    incarnation: int
    entries: tuple[Entry, ...]
    space: str
    """Names the memory that holds the bytes; a file if they are shared."""
    probe: tuple[float, ...] = ()
    """Log-probabilities of fixed tokens as the sender's model gives them; empty if there is no
    model."""
    is_partial: bool = False
    """See ``Weights``."""
    is_file: bool = False
    """Whether the space is a file in shared memory."""


class Sender:
    def __init__(self, how: str, folder: str) -> None:
        """``how`` names the transport; "shared" writes files in ``folder``, and memory of its own
        where they have no room."""
        self._how, self._folder = how, folder
        self._spaces: dict[str, Tensor] = {}
        self._files: set[str] = set()

    def send(self, weights: Weights, in_use: Collection[str] = ()) -> Parcel:
        """Packs weights; the spaces ``in_use`` are left as they are."""
        sizes = {name: _padded(t.numel() * t.itemsize) for name, t in weights.tensors.items()}
        device = next(iter(weights.tensors.values())).device
        space, memory = self._space(sum(sizes.values()), device, in_use)
        entries, offset = [], 0
        for name, tensor in weights.tensors.items():
            place, length = memory[offset : offset + sizes[name]], tensor.numel() * tensor.itemsize
            place[:length].view(tensor.dtype).copy_(tensor.detach().reshape(-1))
            shape = tuple(tensor.shape)
            found = _checksum(place[:length], name, tensor.dtype, shape)
            entries.append(Entry(name, tensor.dtype, shape, offset, found))
            offset += sizes[name]
        sent = weights.version, weights.incarnation, tuple(entries), space
        is_file = space in self._files
        return Parcel(*sent, is_partial=weights.is_partial, is_file=is_file)

    def data(self, space: str) -> Any:
        """The bytes of a space in the form in which they travel beside their parcel."""
        memory = self._spaces[space]
        if self._how == "ipc":
            return reduce_tensor(memory)  # type: ignore[no-untyped-call]
        if space in self._files:
            return None
        return memory.numpy() if self._how in ("store", "shared") else memory

    def _space(self, size: int, device: Any, in_use: Collection[str]) -> tuple[str, Tensor]:
        for space, memory in self._spaces.items():
            if space not in in_use and len(memory) == size:
                return space, memory
        space = str(Path(self._folder, f"{FILE}{uuid4().hex}"))
        if self._how == "shared" and _is_made(space, max(size, 1)):
            self._spaces[space] = _mapped(space)[:size]
            self._files.add(space)
        else:
            where = {"nccl": "cuda", "ipc": "cuda", "nixl": device}.get(self._how, "cpu")
            self._spaces[space] = torch.empty(size, dtype=torch.uint8, device=where)
        return space, self._spaces[space]


class Receiver:
    def __init__(self) -> None:
        self._mapped: dict[str, Tensor] = {}
        """The memory of senders that this process maps, too."""

    @contextmanager
    def opened(self, parcel: Parcel, data: Any = None) -> Iterator[Weights]:
        """The weights of a parcel as views of its bytes; raises if a byte differs from what was
        sent. The views must not be used after the block."""
        memory, tensors = self._memory(parcel.space, data), dict[str, Any]()
        for name, dtype, shape, offset, wanted in parcel.entries:
            length = int(np.prod(shape)) * dtype.itemsize
            if _checksum(memory[offset : offset + length], name, dtype, shape) != wanted:
                raise EngineError(
                    f"weights of version {parcel.version} did not arrive as they were sent: the "
                    f"checksum of {name} differs; the old weights stay loaded"
                )
            tensors[name] = memory[offset : offset + length].view(dtype).reshape(shape)
        yield Weights(parcel.version, parcel.incarnation, tensors, parcel.is_partial)

    def _memory(self, space: str, data: Any) -> Tensor:
        if isinstance(data, torch.Tensor):
            return data
        if isinstance(data, np.ndarray):
            with warnings.catch_warnings():  # the object store is read-only, and is only read
                warnings.simplefilter("ignore", UserWarning)
                return torch.from_numpy(data)
        if space not in self._mapped:
            self._mapped[space] = _mapped(space) if data is None else data[0](*data[1])
        return self._mapped[space]


def _checksum(place: Tensor, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    return checksum(place, f"{name} {dtype} {shape}")


def discard(parcel: Parcel) -> None:
    """Removes the file of a parcel that nobody will open again, if it has one."""
    if parcel.is_file:
        Path(parcel.space).unlink(missing_ok=True)


def discard_others(folder: str, in_use: Collection[str]) -> None:
    """Removes the files of a sender that has died, except the spaces ``in_use``."""
    for file in Path(folder).glob(f"{FILE}*"):
        if str(file) not in in_use:
            file.unlink(missing_ok=True)


def _padded(size: int) -> int:
    """Tensors begin at multiples of a word."""
    return -(-size // WORD) * WORD


def _is_made(file: str, size: int) -> bool:
    """Makes a file if there is room for it: a process that writes to a file of shared memory beyond
    the room is killed."""
    try:
        with open(file, "wb") as made:
            os.posix_fallocate(made.fileno(), 0, size)
    except OSError as error:
        Path(file).unlink(missing_ok=True)
        if error.errno != errno.ENOSPC:
            raise
        return False
    return True


def _mapped(file: str) -> Tensor:
    """A file's bytes, which share its memory."""
    with open(file, "r+b") as opened:
        return torch.frombuffer(mmap.mmap(opened.fileno(), 0), dtype=torch.uint8)
