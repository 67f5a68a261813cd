"""A run on the ranks that torchrun starts: rank 0 leads, and the other ranks follow it.

Rank 0 has the task, the engine and the run directory. Every rank has a part of the learner.
"""

from __future__ import annotations

import os
import signal
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from burnish.errors import ConfigError, RunError
from burnish.launch.resolve import Resolved, resolve
from burnish.machine import hardware
from burnish.recipe.load import flatten, recipe_to_toml, with_steps
from burnish.recipe.mesh import MeshConfig
from burnish.recipe.recipe import Recipe
from burnish.recipe.runtime import AnyRuntime, LocalRuntime
from burnish.runs.resuming import differences

if TYPE_CHECKING:
    from burnish.learner.learner import LocalLearner
    from burnish.learner.mesh.mesh import Mesh
    from burnish.learner.mesh.mesh_learner import Channel, MeshLearner
    from burnish.loops.recorder import RunComponents
    from burnish.types import Measured


class Meeting:
    """The rendezvous of ranks that torchrun has not started: it hosts the key-value store at which
    they find each other, and has their environment variables. The process that starts the ranks
    keeps it open."""

    def __init__(self, ranks: int, address: str) -> None:
        """``address`` is an address of this machine that all ranks can reach."""
        self.place = {
            "MASTER_ADDR": address,
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0",
            "TORCHELASTIC_RUN_ID": "burnish",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        """Environment variables of each rank, with the names that torchrun uses."""
        self.renew()

    def renew(self) -> None:
        """Open a new store before all ranks start or restart, because the previous store still
        contains the addresses of dead ranks."""
        from torch._C._distributed_c10d import TCPStore

        address = self.place["MASTER_ADDR"]
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self.place["MASTER_PORT"] = str(self._store.port)


IDLE = timedelta(days=30)
"""Timeout of a rank's wait for its next call. Heartbeats detect dead ranks much earlier."""


def is_started() -> bool:
    """Return whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """Return this process's rank; 0 if no ranks were started."""
    return int(os.environ.get("RANK", "0"))


def start(ranks: int, arguments: Sequence[str]) -> NoReturn:
    """Replace this process by a torchrun that runs burnish with the same arguments on ``ranks``
    ranks of this machine."""
    how = ["--standalone", f"--nproc-per-node={ranks}", "-m", "burnish"]
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *how, *arguments])


def is_follower(runtime: AnyRuntime, mesh: MeshConfig, arguments: Sequence[str]) -> bool:
    """Return whether this process is a rank other than rank 0, which has to follow rank 0.

    If the runtime is torchrun and this process was not started by it, the process is replaced by a
    torchrun that starts the ranks. Raises a ConfigError if the number of ranks or the runtime does
    not fit the recipe.
    """
    if runtime.name == "torchrun" and not is_started():
        start(mesh.ranks, arguments)
    if runtime.name != "torchrun" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"torchrun has started {os.environ['WORLD_SIZE']} ranks, and with runtime.name = "
            f"'{runtime.name}' each of them would be a separate run; use 'torchrun'"
        )
    if runtime.name == "torchrun":
        check_ranks(mesh)  # before torch is loaded
    return is_started() and rank() > 0


