"""Checkpoints that several ranks write: a directory of safetensors files with a JSON index.

Each rank writes the boxes of tensors that it has. The index names, for each tensor, its whole shape
and the file, the entry and the place of each box. So a reader need not know the ranks: it puts a
tensor together when it is asked for, and one process or another mesh can go on from it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
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
            places[f"{name}#{number}"] = {"shape": list(shape), "at": list(at)}
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
            found["boxes"].append({"file": file.name, "entry": entry, "at": place["at"]})
    (folder / INDEX).write_text(json.dumps(index) + "\n", encoding="utf-8")
    fsync(folder / INDEX)


class Shards(Mapping[str, Any]):
    """The tensors of such a checkpoint, each read when it is asked for. It can be pickled: the
    directory travels, not the tensors."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self._folder = folder
        self._index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        with safe_open(folder / MAIN, "numpy") as file:
            self._main = set(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        import torch

        if name in self._main:
            return self._read(MAIN, name)
        whole: Tensor | None = None
        for box in self._index[name]["boxes"]:
            part = self._read(box["file"], box["entry"])
            if whole is None:
                whole = torch.empty(self._index[name]["shape"], dtype=part.dtype)
            ends = (a + size for a, size in zip(box["at"], part.shape, strict=True))
            whole[tuple(map(slice, box["at"], ends))] = part
        assert whole is not None, "write makes an entry with a box"
        return whole

    def _read(self, file: str, entry: str) -> Tensor:
        from safetensors import safe_open

        with safe_open(self._folder / file, "torch") as opened:
            tensor: Tensor = opened.get_tensor(entry)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter([*self._index, *self._main])

    def __len__(self) -> int:
        return len(self._index) + len(self._main)
