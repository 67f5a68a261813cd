"""Processes that run a function together, as the ranks of a gloo group."""

import multiprocessing
import os
import socket
import traceback
from datetime import timedelta
from unittest import mock

PRELOADED = ["burnish.learner.mesh.mesh", "burnish.learner.learner", "tests.learner.conftest"]


def run_ranks(count, function, *args, deadline=120.0, exits=None):
    """Calls ``function(rank, *args)`` in so many processes; the first error of a rank is raised.

    ``exits`` are the exit codes of ranks that are to end in another way; None if all end well.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    errors = context.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ranks = [
        context.Process(target=_run, args=(rank, count, port, errors, function, args), daemon=True)
        for rank in range(count)
    ]
    # Ranks compute on the CPU. The fork server that starts with the first one must not see a GPU:
    # a library that looks for it would leave CUDA unusable in every forked process.
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        for rank in ranks:
            rank.start()
    for rank in ranks:
        rank.join(deadline)
    stuck = [number for number, rank in enumerate(ranks) if rank.is_alive()]
    for rank in ranks:
        rank.kill()
    if not errors.empty():
        raise AssertionError(errors.get())
    assert not stuck, f"ranks {stuck} did not end"
    assert [rank.exitcode for rank in ranks] == (exits or [0] * count)


def _run(rank, count, port, errors, function, args):
    import torch
    import torch.distributed as dist

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", rank=rank, world_size=count, timeout=timedelta(seconds=30))
        function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        errors.put(f"rank {rank}:\n{traceback.format_exc()}")
        raise
