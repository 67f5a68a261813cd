"""The Ray cluster of a run: a new one on this machine, or an existing one that the run joins."""

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

from burnish.errors import ActorDied, ActorError, ClusterError, ConfigError
from burnish.machine import hardware
from burnish.machine.folders import SHARED
from burnish.recipe.costs import format_bytes
from burnish.recipe.runtime import RayRuntime, Resources

DIRECT_TRANSPORTS = ("nixl", "gloo", "nccl")
"""Ray's transports that send tensors from actor to actor without its object store."""
TOKEN_HELP = (
    "the Ray cluster there requires a token, and this process has none or a different one; print "
    "the token there with `ray get-auth-token`, and set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN to "
    "the token, or RAY_AUTH_TOKEN_PATH to a file that contains it"
)


def choose_transport(runtime: RayRuntime, device: str, needed: int = 0) -> tuple[str, str]:
    """Choose the transport that sends weights from the learner to the generators; return its name
    and the reason for the choice, as a clause for a message.

    ``device`` is the torch device of the learner's weights. ``needed`` is the number of bytes that
    weights and checkpoints take if they are sent through shared memory. Raise a ``ConfigError`` if
    the recipe names a transport that can't work here; "auto" always finds one.
    """
    name, is_local, on_gpu = runtime.transport, runtime.address is None, device != "cpu"
    gpus = min(runtime.generator.gpus, runtime.learner.gpus)
    too_small = shared_memory_problem(needed) if SHARED.is_dir() else None
    if name != "auto":
        has_gpu = on_gpu or not is_local
        problem = too_small if name == "shared" else transport_problem(name, has_gpu, gpus)
        if problem:
            raise ConfigError(f"runtime.transport = {name!r}: {problem}; or use 'auto'")
        return name, "as the recipe says"
    if is_local and SHARED.is_dir():
        if too_small is not None:
            return "store", f"since {too_small}"
        return "shared", "since all actors are on this machine"
    problem = transport_problem("nixl", on_gpu, gpus)
    if problem is None:
        return "nixl", "since actors may be on different machines"
    return "store", f"since nixl can't be used: {problem}"


def shared_memory_problem(needed: int) -> str | None:
    """Return a text with the problem and its fix if shared memory has fewer than ``needed`` bytes
    free; None if it has enough."""
    free = hardware.disk(SHARED)
    if free >= needed:
        return None
    return (
        f"{SHARED} has {format_bytes(free)} free and weights and checkpoints may take "
        f"{format_bytes(needed)}; make it larger (in Docker with --shm-size)"
    )


def transport_problem(name: str, has_gpu: bool, gpus: float) -> str | None:
    """Return a text with the problem and its fix if a transport can't work; None if it can.
    ``has_gpu`` is False if the learner and the generators certainly run without a GPU. ``gpus`` is
    the smaller of the GPU counts of a generator and the learner."""
    if name in ("nccl", "ipc") and not has_gpu:
        return "it sends weights from GPU to GPU, and torch finds no GPU; use 'shared'"
    if name == "nccl" and gpus < 1:
        return (
            "NCCL does not support two actors on one GPU; set gpus = 1 for learner and generators"
        )
    package = {"nixl": "nixl", "nccl": "cupy-cuda13x"}.get(name, "ray")
    if find_spec(package.partition("-")[0]) is None:
        return f"its package is not installed; install it with: pip install {package}"
    return None


class TransportGroup:
    """The actors that send tensors to each other without Ray's object store. gloo and NCCL need a
    communicator group with fixed members, so all actors create a new group after one of them was
    restarted."""

    def __init__(self, transport: str, members: Sequence[str]) -> None:
        """``members``: names of the actors; empty unless ``transport`` is one of
        `DIRECT_TRANSPORTS`."""
        self.transport, self.members = transport, members
        self._handles: list[Any] = []
        self._name = ""

    def with_transport(self, method: Any) -> Any:
        """Configure an actor's method to send the tensors of its result by the group's transport,
        and return it. If the group has no members, the method is returned unchanged."""
        return method.options(tensor_transport=self.transport) if self.members else method

    def join(self, handles: list[Any], deadline: float) -> None:
        """Create a communicator group of these actors, in place of the previous group. Do nothing
        if the previous group already has these actors, or if the transport is nixl, which needs no
        group. Raise an ActorError if the group is not complete after ``deadline`` seconds, and an
        ActorDied if an actor has died."""
        if self.transport == "nixl" or handles == self._handles:
            return
        groups = RemoteCommunicatorManager.get()
        groups.remove_remote_communicator(self._name)
        self._name = uuid4().hex
        group = self.transport, len(handles), self._name
        # These calls run in the thread that sends and receives tensors: after its transfers, and
        # concurrently with the actor's own calls.
        calls = [h.__ray_call__.options(concurrency_group="_ray_system") for h in handles]
        joins = [call.remote(_join_group, rank, *group) for rank, call in enumerate(calls)]
        try:
            ray.get(joins, timeout=deadline)
        except RayError as error:
            kind = ActorDied if isinstance(error, RayActorError) else ActorError
            raise kind(
                f"{', '.join(self.members)} could not create a {self.transport} group in "
                f"{deadline:g} s: {error}; use runtime.transport = 'auto'"
            ) from None
        groups.add_remote_communicator(CommunicatorHandle(handles, self._name, self.transport))
        self._handles = handles


