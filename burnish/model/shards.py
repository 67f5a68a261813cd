"""Checkpoints that several ranks write: a directory of safetensors files with a JSON index.

Each rank writes the boxes of tensors that it has. The index names, for each tensor, its whole shape
and the file, the entry and the place of each box. So a reader need not know the ranks that wrote:
it puts a tensor, or the part of it that it is asked for, together from the boxes that overlap with
it, and one process or another mesh can go on from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from operator import add, lt, sub
from pathlib import Path
from typing import TYPE_CHECKING, Any

from burnish.runs.directory import fsync

if TYPE_CHECKING:
    from torch import Tensor

MAIN = "main.safetensors"
"""Tensors that belong to no rank, and the checkpoint's metadata."""
INDEX = "index.json"


def write(folder: Path, rank: int, pieces: Mapping[str, Sequence[tuple[Any, Any, Tensor]]]) -> None:
    """Writes a rank's boxes: (whole shape, place, box) of each tensor."""
    from safetensors.torch import save_file

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
    save_file(tensors, file, {"places": json.dumps(places)})
    fsync(file)


def write_index(folder: Path) -> None:
    """Writes the index of the files that all ranks have written."""
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
    """The tensors of such a checkpoint, each read when it is asked for. It can be pickled: the
    directory travels, not the tensors."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._folder = folder
        self._index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        self.bytes_read = 0
        """Bytes of tensors that were read so far."""
        with safe_open(folder / MAIN, "numpy") as file:
            self._main = set(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name in self._main:
            return self._read(MAIN, name)
        shape = self._index[name]["shape"]
        return self.part(name, [0] * len(shape), shape)

    def part(self, name: str, at: Sequence[int], size: Sequence[int]) -> Tensor:
        """The box of a rank's tensor that begins ``at`` and has this size; no more is read."""
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
        assert found is not None, "every number of a tensor is in a box"
        return found

    def _size(self, box: Mapping[str, Any]) -> list[int]:
        """The size of a box; an index that an earlier version wrote does not have it."""
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