def threads(runtime: AnyRuntime) -> int | None:
    """Return the number of threads that this process should use. With the runtime torchrun, it is
    ``runtime.threads`` or, if that is not set, the number of cores divided by the ranks on this
    machine. With other runtimes it is None: the process may use all cores."""
    if runtime.name != "torchrun":
        return None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return runtime.threads or max(1, hardware.cores() // ranks)


def check_ranks(mesh: MeshConfig) -> None:
    """Raise a ConfigError unless torchrun has started as many ranks as the mesh has."""
    if not is_started():
        raise ConfigError(
            "runtime.name = 'torchrun' needs ranks; start them with: torchrun "
            f"--nproc-per-node {mesh.ranks} -m burnish train …"
        )
    found = int(os.environ["WORLD_SIZE"])
    if found != mesh.ranks:
        raise ConfigError(
            f"the mesh has {mesh.ranks} ranks ({mesh}), and torchrun has started {found}; set "
            f"{_mesh_settings(found)}, or start {mesh.ranks}"
        )


def _mesh_settings(ranks: int) -> str:
    """Return text for an error message: mesh settings that need ``ranks`` ranks."""
    found = [f"mesh.shard = {ranks}", f"mesh.replicate = {ranks}"]
    found += [f"mesh.shard = {ranks // 2} with mesh.tensor = 2"] * (ranks % 2 == 0 and ranks > 2)
    return " or ".join(found)


def build_on_ranks(resolved: Resolved) -> RunComponents:
    """Build the components of a run on rank 0, with a learner that all ranks run together. The
    other ranks run `follow`."""
    if rank() > 0:
        raise ConfigError(
            f"rank {rank()} runs a script that calls burnish, and only rank 0 may start a run; "
            "start the ranks with: torchrun … -m burnish train RECIPE --reward FILE.py:NAME"
        )
    from burnish.launch import local

    channel = join(resolved)
    made: list[MeshLearner] = []

    def make(own: Resolved) -> MeshLearner:
        made.append(conduct(own, channel))
        return made[0]

    try:
        parts = local.build_local(resolved, make)
    except BaseException as error:
        channel.heartbeat.fail(error)  # the other ranks wait for rank 0's learner
        raise
    close = parts.close

    def leave() -> None:
        close()
        made[0].close()

    return parts._replace(close=leave, shards=made[0].write_shards)


def conduct(resolved: Resolved, channel: Channel | None = None) -> MeshLearner:
    """Build the learner on rank 0, while the other ranks build their parts in `follow`, and return
    the learner through which rank 0 drives all ranks. The number of steps, which can depend on the
    data, is sent to the other ranks first. ``channel`` is the connection to the other ranks; None
    to connect now."""
    from burnish.learner.mesh.mesh_learner import MeshLearner

    channel = channel or join(resolved)
    channel.send(resolved.recipe.train.steps)
    learner, mesh = channel.call(_learner, resolved)
    return MeshLearner(learner, mesh, channel)


def obey(recipe: Recipe) -> None:
    """Run `follow` with SIGINT and SIGTERM ignored, because rank 0 decides when the run stops."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    follow(recipe, threads(recipe.runtime))


def follow(recipe: Recipe, count: int | None) -> None:
    """Build this rank's part of the learner, and run rank 0's calls on it until rank 0 closes the
    learner. ``count`` is the number of threads; None for one per core."""
    from burnish.learner.mesh.mesh_learner import follow_rank_zero

    resolved = resolve(recipe, checks=False, threads=count)
    channel = join(resolved)
    recipe = with_steps(resolved.recipe, channel.call(channel.receive))
    learner, mesh = channel.call(_learner, replace(resolved, recipe=recipe))
    follow_rank_zero(learner, mesh, channel)


def join(resolved: Resolved) -> Channel:
    """Create the process group of all ranks and start this rank's heartbeat; return the channel
    from rank 0 to the others. Raise a RunError if the ranks have different recipes."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    from burnish.learner.mesh.heartbeat import Heartbeat
    from burnish.learner.mesh.mesh_learner import Channel

    recipe, device = resolved.recipe, resolved.device
    check_ranks(recipe.mesh)
    assert not isinstance(recipe.runtime, LocalRuntime), "a mesh has ranks"
    on_gpu = device != "cpu"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deadline = timedelta(seconds=recipe.runtime.deadline)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=deadline)
    count, port = dist.get_world_size(), int(os.environ["MASTER_PORT"])
    store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=deadline)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    heartbeat = Heartbeat(PrefixStore(f"burnish/{attempt}", store), rank(), count)
    heartbeat.start()
    recipes: list[str] = [""] * count
    dist.all_gather_object(recipes, recipe_to_toml(recipe))
    if others := [number for number in range(count) if recipes[number] != recipes[0]]:
        first, other = (tomllib.loads(recipes[number]) for number in (0, others[0]))
        heartbeat.end()
        raise RunError(
            f"the recipes of ranks 0 and {others[0]} differ "
            f"({differences(flatten(first), flatten(other))}); "
            "start all ranks with one command line"
        )
    return Channel(dist.new_group(backend="gloo", timeout=IDLE), heartbeat, device)


def _learner(resolved: Resolved) -> tuple[LocalLearner[Measured], Mesh]:
    from burnish.launch import local
    from burnish.learner.mesh.mesh import Mesh

    own = resolved.recipe.mesh
    kinds = own.model_dump(include={"gather", "offload"})
    mesh = Mesh(own.sizes, resolved.source.shape, resolved.device, **kinds)
    return local.build_policy_learner(resolved, mesh), mesh