NO_GROUP = TransportGroup("store", ())


def _join_group(actor: Any, rank: int, transport: str, size: int, name: str) -> None:
    """Leave the previous communicator group and join the group ``name`` as ``rank``. This function
    runs in an actor."""
    import torch.distributed
    from ray.util import collective
    from ray.util.collective.types import Backend

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    collective.init_collective_group(size, rank, Backend(transport), group_name=name)


def start_or_join(runtime: RayRuntime, learners: int = 1) -> Callable[[], None]:
    """Start Ray on this machine, or join the cluster at ``runtime.address``. ``learners`` is the
    number of learner actors (the ranks of a mesh).

    Return a function that ends the use of Ray: it shuts down a cluster that was started here, and
    disconnects from one that was joined. If the calling script has already initialized Ray, that
    cluster is used, and the returned function leaves it running.

    Raise a ClusterError if no cluster answers, if it rejects this process's token or has another
    version of Ray or Python, or if Ray does not start here. Raise a ConfigError if there are too
    few resources for the actors (Ray would wait forever).
    """
    # Actors without assigned GPUs see the GPUs of this process; otherwise they would use the CPU.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the same as a run in one process
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")  # Ray starts slowly on busy cores
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    leave: Callable[[], None] = ray.shutdown
    if ray.is_initialized():
        leave = _leave_running
    elif runtime.address is None:
        try:
            with preserve_sigterm():
                # "local" starts a new cluster even if another one runs on this machine.
                ray.init("local", include_dashboard=False, **quiet)
        except (ConnectionError, RuntimeError, TimeoutError, RayError) as error:
            _shut_down()
            raise ClusterError(
                f"Ray does not start on this machine: {_reason(error)}; end other programs, or use "
                "runtime.name = 'local'"
            ) from error
        leave = _shut_down
    else:
        try:
            address = canonicalize_bootstrap_address_or_die(runtime.address)
            if problem := connection_problem(address) or protocol_problem(address):
                raise ConnectionError(problem)
            if needs_token(address):
                raise ClusterError(f"runtime.address = {runtime.address!r}: {TOKEN_HELP}")
            with preserve_sigterm():
                ray.init(address=address, **quiet)
        except (ConnectionError, ValueError) as error:
            raise ClusterError(_no_cluster(runtime.address, error)) from None
        except (RuntimeError, RayError) as error:
            ray.shutdown()  # the failed ray.init leaves it partly connected
            if "Version mismatch" not in str(error):
                raise ClusterError(_no_cluster(runtime.address, error)) from error
            raise ClusterError(
                f"runtime.address = {runtime.address!r}: the cluster there has a different version "
                f"of Ray or Python; use the same versions on both sides\n{error}"
            ) from None
    # Suppress Ray's long report of each death; burnish logs one line.
    if leave is not _leave_running:
        ray_worker.print_to_stdstream = lambda data, ignore_prefix: None
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    problem = missing_resources(runtime, resources, learners)
    if problem is not None:
        leave()
        raise ConfigError(problem)
    return leave


def _no_cluster(address: str, error: Exception) -> str:
    return (
        f"runtime.address = {address!r}: no Ray cluster answers there ({_reason(error)}); start "
        "one with `ray start --head`, or leave the address out"
    )


def _reason(error: Exception) -> str:
    """Return the first line of an error of Ray, or the name of its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def driver_address(runtime: RayRuntime) -> str:
    """Return an IP address at which all actors can reach this process."""
    if runtime.address is None:
        return "127.0.0.1"
    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]


def _leave_running() -> None:
    """Do nothing: the script that initialized Ray shuts it down."""


@contextmanager
def preserve_sigterm() -> Iterator[None]:
    """Protect this process's SIGTERM handler while Ray is started or joined in the block.

    Ray installs its own SIGTERM handlers, in Python and in C++, which print a stack trace and exit;
    the previous handler is restored after the block. SIGTERM is blocked inside the block, and the
    processes that Ray starts inherit this mask: batch systems send SIGTERM to all processes of a
    job, but the run needs its actors to finish and save the current step. `_shut_down` ends these
    processes when the run ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread can set handlers
        return
    before = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        if callable(before):  # without one, keep Ray's handler, which ends the actors
            signal.signal(signal.SIGTERM, before)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _shut_down() -> None:
    """Shut down a cluster that this process has started.

    Ray normally stops its processes with SIGTERM. They block it (see `preserve_sigterm`), so they
    are killed. Ray's agents would outlive a killed raylet by minutes, so they are killed, too.
    """
    node: Any = ray_worker._global_node  # Ray declares it as always None
    left: list[int] = []
    if node is not None:
        kill = node.kill_all_processes
        node.kill_all_processes = lambda **options: kill(**options | {"allow_graceful": False})
        left = [fd for _, process in node.live_processes() for fd in _descendants(process.pid)]
    ray.shutdown()
    for fd in left:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)


