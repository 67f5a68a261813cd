"""The choice of a transport, and actors that do not fit on a cluster."""

from __future__ import annotations

from typing import Any

import pytest

from burnish.actors import cluster
from burnish.errors import ConfigError
from burnish.machine import hardware
from burnish.recipe.runtime import RayRuntime


def test_actors_that_do_not_fit_are_refused_with_the_arithmetic() -> None:
    problem = str(cluster.missing_resources(RayRuntime(generators=4), {"CPU": 2.0}))
    assert "need 5 CPU (4 generators × 1 + the learner's 1), and Ray has 2" in problem
    assert cluster.missing_resources(RayRuntime(), {"CPU": 2.0}) is None


def test_each_rank_needs_the_learners_resources() -> None:
    there = {"CPU": 3.0}
    assert cluster.missing_resources(RayRuntime(), there, 2) is None
    assert "need 4 CPU" in str(cluster.missing_resources(RayRuntime(), there, 3))


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
