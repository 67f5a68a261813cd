"""How weights travel from the learner to the generators, with a checksum for every tensor.

A ``Parcel`` is small and says where the tensors lie: in itself, so that Ray's object store carries
them, or in a file of shared memory that both processes map. Memory that a process has not touched
before is slow, so both sides keep what they have mapped and use it again.
"""

from __future__ import annotations

import mmap
import tempfile
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from burnish.errors import EngineError
from burnish.types import Weights

if TYPE_CHECKING:
    from torch import Tensor

WORD = 8
"""Bytes; tensors begin at multiples of it."""


class Entry(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Bytes from the beginning."""
    checksum: int


class Parcel(NamedTuple):
    version: int
    incarnation: int
    entries: tuple[Entry, ...]
    data: npt.NDArray[np.uint8] | None = None
    """The tensors' bytes; None if they lie in ``file``."""
    file: str | None = None
    """In shared memory; None if the parcel carries the bytes itself."""


class Sender:
    def __init__(self, how: str, folder: str) -> None:
        """``how`` is "store" or "shared", which writes files in ``folder``."""
        self._how, self._folder = how, folder
        self._mapped: dict[str | None, Tensor] = {}
        """The bytes of each file; those of no file for parcels that carry them."""

    def send(self, weights: Weights, in_use: Collection[str] = ()) -> Parcel:
        """Packs weights; the files ``in_use`` are left as they are.

        The bytes of a parcel without a file are good until the next one is sent.
        """
        import torch

        sizes = {name: _padded(t.numel() * t.itemsize) for name, t in weights.tensors.items()}
        file, space = self._space(sum(sizes.values()), in_use)
        entries, offset = [], 0
        for name, tensor in weights.tensors.items():
            place = space[offset : offset + sizes[name]]
            place[tensor.numel() * tensor.itemsize :] = 0
            own = place[: tensor.numel() * tensor.itemsize].view(tensor.dtype)
            own.copy_(tensor.detach().reshape(-1))
            kind = str(tensor.dtype).removeprefix("torch.")
            entries.append(Entry(name, kind, tuple(tensor.shape), offset, checksum(place)))
            offset += sizes[name]
        told = weights.version, weights.incarnation, tuple(entries)
        assert space.dtype == torch.uint8
        return Parcel(*told, data=None if file else space.numpy(), file=file)

    def _space(self, size: int, in_use: Collection[str]) -> tuple[str | None, Tensor]:
        import torch

        if self._how == "store":
            if None not in self._mapped or len(self._mapped[None]) != size:
                self._mapped[None] = torch.empty(size, dtype=torch.uint8)
            return None, self._mapped[None]
        for file, space in self._mapped.items():
            if file is not None and file not in in_use and len(space) == size:
                return file, space
        with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as made:
            made.truncate(max(size, 1))
        new = made.name
        self._mapped[new] = _mapped(new)[:size]
        return new, self._mapped[new]


class Receiver:
    def __init__(self) -> None:
        self._mapped: dict[str, Tensor] = {}

    @contextmanager
    def opened(self, parcel: Parcel) -> Iterator[Weights]:
        """The weights of a parcel as views of its bytes; raises if a byte differs from what was
        sent. The views must not be used after the block."""
        import torch

        if parcel.file is None:
            with warnings.catch_warnings():  # the object store is read-only, and is only read
                warnings.simplefilter("ignore", UserWarning)
                space = torch.from_numpy(parcel.data)
        else:
            if parcel.file not in self._mapped:
                self._mapped[parcel.file] = _mapped(parcel.file)
            space = self._mapped[parcel.file]
        tensors: dict[str, Any] = {}
        for name, kind, shape, offset, wanted in parcel.entries:
            dtype = getattr(torch, kind)
            length = int(np.prod(shape)) * dtype.itemsize
            if checksum(space[offset : offset + _padded(length)]) != wanted:
                raise EngineError(
                    f"weights of version {parcel.version} did not arrive as they were sent: the "
                    f"checksum of {name} differs; the old weights stay loaded"
                )
            tensors[name] = space[offset : offset + length].view(dtype).reshape(shape)
        yield Weights(parcel.version, parcel.incarnation, tensors)


def checksum(space: Tensor) -> int:
    """The sum of bytes, a multiple of 8, as 64-bit words, which wraps around."""
    import torch

    return int(space.view(torch.int64).sum())


def discard(parcel: Parcel) -> None:
    """Removes the file of a parcel that nobody will open again."""
    if parcel.file is not None:
        Path(parcel.file).unlink(missing_ok=True)


def _padded(size: int) -> int:
    return -(-size // WORD) * WORD


def _mapped(file: str) -> Tensor:
    """A file's bytes, which share its memory."""
    import torch

    with open(file, "r+b") as opened:
        return torch.frombuffer(mmap.mmap(opened.fileno(), 0), dtype=torch.uint8)