def _descendants(pid: int) -> Iterator[int]:
    """Yield a pid file descriptor for each descendant of a process; none on a system without /proc.
    Unlike a pid, a descriptor never refers to another process later. The caller closes it."""
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):  # the process has ended in the meantime
            for child in map(int, file.read_text().split()):
                yield from _descendants(child)
                yield os.pidfd_open(child)


def head_node_problem() -> str | None:
    """Try to connect to Ray's head node for at most 10 s; return an error message if it does not
    answer, None if it does. Without this check, Ray would end this process silently a minute after
    its head node has died."""
    address = ray.get_runtime_context().gcs_address
    problem = connection_problem(address)
    return problem and f"Ray's head node at {address} no longer answers ({problem})"


def needs_token(address: str) -> bool:
    """Return whether the Ray cluster at HOST:PORT rejects this process because its token is missing
    or wrong. Ray itself would retry for a long time, and then report that nobody answers."""
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)
    token, file = (os.environ.get(f"RAY_AUTH_TOKEN{kind}") for kind in ("", "_PATH"))
    if token == "" or (token is None and file is not None and not Path(file).is_file()):
        return True  # ray.init would end this process
    try:
        # The same steps as in ray.init, which also reads a token from its default file.
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
        ensure_token_if_auth_enabled(create_token_if_missing=False)
        GcsClient(address=address)
    except AuthenticationError:
        return True
    except RayError:
        return False  # a different problem, which ray.init reports
    return False


ANSWER_SECONDS = 10.0
"""Seconds that the program at an address may take to accept a connection, and to answer."""


def connection_problem(address: str) -> str | None:
    """Try to connect to HOST:PORT for at most `ANSWER_SECONDS`; return the reason why it can't be
    reached, or None if it can. Ray itself would retry for many minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:
        return str(error)
    return None


def protocol_problem(address: str) -> str | None:
    """Return why the program at HOST:PORT, which accepts connections, can't be Ray's head node;
    None if it speaks HTTP/2, as gRPC does. Ray itself would retry for many minutes.

    Every HTTP/2 server starts a connection with a SETTINGS frame, after the client's preface and
    SETTINGS frame. This is not checked if Ray uses TLS."""
    if os.environ.get("RAY_USE_TLS", "0").lower() not in ("0", "false"):
        return None
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS) as server:
            server.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
            with server.makefile("rb") as answer:
                header = answer.read(len(_SETTINGS))
    except OSError:
        header = b""
    is_settings = len(header) == len(_SETTINGS) and header[3:] == _SETTINGS[3:]
    return None if is_settings else "the program there does not speak Ray's protocol"


_SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
"""An empty SETTINGS frame of HTTP/2: 3 bytes of length, type 4, no flags, stream 0."""


def actor_options(resources: Resources) -> dict[str, Any]:
    """Return Ray's options for an actor with these resources."""
    return {
        "num_cpus": resources.cpus,
        "num_gpus": resources.gpus,
        "resources": resources.custom,
        "scheduling_strategy": "SPREAD",  # use all nodes if there are several
    }


def missing_resources(
    runtime: RayRuntime, available: dict[str, float], learners: int = 1
) -> str | None:
    """Return an error message if the generators and ``learners`` learner actors together need more
    of a resource than is available; None if they fit. ``available`` has the cluster's resources by
    Ray's names, such as "CPU"."""
    generator, learner = _units(runtime.generator), _units(runtime.learner)
    for name in generator | learner:
        per_generator, learning = generator.get(name, 0.0), learners * learner.get(name, 0.0)
        needed, found = runtime.generators * per_generator + learning, available.get(name, 0.0)
        if needed > found:
            return (
                f"the actors need {needed:g} {name} ({runtime.generators} generators × "
                f"{per_generator:g} + the learner's {learning:g}), and Ray has {found:g}; use "
                "fewer generators, or change runtime.generator and runtime.learner"
            )
    return None


def _units(resources: Resources) -> dict[str, float]:
    return {"CPU": resources.cpus, "GPU": resources.gpus, **resources.custom}
