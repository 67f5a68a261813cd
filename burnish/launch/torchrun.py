"""A run on the ranks that torchrun starts: rank 0 conducts, the others follow.

Rank 0 has the task, the engine and the run directory. Every rank has its part of the learner.
"""

from __future__ import annotations

import os
import signal
import sys
import tomllib
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn

from burnish import config, machine
from burnish.errors import ConfigError
from burnish.runs.resuming import differences
from burnish.schema.mesh import shapes
from burnish.schema.recipe import Recipe

if TYPE_CHECKING:
    from burnish.learner.learner import Learner
    from burnish.learner.parallel import Mesh
    from burnish.loops.conductor import Channel, Conductor
    from burnish.loops.recorder import Parts


class Meeting:
    """A place where ranks meet that torchrun has not started; whoever starts them keeps it."""

    def __init__(self, ranks: int, address: str) -> None:
        """``address`` is one of this machine's."""
        self.place = {
            "MASTER_ADDR": address,
            "WORLD_SIZE": str(ranks),
            "LOCAL_RANK": "0",
            "TORCHELASTIC_RUN_ID": "burnish",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        """The environment of each rank, as torchrun gives it."""
        self.renew()

    def renew(self) -> None:
        """All ranks start, perhaps again: the addresses of dead ranks stay in their store, so each
        time has its own."""
        from torch._C._distributed_c10d import TCPStore

        address = self.place["MASTER_ADDR"]
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
        self.place["MASTER_PORT"] = str(self._store.port)


IDLE = timedelta(days=30)
"""How long a rank waits for its next call; ranks that are gone are found by their watch."""


def is_started() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def start(recipe: Recipe, arguments: Sequence[str]) -> NoReturn:
    """Becomes a torchrun that runs this command line on as many ranks as the mesh has."""
    how = ["--standalone", f"--nproc-per-node={recipe.mesh.ranks}", "-m", "burnish"]
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *how, *arguments])


def is_follower(recipe: Recipe, arguments: Sequence[str]) -> bool:
    """Whether this process is a rank beside rank 0. A command that needs ranks and was not started
    by torchrun becomes a torchrun that starts them."""
    if recipe.runtime.name == "torchrun" and not is_started():
        start(recipe, arguments)
    if recipe.runtime.name != "torchrun" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError(
            f"torchrun has started {os.environ['WORLD_SIZE']} ranks, and with runtime.name = "
            f"'{recipe.runtime.name}' each of them would be a run of its own; use 'torchrun'"
        )
    if recipe.runtime.name == "torchrun":
        check_ranks(recipe)  # before anyone loads torch
    return is_started() and rank() > 0


def threads(recipe: Recipe) -> int | None:
    """Threads of this process; None if it may use all cores."""
    if recipe.runtime.name != "torchrun":
        return None
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return recipe.runtime.threads or max(1, machine.cores() // ranks)


def check_ranks(recipe: Recipe) -> None:
    """Raises unless torchrun has started as many ranks as the mesh has."""
    if not is_started():
        raise ConfigError(
            "runtime.name = 'torchrun' needs ranks; start them with: torchrun "
            f"--nproc-per-node {recipe.mesh.ranks} -m burnish train …"
        )
    found = int(os.environ["WORLD_SIZE"])
    if found != recipe.mesh.ranks:
        raise ConfigError(
            f"the mesh has {recipe.mesh.ranks} ranks ({recipe.mesh}), and torchrun has started "
            f"{found}; set {shapes(found)}, or start {recipe.mesh.ranks}"
        )


def build(recipe: Recipe) -> Parts:
    """The parts of rank 0's run; `follow` answers to it on the other ranks."""
    if rank() > 0:
        raise ConfigError(
            f"rank {rank()} runs a script that calls burnish itself, and only rank 0 conducts a "
            "run; start the ranks with: torchrun … -m burnish train RECIPE --reward FILE.py:NAME"
        )
    from burnish import build as local

    channel = join(recipe)
    made: list[Conductor] = []

    def make(own: Recipe) -> Conductor:
        made.append(conduct(own, channel))
        return made[0]

    try:
        parts = local.build(recipe, make)  # type: ignore[arg-type]
    except BaseException as error:
        channel.watch.fail(error)  # the others wait for a learner
        raise
    close = parts.close

    def leave() -> None:
        close()
        made[0].close()

    return parts._replace(close=leave, shards=made[0].write)


def conduct(recipe: Recipe, channel: Channel | None = None) -> Conductor:
    """The learner of rank 0; the other ranks have its recipe, and get the number of its steps."""
    from burnish.loops.conductor import Conductor

    channel = channel or join(recipe)
    channel.send(recipe.train.steps)
    learner, mesh = channel.call(_learner, recipe)
    return Conductor(learner, mesh, channel)


def obey(recipe: Recipe) -> None:
    """Follows rank 0, which decides when the run stops."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    follow(recipe, threads(recipe))


def follow(recipe: Recipe, count: int | None) -> None:
    """Learns with rank 0 until it ends, on so many threads."""
    from burnish import build as local
    from burnish.loops import conductor

    recipe = local.prepare(recipe, count)
    channel = join(recipe)
    recipe = config.with_steps(recipe, channel.call(channel.receive))
    learner, mesh = channel.call(_learner, recipe)
    conductor.follow(learner, mesh, channel)


def join(recipe: Recipe) -> Channel:
    """Meets the other ranks, which must have the same recipe."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    from burnish.learner.watch import Watch
    from burnish.loops.conductor import Channel
    from burnish.sizes import device_of

    check_ranks(recipe)
    on_gpu = device_of(recipe) != "cpu"
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    deadline = timedelta(seconds=recipe.runtime.deadline)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=deadline)
    count, port = dist.get_world_size(), int(os.environ["MASTER_PORT"])
    store = TCPStore(os.environ["MASTER_ADDR"], port, is_master=False, timeout=deadline)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    watch = Watch(PrefixStore(f"burnish/{attempt}", store), rank(), count)
    watch.start()
    recipes: list[str] = [""] * count
    dist.all_gather_object(recipes, config.to_toml(config.effective(recipe)))
    if others := [number for number in range(count) if recipes[number] != recipes[0]]:
        first, other = (tomllib.loads(recipes[number]) for number in (0, others[0]))
        watch.end()
        raise ConfigError(
            f"the recipes of ranks 0 and {others[0]} differ "
            f"({differences(config.flat(first), config.flat(other))}); "
            "start all ranks with one command line"
        )
    return Channel(dist.new_group(backend="gloo", timeout=IDLE), watch, device_of(recipe))


def _learner(recipe: Recipe) -> tuple[Learner, Mesh]:
    from burnish import build as local
    from burnish.learner.parallel import Mesh
    from burnish.sizes import device_of, shape_of

    sizes, kinds = recipe.mesh.sizes, recipe.mesh.model_dump(include={"gather", "offload"})
    mesh = Mesh(sizes, shape_of(recipe), device_of(recipe), **kinds)
    return local.build_learner(recipe, mesh), mesh
