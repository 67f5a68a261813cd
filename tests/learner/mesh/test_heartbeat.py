"""If a rank dies or fails, all other ranks stop and name it."""

import os
import signal
import time

import pytest
import torch.distributed as dist

from burnish.errors import ActorError
from burnish.learner.mesh import heartbeat
from burnish.learner.mesh.mesh_learner import Channel
from tests.learner.gang import run_ranks


def open_channel(rank):
    port = int(os.environ["MASTER_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    watching = heartbeat.Heartbeat(dist.PrefixStore("burnish", store), rank, dist.get_world_size())
    watching.start()
    return Channel(dist.new_group(backend="gloo"), watching, "cpu")


def check_death(rank):
    """Rank 2 is killed while rank 0 is in a collective and rank 1 waits for a call.

    Rank 1 looks around less often, so rank 0, which keeps the store, has to wait for it.
    """
    if rank == 1:
        heartbeat.BEAT_S = 1.5
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
