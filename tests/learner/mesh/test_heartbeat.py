"""A rank that dies or fails is named by all others, which stop; calls reach every rank."""

import dataclasses
import math
import os
import signal
import time
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from burnish.errors import ActorError, BurnishError
from burnish.learner import watch
from burnish.learner.learner import State
from burnish.loops.conductor import Channel, Conductor, make
from burnish.rollout.packing import pack
from burnish.runs import checkpoints
from tests.learner.conftest import make_groups, make_learn_batch
from tests.learner.gang import run_ranks
from tests.learner.test_mesh import WHITENED, both, take_steps


def open_channel(rank):
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    watching = watch.Watch(dist.PrefixStore("burnish", store), rank, dist.get_world_size())
    watching.start()
    return Channel(dist.new_group(backend="gloo"), watching, "cpu")


def check_death(rank):
    """Rank 2 is killed while rank 0 is in a collective and rank 1 waits for a call.

    Rank 1 looks around less often, so rank 0, which keeps the store, has to wait for it.
    """
    if rank == 1:
        watch.BEAT_S = 1.5
    channel = open_channel(rank)
    dist.barrier()
    time.sleep(3.5)  # until everyone has seen everyone
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(ActorError, match=r"rank 2 \(process \d+ on .*\) died; all ranks stop"):
        channel.call(dist.barrier) if rank == 0 else channel.call(channel.receive)
    assert time.monotonic() - began < 10
    os._exit(0)  # the groups can't be taken apart without rank 2


def test_all_ranks_name_a_rank_that_was_killed():
    run_ranks(3, check_death, exits=[0, 0, -signal.SIGKILL])


def check_failure(rank):
    """Rank 1 runs out of something alone, and the others wait for it in a collective."""
    channel = open_channel(rank)
    dist.barrier()

    def fail():
        raise RuntimeError("out of memory")

    with pytest.raises(ActorError, match="out of memory; all ranks stop") as told:
        channel.call(fail if rank == 1 else dist.barrier)
    assert rank == 1 or "rank 1" in str(told.value)
    os._exit(0)


@pytest.mark.slow
def test_all_ranks_name_a_rank_that_failed():
    run_ranks(3, check_failure, exits=[0, 0, 0])


def check_conductor(rank, folder):
    """Rank 0 calls, all ranks compute; a checkpoint of one mesh is loaded by another, and the step
    after it is that of one process. An error of all ranks leaves them ready for the next call."""
    channel = open_channel(rank)
    settings = {"log_kl": True, "max_skipped": 1}
    for sizes in ((1, 2, 1), (1, 1, 2)):
        alone, learner = both(sizes, "llama", torch.float64, WHITENED, **settings)
        if rank:
            follow_once(learner, learner.ranks, channel)
            continue
        conductor = Conductor(learner, learner.ranks, channel)
        if (path := checkpoints.latest(folder)) is not None:
            tensors, state = checkpoints.load(path)
            assert not any("#" in name for name in tensors)
            for one in (alone, conductor):
                one.load_state(State(tensors, state["learner"]))
            assert conductor.version == 2
            assert conductor.policy.probe() == pytest.approx(alone.policy.probe(), abs=1e-10)
        take_steps(alone, conductor, 1, torch.float64)
        batch = pack(make_groups())
        bad = make_learn_batch(alone, batch)
        bad = dataclasses.replace(bad, advantages=bad.advantages * math.nan)
        conductor.score(batch)
        with pytest.raises(BurnishError, match="not finite"):
            conductor.step(bad)
        conductor.finish()
        tensors, numbers = conductor.state()
        assert tensors == {}
        state = {"learner": numbers | {"skipped_in_a_row": 0}}
        checkpoints.save(folder, conductor.version, {}, state, write=conductor.write)
        conductor._call("close")


def follow_once(learner, mesh, channel):
    """As `follow`, and the groups stay."""
    name = ""
    while name != "close":
        name, args = channel.call(channel.receive)
        with suppress(BurnishError):
            channel.call(make, learner, mesh, name, args)


def test_a_checkpoint_of_one_mesh_goes_on_on_another(tmp_path):
    run_ranks(2, check_conductor, tmp_path)
    assert len(checkpoints.all_of(tmp_path)) == 2
    assert [file.name for file in checkpoints.latest(tmp_path).iterdir()] != []
