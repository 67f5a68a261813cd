"""Ray itself: a cluster of one's own on this machine, or one that is joined."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray
from ray._private import worker as ray_worker
from ray._private.authentication.authentication_token_setup import (
    ensure_token_if_auth_enabled,
    maybe_enable_token_auth_if_token_available,
)
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RayActorError, RayError
from ray.experimental.collective.collective import RemoteCommunicatorManager
from ray.experimental.collective.communicator import CommunicatorHandle

from burnish import machine
from burnish.errors import ActorDied, ActorError, ConfigError
from burnish.folders import SHARED
from burnish.plan import spell
from burnish.strategy import Resources, RuntimeConfig

DIRECT = ("nixl", "gloo", "nccl")
"""Transports of Ray by which tensors go from actor to actor without its store."""
TOKEN = (
    "the Ray cluster there requires a token, and this process has none or another one; print it "
    "there with `ray get-auth-token`, and set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to the token, "
    "or RAY_AUTH_TOKEN_PATH to a file that holds it"
)


def choose(runtime: RuntimeConfig, device: str, needed: int = 0) -> tuple[str, str]:
    """The transport of weights, and why; ``device`` is the weights', ``needed`` the bytes of shared
    memory that they take. A transport that can't run is refused."""
    how, is_here, on_gpu = runtime.transport, runtime.address is None, device != "cpu"
    gpus = min(runtime.generator.gpus, runtime.learner.gpus)
    small = too_small(needed) if SHARED.is_dir() else None
    if how != "auto":
        problem = small if how == "shared" else unusable(how, on_gpu or not is_here, gpus)
        if problem:
            raise ConfigError(f"runtime.transport = {how!r}: {problem}; or use 'auto'")
        return how, "as the recipe says"
    if is_here and SHARED.is_dir():
        if small is not None:
            return "store", f"since {small}"
        return "shared", "since all actors are on this machine"
    problem = unusable("nixl", on_gpu, gpus)
    return ("nixl", "since actors may be apart") if problem is None else ("store", problem)


def too_small(needed: int) -> str | None:
    """Why shared memory does not hold so many bytes, and the remedy; None if it does."""
    free = machine.disk(SHARED)
    if free >= needed:
        return None
    return (
        f"{SHARED} has {spell(free)} free and weights and checkpoints may take {spell(needed)}; "
        "make it larger (in Docker with --shm-size)"
    )


def unusable(how: str, has_gpu: bool, gpus: float) -> str | None:
    """Why a transport can't run, and the remedy; None if it can. ``gpus`` are an actor's own."""
    if how in ("nccl", "ipc") and not has_gpu:
        return "it carries weights from GPU to GPU, and torch finds none; use 'shared'"
    if how == "nccl" and gpus < 1:
        return "NCCL can't have two actors on one GPU; set gpus = 1 for learner and generators"
    package = {"nixl": "nixl", "nccl": "cupy-cuda13x"}.get(how, "ray")
    if find_spec(package.partition("-")[0]) is None:
        return f"its package is not installed; install it with: pip install {package}"
    return None


class Exchange:
    """The actors that send each other tensors directly. gloo and NCCL know them by a group that
    each must join; an actor that was started again is outside, so all make a new group."""

    def __init__(self, how: str, members: Sequence[str]) -> None:
        self.how, self.members = how, members
        self._handles: list[Any] = []
        self._name = ""

    def carried(self, method: Any) -> Any:
        """An actor's method whose answer goes to other actors by the group's transport."""
        return method.options(tensor_transport=self.how) if self.members else method

    def join(self, handles: list[Any], deadline: float) -> None:
        """Makes the group of these actors, unless it is made."""
        if self.how == "nixl" or handles == self._handles:
            return
        groups = RemoteCommunicatorManager.get()
        groups.remove_remote_communicator(self._name)
        self._name = uuid4().hex
        place = self.how, len(handles), self._name
        # In the thread that sends and receives: after its work, and beside the actor's.
        calls = [h.__ray_call__.options(concurrency_group="_ray_system") for h in handles]
        joins = [call.remote(_join, rank, *place) for rank, call in enumerate(calls)]
        try:
            ray.get(joins, timeout=deadline)
        except RayError as error:
            kind = ActorDied if isinstance(error, RayActorError) else ActorError
            told = f"{', '.join(self.members)} could not make a {self.how} group in {deadline:g} s"
            raise kind(f"{told}: {error}; use runtime.transport = 'auto'") from None
        groups.add_remote_communicator(CommunicatorHandle(handles, self._name, self.how))
        self._handles = handles


NOBODY = Exchange("store", ())


def _join(shell: Any, rank: int, how: str, size: int, name: str) -> None:
    """Runs in an actor, and leaves the group before."""
    import torch.distributed
    from ray.util import collective
    from ray.util.collective.types import Backend

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    collective.init_collective_group(size, rank, Backend(how), group_name=name)


