"""Sharded checkpoints: a directory of safetensors files, which several ranks write, and a JSON
index.

Each rank writes its boxes, the blocks of tensors that it holds. For each tensor, the index has the
whole shape and the file, entry and position of each box. A reader assembles a tensor, or a part of
it, from the boxes that overlap with it, so a single process or another mesh can load a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from operator import add, lt, sub
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.machine.folders import fsync
from burnish.model.tensor_files import write_tensors

if TYPE_CHECKING:
    from torch import Tensor

MAIN = "main.safetensors"
"""File with the tensors that are not sharded and the checkpoint's metadata."""
INDEX = "index.json"


def write_shards(
    folder: Path, rank: int, pieces: Mapping[str, Sequence[tuple[Any, Any, Tensor]]]
) -> None:
    """Write the boxes (blocks of tensors) that a rank holds to the rank's file in ``folder``, and
    flush the file to disk.

    ``pieces`` has, by the name of the tensor, a list of boxes, each as (shape of the whole tensor,
    index of the box's first element, the box itself).
    """
    tensors, places = {}, {}
    for name, boxes in pieces.items():
        for number, (shape, at, box) in enumerate(boxes):
            tensors[f"{name}#{number}"] = box.detach().cpu().contiguous().clone()
            places[f"{name}#{number}"] = {
                "shape": list(shape),
                "at": list(at),
                "size": list(box.shape),
            }
    file = folder / f"rank-{rank:05d}.safetensors"
    write_tensors(tensors, file, {"places": json.dumps(places)})
    fsync(file)


def write_index(folder: Path) -> None:
    """Write the index of the boxes in the files of all ranks, which `Shards` reads. Call it after
    all ranks have written their files (`write_shards`)."""
    from safetensors import safe_open

    index: dict[str, Any] = {}
    for file in sorted(folder.glob("rank-*.safetensors")):
        with safe_open(file, "numpy") as opened:
            places = json.loads(opened.metadata()["places"])
        for entry, place in places.items():
            found = index.setdefault(
                entry.rpartition("#")[0], {"shape": place["shape"], "boxes": []}
            )
            found["boxes"].append(
                {"file": file.name, "entry": entry, "at": place["at"], "size": place["size"]}
            )
    (folder / INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")
    fsync(folder / INDEX)


class Shards(Mapping[str, Any]):
    """Mapping from names to the whole tensors of a sharded checkpoint, which are read on access. A
    pickle of it contains no tensors, only the path of the directory and the index."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._folder = folder
        self._index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        self.bytes_read = 0
        """Bytes of tensors read so far."""
        with safe_open(folder / MAIN, "numpy") as file:
            self._main = set(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name in self._main:
            return self._read(MAIN, name)
        shape = self._index[name]["shape"]
        return self.part(name, [0] * len(shape), shape)

    def part(self, name: str, at: Sequence[int], size: Sequence[int]) -> Tensor:
        """Read the part of a tensor that begins at index ``at`` and has the shape ``size``, and
        nothing else of the tensor. The tensor must be sharded: not in `MAIN`."""
        import torch

        found: Tensor | None = None
        for box in self._index[name]["boxes"]:
            start, held = box["at"], box.get("size") or self._size(box)
            low = list(map(max, start, at))
            high = list(map(min, map(add, start, held), map(add, at, size)))
            if all(map(lt, low, high)):
                taken = tuple(map(slice, map(sub, low, start), map(sub, high, start)))
                tensor = self._read(box["file"], box["entry"], taken)
                if found is None:
                    found = torch.empty(list(size), dtype=tensor.dtype)
                found[tuple(map(slice, map(sub, low, at), map(sub, high, at)))] = tensor
        assert found is not None, "the boxes of a tensor cover all of it"
        return found

    def _size(self, box: Mapping[str, Any]) -> list[int]:
        """Read the size of a box from its file, because the indices of earlier versions lack it."""
        from safetensors import safe_open

        with safe_open(self._folder / box["file"], "numpy") as opened:
            size: list[int] = opened.get_slice(box["entry"]).get_shape()
        return size

    def _read(self, file: str, entry: str, part: tuple[slice, ...] | None = None) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._folder / file, "torch") as opened:
            tensor: Tensor = opened.get_slice(entry)[part] if part else opened.get_tensor(entry)
        self.bytes_read += tensor.nbytes
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter([*self._index, *self._main])

    def __len__(self) -> int:
        return len(self._index) + len(self._main)
