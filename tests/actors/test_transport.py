"""Weights arrive as they were sent, or not at all."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from burnish.actors.transport import checksum, discard, open_parcel, send
from burnish.errors import EngineError
from burnish.types import Weights

TENSORS = {
    "a": torch.linspace(-1, 1, 7),
    "half": torch.linspace(-1, 1, 5).bfloat16().reshape(1, 5),
    "one": torch.tensor(3.0),
    "empty": torch.zeros(0, 2),
}


@pytest.mark.parametrize("how", ["store", "shared"])
def test_weights_arrive_bit_for_bit(tmp_path: Path, how: str) -> None:
    parcel = send(Weights(4, 1, TENSORS), how, str(tmp_path))
    with open_parcel(parcel) as weights:
        assert (weights.version, weights.incarnation) == (4, 1)
        assert weights.tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert weights.tensors[name].dtype == tensor.dtype
            assert torch.equal(weights.tensors[name], tensor)
    discard(parcel)
    assert not list(tmp_path.iterdir())


def test_a_torn_tensor_is_refused(tmp_path: Path) -> None:
    parcel = send(Weights(4, 1, TENSORS), "shared", str(tmp_path))
    assert parcel.file is not None
    with Path(parcel.file).open("r+b") as file:
        file.seek(5)
        file.write(b"\x01")
    with pytest.raises(EngineError, match="the checksum of a differs"), open_parcel(parcel):
        pass


def test_checksum_sees_every_byte() -> None:
    array = np.arange(21, dtype=np.uint8)
    for place in range(len(array)):
        other = array.copy()
        other[place] ^= 128
        assert checksum(other) != checksum(array)
