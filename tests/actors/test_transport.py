"""Weights arrive as they were sent, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from burnish.actors.transport import Receiver, Sender, checksum, discard
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
    parcel = Sender(how, str(tmp_path)).send(Weights(4, 1, TENSORS))
    with Receiver().opened(parcel) as weights:
        assert (weights.version, weights.incarnation) == (4, 1)
        assert weights.tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert weights.tensors[name].dtype == tensor.dtype
            assert torch.equal(weights.tensors[name], tensor)
    discard(parcel)
    assert not list(tmp_path.iterdir())


def test_a_torn_tensor_is_refused(tmp_path: Path) -> None:
    parcel = Sender("shared", str(tmp_path)).send(Weights(4, 1, TENSORS))
    assert parcel.file is not None
    with Path(parcel.file).open("r+b") as file:
        file.seek(5)
        file.write(b"\x01")
    with (
        pytest.raises(EngineError, match="the checksum of a differs"),
        Receiver().opened(parcel),
    ):
        pass


def test_a_file_is_used_again_once_nobody_needs_it(tmp_path: Path) -> None:
    sender, receiver = Sender("shared", str(tmp_path)), Receiver()
    first = sender.send(Weights(1, 0, TENSORS))
    assert first.file is not None
    second = sender.send(Weights(2, 0, TENSORS), in_use=[first.file])
    assert second.file != first.file
    changed = TENSORS | {"a": TENSORS["a"] + 1}
    third = sender.send(Weights(3, 0, changed), in_use=[second.file])
    assert third.file == first.file
    with receiver.opened(third) as weights:
        assert torch.equal(weights.tensors["a"], changed["a"])
    with pytest.raises(EngineError), receiver.opened(first):
        pass


def test_checksum_sees_every_byte() -> None:
    space = torch.arange(24, dtype=torch.uint8)
    for place in range(len(space)):
        other = space.clone()
        other[place] ^= 128
        assert checksum(other) != checksum(space)
