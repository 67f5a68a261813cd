"""Calls of a mesh's learner reach every rank, and its checkpoints fit every mesh."""

import dataclasses
import math
from contextlib import suppress

import pytest
import torch

from burnish.errors import BurnishError
from burnish.learner.mesh.mesh_learner import MeshLearner, run_call
from burnish.learner.protocol import LearnerState
from burnish.rollout.packing import pack
from burnish.runs import checkpoints
from tests.learner.conftest import make_groups, make_learn_batch
from tests.learner.gang import run_ranks
from tests.learner.mesh.test_heartbeat import open_channel
from tests.learner.mesh.test_mesh import WHITENED, both, take_steps


def check_mesh_learner(rank, folder):
    """Rank 0 calls and all ranks compute. Another mesh loads the checkpoint of the first mesh, and
    its next step equals that of one process. After an error on all ranks, they accept further
    calls."""
    channel = open_channel(rank)
    settings = {"log_kl": True, "max_skipped": 1}
    for sizes in ((1, 2, 1), (1, 1, 2)):
        alone, learner = both(sizes, "llama", torch.float64, WHITENED, **settings)
        if rank:
            follow_once(learner, learner.ranks, channel)
            continue
        mesh_learner = MeshLearner(learner, learner.ranks, channel)
        if (path := checkpoints.latest(folder)) is not None:
            tensors, state = checkpoints.load_checkpoint(path)
            assert not any("#" in name for name in tensors)
            for one in (alone, mesh_learner):
                one.load_state(LearnerState(tensors, state["learner"]))
            assert mesh_learner.version == 2
            assert mesh_learner.probe() == pytest.approx(alone.policy.probe(), abs=1e-10)
        take_steps(alone, mesh_learner, 1, torch.float64)
        batch = pack(make_groups())
        bad = make_learn_batch(alone, batch)
        bad = dataclasses.replace(bad, advantages=bad.advantages * math.nan)
        mesh_learner.score(batch)
        with pytest.raises(BurnishError, match="not finite"):
            mesh_learner.step(bad)
        mesh_learner.finish()
        tensors, numbers = mesh_learner.state()
        assert tensors == {}
        state = {"learner": numbers | {"skipped_in_a_row": 0}}
        checkpoints.save_checkpoint(
            folder, mesh_learner.version, {}, state, write=mesh_learner.write_shards
        )
        mesh_learner._call("close")


def follow_once(learner, mesh, channel):
    """Like `follow_rank_zero`, but the process groups stay open."""
    name = ""
    while name != "close":
        name, args = channel.call(channel.receive)
        with suppress(BurnishError):
            channel.call(run_call, learner, mesh, name, args)


@pytest.mark.slow
def test_a_checkpoint_of_one_mesh_goes_on_on_another(tmp_path):
    run_ranks(2, check_mesh_learner, tmp_path)
    assert len(checkpoints.list_checkpoints(tmp_path)) == 2
    assert [file.name for file in checkpoints.latest(tmp_path).iterdir()] != []
