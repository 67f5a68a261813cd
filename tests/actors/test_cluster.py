"""The choice of a transport, and actors that do not fit on a cluster."""

from __future__ import annotations

import re
import socket
import threading
from typing import Any

import pytest
from ray.exceptions import RaySystemError

from burnish.actors import cluster
from burnish.errors import ClusterError, ConfigError, RunError
from burnish.machine import hardware
from burnish.recipe.runtime import RayRuntime

PROBES = ("connection_problem", "protocol_problem")
"""What is asked of an address before Ray joins it."""


def test_actors_that_do_not_fit_are_refused_with_the_arithmetic() -> None:
    problem = str(cluster.missing_resources(RayRuntime(generators=4), {"CPU": 2.0}))
    assert "need 5 CPU (4 generators × 1 + the learner's 1), and Ray has 2" in problem
    assert cluster.missing_resources(RayRuntime(), {"CPU": 2.0}) is None


def test_each_rank_needs_the_learners_resources() -> None:
    there = {"CPU": 3.0}
    assert cluster.missing_resources(RayRuntime(), there, 2) is None
    assert "need 4 CPU" in str(cluster.missing_resources(RayRuntime(), there, 3))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to get the cluster ID.\nmore"),
        RaySystemError("GCS is down"),
        ConnectionError("Could not find any running Ray instance."),
    ],
)
@pytest.mark.parametrize("address", [None, "10.0.0.1:6379"])
def test_a_cluster_that_can_not_be_used_is_an_error_for_users(
    monkeypatch: pytest.MonkeyPatch, address: str | None, error: Exception
) -> None:
    """The run can be resumed when the cluster is there again, so that it is no ConfigError."""

    def fail(*args: Any, **how: Any) -> None:
        raise error

    for name in ("canonicalize_bootstrap_address_or_die", *PROBES, "needs_token"):
        monkeypatch.setattr(cluster, name, lambda address: None)
    monkeypatch.setattr(cluster.ray, "init", fail)
    what = "Ray does not start on this machine: "
    if address is not None:
        what = f"runtime.address = '{address}': no Ray cluster answers there ("
    with pytest.raises(ClusterError, match=re.escape(what)) as raised:
        cluster.start_or_join(RayRuntime(address=address))
    assert isinstance(raised.value, RunError)
    assert str(error).splitlines()[0].rstrip(".") in str(raised.value)
    assert re.search("; (start one with|end other programs)", str(raised.value))


@pytest.mark.parametrize("answer", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"", None])
def test_an_address_of_another_program_is_refused_at_once(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    """One that answers in another protocol, one that closes the connection, and a silent one."""
    monkeypatch.setattr(cluster, "ANSWER_SECONDS", 0.5)
    monkeypatch.setattr(cluster, "canonicalize_bootstrap_address_or_die", lambda address: address)
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def serve() -> None:
            connections = [server.accept()[0] for _ in PROBES]
            if answer is not None:
                connections[-1].recv(1)
                connections[-1].sendall(answer)
                connections[-1].close()
            ended.wait(60)
            for connection in connections:
                connection.close()

        ended = threading.Event()
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        told = f"'{address}': no Ray cluster answers there (the program there does not speak Ray's"
        with pytest.raises(ClusterError, match=re.escape(told)):
            cluster.start_or_join(RayRuntime(address=address))
        ended.set()
        thread.join()


def test_a_missing_token_is_an_error_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "canonicalize_bootstrap_address_or_die", lambda address: address)
    for name in PROBES:
        monkeypatch.setattr(cluster, name, lambda address: None)
    monkeypatch.setattr(cluster, "needs_token", lambda address: True)
    with pytest.raises(ClusterError, match=r"'10\.0\.0\.1:1': the Ray cluster there requires"):
        cluster.start_or_join(RayRuntime(address="10.0.0.1:1"))


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
    assert cluster.choose_transport(RayRuntime(**settings), device)[0] == chosen


@pytest.mark.parametrize(
    ("how", "device", "problem"),
    [
        ("nccl", "cpu", "torch finds no GPU; use 'shared'"),
        ("ipc", "cpu", "torch finds no GPU; use 'shared'"),
        ("nccl", "cuda", "two actors on one GPU; set gpus = 1"),
        ("nixl", "cpu", "pip install nixl"),
    ],
)
def test_a_transport_that_can_not_run_is_refused(
    monkeypatch: pytest.MonkeyPatch, how: Any, device: str, problem: str
) -> None:
    monkeypatch.setattr(cluster, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"runtime.transport = '{how}'.*{problem}.*'auto'"):
        cluster.choose_transport(RayRuntime(transport=how), device)
    assert cluster.choose_transport(RayRuntime(address="auto"), "cpu")[0] == "store"


def test_weights_go_by_the_store_if_shared_memory_is_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hardware, "disk", lambda path: 64_000_000)
    how, why = cluster.choose_transport(RayRuntime(), "cpu", 540_000_000)
    assert how == "store"
    assert "540 MB" in why
    assert "64 MB" in why
    assert "--shm-size" in why
    assert cluster.choose_transport(RayRuntime(), "cpu", 64_000_000)[0] == "shared"
    with pytest.raises(ConfigError, match=r"'shared'.*/dev/shm.*64 MB.*540 MB.*or use 'auto'"):
        cluster.choose_transport(RayRuntime(transport="shared"), "cpu", 540_000_000)
    assert cluster.choose_transport(RayRuntime(transport="gloo"), "cpu", 540_000_000)[0] == "gloo"
