"""Weights go from a mesh to engines a parameter at a time, and no rank has them whole."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from burnish.actors.transport import Receiver, Sender
from burnish.engine.native.engine import NativeEngine
from burnish.engine.remote import client
from burnish.engine.settings import EngineSettings
from burnish.errors import EngineError
from burnish.learner.mesh.mesh_learner import MeshLearner
from burnish.learner.ranks import local
from burnish.model.transformer import Transformer
from burnish.types import Weights
from tests.learner.gang import run_ranks
from tests.learner.mesh.test_heartbeat import open_channel
from tests.learner.mesh.test_mesh import FAMILIES, both
from tests.learner.mesh.test_mesh_learner import follow_once


class Counted:
    """Counts the bytes of whole parameters that are alive in this process."""

    def __init__(self, mesh):
        self._gather, self._made = mesh.gather, []
        self.peak, self.names = 0, set()
        mesh.gather = self.gather

    def gather(self, policy, precision, name):
        whole = self._gather(policy, precision, name)
        storage, own = whole.untyped_storage(), local(policy.get_parameter(name)).untyped_storage()
        if storage.data_ptr() != own.data_ptr():  # a rank that has all of it gathers nothing
            self._made.append((StorageWeakRef(storage), storage.nbytes()))
        self.peak = max(self.peak, sum(size for ref, size in self._made if not ref.expired()))
        self.names.add(name)
        return whole


def check_buckets(rank, sizes, folder):
    channel = open_channel(rank)
    shape = FAMILIES["qwen3"]
    alone, learner = both(sizes, "qwen3", torch.float32)
    counted = Counted(learner.ranks)
    largest = max(p.nbytes for p in alone.policy.parameters())
    whole = sum(p.nbytes for p in alone.policy.parameters())
    assert 3 * largest < 0.75 * whole, "or the last line could not fail"
    client.BUCKET = largest // 2
    if rank:
        follow_once(learner, learner.ranks, channel)
    else:
        mesh_learner = MeshLearner(learner, learner.ranks, channel)
        mesh_learner.incarnation = 1
        check_takers(mesh_learner, Transformer(shape).init_weights(7), folder)
        assert len(mesh_learner.weights().tensors) == len(alone.weights().tensors)
        mesh_learner._call("close")
    assert counted.names == {name for name, _ in learner.policy.named_parameters()}
    # A bucket, the parameter that it waits for, and the one before, of which a view is in it.
    assert 0 < counted.peak <= 3 * largest


def check_takers(mesh_learner, other, folder):
    """The engine of this process, shared memory for generators, and an engine elsewhere take the
    weights; an engine that refuses them is as it was."""
    engine = NativeEngine(other, None, EngineSettings(kv_bytes=1 << 20))
    before, weights = engine.probe(), mesh_learner.weights()
    broken = Weights(1, 1, {name: weights.tensors[name] for name in list(weights.tensors)[:1]})
    with pytest.raises(EngineError, match="version 0 stays loaded"):
        engine.load(broken)
    assert engine.probe() == before
    del broken
    engine.load(mesh_learner.weights())
    assert engine.probe() == pytest.approx(mesh_learner.probe(), abs=1e-5)
    parcel = Sender("shared", str(folder)).send(mesh_learner.weights())
    with Receiver().opened(parcel) as found:
        check_same(found.tensors, mesh_learner)
    sent = {}
    for bucket in client.buckets(mesh_learner.weights().tensors):
        sent |= {name: tensor.clone() for name, tensor in bucket.items()}
    check_same(sent, mesh_learner)


def check_same(found, mesh_learner):
    wanted = mesh_learner.weights().tensors
    assert list(found) == list(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [(1, 2, 1), (1, 1, 2)], ids=str)
def test_no_rank_holds_the_whole_weights(sizes, tmp_path):
    run_ranks(2, check_buckets, sizes, tmp_path)