def connect(runtime: RuntimeConfig, learners: int = 1) -> Callable[[], None]:
    """Starts Ray on this machine, or joins the cluster at the recipe's address. ``learners`` are
    the actors that learn together.

    Returns the function that leaves it; a script's own Ray stays as it is.

    A run whose actors do not fit is refused at once: Ray would wait for ever.
    """
    # An actor without GPUs of its own sees those that this process sees, and does not take the CPU.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # as a run in one process
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # busy cores start it slowly
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    leave: Callable[[], None] = ray.shutdown
    if ray.is_initialized():
        leave = _stay
    elif runtime.address is None:
        with keeping_signals():
            ray.init("local", include_dashboard=False, **quiet)  # also beside another cluster
        leave = _end
    else:
        try:
            where = canonicalize_bootstrap_address_or_die(runtime.address)
            if problem := silence(where):
                raise ConnectionError(problem)
            if wants_token(where):
                raise ConfigError(f"runtime.address = {runtime.address!r}: {TOKEN}")
            with keeping_signals():
                ray.init(address=where, **quiet)
        except (ConnectionError, ValueError) as error:
            raise ConfigError(
                f"runtime.address = {runtime.address!r}: no Ray cluster answers there ({error}); "
                "start one with `ray start --head`, or leave the address out"
            ) from None
        except RuntimeError as error:
            ray.shutdown()  # it is half connected
            if "Version mismatch" not in str(error):
                raise
            raise ConfigError(
                f"runtime.address = {runtime.address!r}: the cluster there has another version of "
                f"Ray or Python; use the same on both sides\n{error}"
            ) from None
    if leave is not _stay:  # Ray has a long text for each process that dies; ours is a line
        ray_worker.print_to_stdstream = lambda data, ignore_prefix: None
    problem = lacking(runtime, ray.cluster_resources(), learners)  # type: ignore[no-untyped-call]
    if problem is not None:
        leave()
        raise ConfigError(problem)
    return leave


def own_address(runtime: RuntimeConfig) -> str:
    """An address of this process that all actors reach."""
    if runtime.address is None:
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _stay() -> None:
    """Leaves Ray as it is."""


@contextmanager
def keeping_signals() -> Iterator[None]:
    """Ray is started or joined in this block without changing what SIGTERM does.

    Ray replaces the handlers of SIGTERM, Python's and the process's, by its own, which print a
    stack and exit. They are put back after the block. Processes that Ray starts inherit a mask that
    blocks SIGTERM: batch systems send it to all processes of a job, and a run needs its actors to
    finish and save its step. They end with the run nevertheless (see ``_end``).
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers
        return
    before = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        if callable(before):  # otherwise Ray's own handler is better: it ends the actors
            signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _end() -> None:
    """Ends a Ray that this process has started.

    SIGTERM, by which Ray would ask its processes to end, is blocked there, so that they are killed.
    Ray's agents would outlive a killed raylet by minutes, and are killed, too.
    """
    node: Any = ray_worker._global_node  # Ray declares it as always None
    left: list[int] = []
    if node is not None:
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **how: kill(**how | {"allow_graceful": False})
        left = [fd for _, process in node.live_processes() for fd in _started_by(process.pid)]
    ray.shutdown()
    for fd in left:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)


def _started_by(pid: int) -> Iterator[int]:
    """File descriptors of the processes that a process has started, and that these have started;
    none on a system without them. Unlike a pid, a descriptor never names another process."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # it has ended meanwhile
            for child in map(int, file.read_text().split()):
                yield from _started_by(child)
                yield os.pidfd_open(child)


def head_problem() -> str | None:
    """Why Ray can't go on; None if its head node answers. Ray itself would end this process without
    a word a minute after its head node has died."""
    address = ray.get_runtime_context().gcs_address
    problem = silence(address)
    return problem and f"Ray's head node at {address} no longer answers ({problem})"


def wants_token(address: str) -> bool:
    """Whether the Ray cluster at HOST:PORT refuses this process for want of its token. Ray itself
    would try for long, and then say that nobody answers."""
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    token, file = (os.environ.get(f"RAY_AUTH_TOKEN{kind}") for kind in ("", "_PATH"))
    if token == "" or (token is None and file is not None and not Path(file).is_file()):
        return True  # Ray would end this process
    try:
        # As ray.init does: a token in its usual file is used.
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        ensure_token_if_auth_enabled(create_token_if_missing=False)
        GcsClient(address=address)
    except AuthenticationError:
        return True
    except RayError:
        return False  # another problem, which ray.init names
    return False


def silence(address: str) -> str | None:
    """Why nobody answers at HOST:PORT; None if somebody does. Ray would try for many minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None


def options(resources: Resources) -> dict[str, Any]:
    return {
        "num_cpus": resources.cpus,
        "num_gpus": resources.gpus,
        "resources": resources.custom,
        "scheduling_strategy": "SPREAD",  # over the nodes, if there are several
    }


def lacking(runtime: RuntimeConfig, there: dict[str, float], learners: int = 1) -> str | None:
    """The arithmetic of actors that do not fit; None if they do."""
    each, own = _units(runtime.generator), _units(runtime.learner)
    for name in each | own:
        of_one, of_learner = each.get(name, 0.0), learners * own.get(name, 0.0)
        wanted, found = runtime.generators * of_one + of_learner, there.get(name, 0.0)
        if wanted > found:
            return (
                f"the actors need {wanted:g} {name} ({runtime.generators} generators × "
                f"{of_one:g} + the learner's {of_learner:g}), and Ray has {found:g}; use fewer "
                "generators, or change runtime.generator and runtime.learner"
            )
    return None


def _units(resources: Resources) -> dict[str, float]:
    return {"CPU": resources.cpus, "GPU": resources.gpus, **resources.custom}
