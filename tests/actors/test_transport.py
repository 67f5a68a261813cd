"""Weights arrive as they were sent, or not at all."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish.actors.transport import Entry, Receiver, Sender, discard
from burnish.errors import EngineError
from burnish.launch.ray import make_generator, make_learner
from burnish.model.attention import causal
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe.load import load_recipe
from burnish.types import Weights

TENSORS = {
    "a": torch.linspace(-1, 1, 7),
    "half": torch.linspace(-1, 1, 5).bfloat16().reshape(1, 5),
    "one": torch.tensor(3.0),
    "empty": torch.zeros(0, 2),
}


@pytest.mark.parametrize("how", ["store", "shared", "gloo"])
def test_weights_arrive_bit_for_bit(tmp_path: Path, how: str) -> None:
    sender = Sender(how, str(tmp_path))
    handle = sender.send(Weights(4, 1, TENSORS))
    with Receiver().opened(handle, sender.data(handle.buffer)) as weights:
        assert (weights.version, weights.incarnation) == (4, 1)
        assert weights.tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert weights.tensors[name].dtype == tensor.dtype
            assert torch.equal(weights.tensors[name], tensor)
    discard(handle)
    assert not list(tmp_path.iterdir())


def test_a_torn_tensor_is_refused(tmp_path: Path) -> None:
    handle = Sender("shared", str(tmp_path)).send(Weights(4, 1, TENSORS))
    with Path(handle.buffer).open("r+b") as file:
        file.seek(5)
        file.write(b"\x01")
    with (
        pytest.raises(EngineError, match="the checksum of a differs"),
        Receiver().opened(handle),
    ):
        pass


def test_a_file_is_used_again_once_nobody_needs_it(tmp_path: Path) -> None:
    sender, receiver = Sender("shared", str(tmp_path)), Receiver()
    first = sender.send(Weights(1, 0, TENSORS))
    second = sender.send(Weights(2, 0, TENSORS), in_use=[first.buffer])
    assert second.buffer != first.buffer
    changed = TENSORS | {"a": TENSORS["a"] + 1}
    third = sender.send(Weights(3, 0, changed), in_use=[second.buffer])
    assert third.buffer == first.buffer
    with receiver.opened(third) as weights:
        assert torch.equal(weights.tensors["a"], changed["a"])
    with pytest.raises(EngineError), receiver.opened(first):
        pass


ROWS = {"w": torch.arange(12.0).reshape(3, 4), "v": torch.arange(12.0, 24.0).reshape(3, 4)}


@pytest.mark.parametrize("how", ["store", "shared"])
def test_mixed_up_weights_are_refused(tmp_path: Path, how: str) -> None:
    """Rows, words and tensors that changed places have the same sum, and others in them."""
    sender = Sender(how, str(tmp_path))
    handle = sender.send(Weights(4, 1, ROWS))
    memory = sender._buffers[handle.buffer]
    whole = memory.clone()
    for kind, i, j in (("rows", 0, 1), ("words", 2, 3), ("tensors", 0, 1)):
        size = {"rows": 16, "words": 8, "tensors": 48}[kind]
        places = memory.view(-1, size)
        places[[i, j]] = places[[j, i]]
        with (
            pytest.raises(EngineError, match="the checksum of w differs"),
            Receiver().opened(handle, sender.data(handle.buffer)),
        ):
            pass
        memory.copy_(whole)
    with Receiver().opened(handle, sender.data(handle.buffer)) as weights:
        assert torch.equal(weights.tensors["v"], ROWS["v"])


@pytest.mark.parametrize(
    "change", [{"name": "u"}, {"dtype": torch.int32}, {"shape": (4, 3)}, {"shape": (2, 4)}]
)
def test_another_name_type_or_shape_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    sender = Sender("store", str(tmp_path))
    handle = sender.send(Weights(4, 1, ROWS))
    first: Entry = handle.entries[0]._replace(**change)
    other = handle._replace(entries=(first, *handle.entries[1:]))
    with (
        pytest.raises(EngineError, match=r"checksum of \w differs"),
        Receiver().opened(other, sender.data(handle.buffer)),
    ):
        pass


def test_the_probe_stops_stale_weights(tmp_path: Path) -> None:
    """Older tensors with the right checksums under a newer version."""
    recipe = load_recipe("sort", [])
    learner, generator = make_learner(recipe, "shared", str(tmp_path)), make_generator(recipe)
    old = learner.weights(0, [])
    generator.sample(old, None, [])
    with torch.no_grad():
        learner.learner.policy.embedding.mul_(1.01)
    new = learner.weights(0, [old.buffer])
    stale = old._replace(version=1, probe=new.probe)
    with pytest.raises(EngineError, match=r"loaded as version 1 are stale or incomplete.*\(-.*\(-"):
        generator.sample(stale, None, [])
    generator.sample(new._replace(version=1), None, [])


def test_engine_and_learner_give_the_same_probe() -> None:
    shape = ModelConfig(vocab_size=50, n_layers=2, d_model=16, n_heads=2, d_ff=32, context=8)
    model = Transformer(shape).init_weights(0)
    found = model.probe()
    assert len(found) == 8
    tokens = torch.arange(8) * 7919 % 50
    logits = model.logits(model(tokens, torch.arange(8), causal([8])))
    np.testing.assert_allclose(found, logits[-1].log_softmax(-1)[tokens].tolist(), atol=1e-6)


def test_weights_travel_though_shared_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that was free at the start may be taken later; writing to it would end the process."""

    def full(*given: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sender, receiver = Sender("shared", str(tmp_path)), Receiver()
    first = sender.send(Weights(1, 0, {"a": torch.arange(5.0)}))
    monkeypatch.setattr(os, "posix_fallocate", full)
    second = sender.send(Weights(2, 0, {"a": torch.arange(6.0)}), in_use=[first.buffer])
    assert (first.is_file, second.is_file) == (True, False)
    for handle, wanted in ((first, 5), (second, 6)):
        with receiver.opened(handle, sender.data(handle.buffer)) as weights:
            assert torch.equal(weights.tensors["a"], torch.arange(float(wanted)))
        discard(handle)
    assert list(tmp_path.iterdir()) == []
