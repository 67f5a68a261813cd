"""Weights arrive as they were sent, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish import config
from burnish.actors.transport import Entry, Receiver, Sender, discard
from burnish.errors import ConfigError, EngineError
from burnish.model.attention import causal
from burnish.model.transformer import ModelConfig, Transformer
from burnish.sizes import settled
from burnish.strategy import RuntimeConfig
from burnish.types import Weights

pytest.importorskip("ray", reason="the extra 'ray' is not installed")
from burnish.actors import cluster
from burnish.distribute import make_generator, make_learner

TENSORS = {
    "a": torch.linspace(-1, 1, 7),
    "half": torch.linspace(-1, 1, 5).bfloat16().reshape(1, 5),
    "one": torch.tensor(3.0),
    "empty": torch.zeros(0, 2),
}


@pytest.mark.parametrize("how", ["store", "shared", "gloo"])
def test_weights_arrive_bit_for_bit(tmp_path: Path, how: str) -> None:
    sender = Sender(how, str(tmp_path))
    parcel = sender.send(Weights(4, 1, TENSORS))
    with Receiver().opened(parcel, sender.data(parcel.space)) as weights:
        assert (weights.version, weights.incarnation) == (4, 1)
        assert weights.tensors.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert weights.tensors[name].dtype == tensor.dtype
            assert torch.equal(weights.tensors[name], tensor)
    discard(parcel)
    assert not list(tmp_path.iterdir())


def test_a_torn_tensor_is_refused(tmp_path: Path) -> None:
    parcel = Sender("shared", str(tmp_path)).send(Weights(4, 1, TENSORS))
    with Path(parcel.space).open("r+b") as file:
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
    second = sender.send(Weights(2, 0, TENSORS), in_use=[first.space])
    assert second.space != first.space
    changed = TENSORS | {"a": TENSORS["a"] + 1}
    third = sender.send(Weights(3, 0, changed), in_use=[second.space])
    assert third.space == first.space
    with receiver.opened(third) as weights:
        assert torch.equal(weights.tensors["a"], changed["a"])
    with pytest.raises(EngineError), receiver.opened(first):
        pass


ROWS = {"w": torch.arange(12.0).reshape(3, 4), "v": torch.arange(12.0, 24.0).reshape(3, 4)}


@pytest.mark.parametrize("how", ["store", "shared"])
def test_mixed_up_weights_are_refused(tmp_path: Path, how: str) -> None:
    """Rows, words and tensors that changed places have the same sum, and others in them."""
    sender = Sender(how, str(tmp_path))
    parcel = sender.send(Weights(4, 1, ROWS))
    memory = sender._spaces[parcel.space]
    whole = memory.clone()
    for kind, i, j in (("rows", 0, 1), ("words", 2, 3), ("tensors", 0, 1)):
        size = {"rows": 16, "words": 8, "tensors": 48}[kind]
        places = memory.view(-1, size)
        places[[i, j]] = places[[j, i]]
        with (
            pytest.raises(EngineError, match="the checksum of w differs"),
            Receiver().opened(parcel, sender.data(parcel.space)),
        ):
            pass
        memory.copy_(whole)
    with Receiver().opened(parcel, sender.data(parcel.space)) as weights:
        assert torch.equal(weights.tensors["v"], ROWS["v"])


@pytest.mark.parametrize(
    "change", [{"name": "u"}, {"dtype": torch.int32}, {"shape": (4, 3)}, {"shape": (2, 4)}]
)
def test_another_name_type_or_shape_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    sender = Sender("store", str(tmp_path))
    parcel = sender.send(Weights(4, 1, ROWS))
    first: Entry = parcel.entries[0]._replace(**change)
    other = parcel._replace(entries=(first, *parcel.entries[1:]))
    with (
        pytest.raises(EngineError, match=r"checksum of \w differs"),
        Receiver().opened(other, sender.data(parcel.space)),
    ):
        pass


def test_the_probe_stops_stale_weights(tmp_path: Path) -> None:
    """Older tensors with the right checksums under a newer version."""
    recipe = settled(config.load("sort", []))
    learner, generator = make_learner(recipe, "shared", str(tmp_path)), make_generator(recipe)
    old = learner.weights(0, [])
    generator.sample(old, None, [])
    with torch.no_grad():
        learner.learner.policy.embedding.mul_(1.01)
    new = learner.weights(0, [old.space])
    stale = old._replace(version=1, probe=new.probe)
    with pytest.raises(EngineError, match=r"loaded as version 1 are stale or torn.*\(-.*\(-"):
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


@pytest.mark.parametrize(
    ("settings", "device", "chosen"),
    [
        ({}, "cpu", "shared"),
        ({}, "cuda", "shared"),
        ({"address": "auto"}, "cpu", "nixl"),
        ({"transport": "gloo"}, "cpu", "gloo"),
        ({"transport": "ipc"}, "cuda", "ipc"),
    ],
)
def test_choosing_a_transport(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], device: str, chosen: str
) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: name)
    assert cluster.choose(RuntimeConfig(**settings), device)[0] == chosen


@pytest.mark.parametrize(
    ("how", "device", "told"),
    [
        ("nccl", "cpu", "torch finds none; use 'shared'"),
        ("ipc", "cpu", "torch finds none; use 'shared'"),
        ("nccl", "cuda", "two actors on one GPU; set gpus = 1"),
        ("nixl", "cpu", "pip install nixl"),
    ],
)
def test_a_transport_that_can_not_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, how: Any, device: str, told: str
) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"runtime.transport = '{how}'.*{told}.*'auto'"):
        cluster.choose(RuntimeConfig(transport=how), device)
    assert cluster.choose(RuntimeConfig(address="auto"), "cpu")[0] == "store"
