"""How weights travel from the learner to the generators, with a checksum for every tensor.

A ``Parcel`` is small and says where the tensors lie: in itself, so that Ray's object store carries
them, or in a file of shared memory that both processes map.
"""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from burnish.errors import EngineError
from burnish.types import Weights

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
    size: int
    """Bytes of all tensors."""
    data: npt.NDArray[np.uint8] | None = None
    """The tensors' bytes; None if they lie in ``file``."""
    file: str | None = None
    """In shared memory; None if the parcel carries the bytes itself."""


def send(weights: Weights, how: str, folder: str) -> Parcel:
    """Packs weights; ``how`` is "store" or "shared", which writes a file in ``folder``."""
    import torch

    arrays = {
        name: tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        for name, tensor in weights.tensors.items()
    }
    size = sum(_padded(len(array)) for array in arrays.values())
    file = None
    if how == "shared":
        file = f"{folder}/weights-{weights.incarnation}-{weights.version}"
        data = _mapped(file, size)
    else:
        data = np.empty(size, dtype=np.uint8)
    entries, offset = [], 0
    for name, array in arrays.items():
        data[offset : offset + len(array)] = array
        tensor = weights.tensors[name]
        kind = str(tensor.dtype).removeprefix("torch.")
        entries.append(Entry(name, kind, tuple(tensor.shape), offset, checksum(array)))
        offset += _padded(len(array))
    told = weights.version, weights.incarnation, tuple(entries), size
    return Parcel(*told, data=None if file else data, file=file)


@contextmanager
def open_parcel(parcel: Parcel) -> Iterator[Weights]:
    """The weights of a parcel as views of its bytes; raises if a byte differs from what was sent.

    The views must not be used after the block.
    """
    import torch

    data = parcel.data if parcel.file is None else _mapped(parcel.file, parcel.size, new=False)
    assert data is not None
    tensors: dict[str, Any] = {}
    for name, kind, shape, offset, wanted in parcel.entries:
        dtype = getattr(torch, kind)
        length = int(np.prod(shape)) * dtype.itemsize
        array = data[offset : offset + length]
        if checksum(array) != wanted:
            raise EngineError(
                f"weights of version {parcel.version} did not arrive as they were sent: the "
                f"checksum of {name} differs; the old weights stay loaded"
            )
        with warnings.catch_warnings():  # a view of the object store is read-only, and is only read
            warnings.simplefilter("ignore", UserWarning)
            tensors[name] = torch.from_numpy(array).view(dtype).reshape(shape)
    yield Weights(parcel.version, parcel.incarnation, tensors)


def checksum(array: npt.NDArray[np.uint8]) -> int:
    """The sum of an array's bytes as 64-bit words, which wraps around."""
    whole = len(array) // WORD * WORD
    total = int(array[:whole].view(np.uint64).sum(dtype=np.uint64))
    return (total + int.from_bytes(array[whole:].tobytes(), "little")) % 2**64


def _padded(size: int) -> int:
    return -(-size // WORD) * WORD


def _mapped(file: str, size: int, *, new: bool = True) -> npt.NDArray[np.uint8]:
    """A file's bytes as an array that shares its memory."""
    handle = os.open(file, os.O_RDWR | (os.O_CREAT if new else 0), 0o600)
    try:
        if new:
            os.ftruncate(handle, size)
        return np.frombuffer(mmap.mmap(handle, max(size, 1)), dtype=np.uint8)[:size]
    finally:
        os.close(handle)


def discard(parcel: Parcel) -> None:
    """Frees a parcel that nobody will open again."""
    if parcel.file is not None:
        Path(parcel.file).unlink(missing_ok=True)
