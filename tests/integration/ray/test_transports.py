"""Runs by each transport of weights: equal to a run in one process, whoever dies on the way."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.console.progress import Progress
from burnish.launch import ray
from burnish.runs.ledger import judge

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

SORT: dict[str, Any] = {"train": {"steps": 4}, "validation": {"every": 2}}
SORT |= {"checkpoint": {"every": 1}}
NIXL = pytest.param(
    "nixl", marks=pytest.mark.skipif(find_spec("nixl") is None, reason="nixl is not installed")
)


def metrics(run: burnish.Run) -> str:
    return (run.path / "metrics.jsonl").read_text()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The metrics of a run in one process."""
    path = tmp_path_factory.mktemp("whole") / "run"
    return metrics(burnish.train("sort", out=path, show=False, runtime="local", **SORT))


@pytest.mark.parametrize("how", ["store", "shared", "gloo", NIXL])
def test_same_as_in_one_process(tmp_path: Path, whole: str, how: str) -> None:
    told: list[str] = []

    def show(progress: Progress) -> None:
        told.append(progress.doing)

    runtime = {"name": "ray", "transport": how}
    run = burnish.train("sort", out=tmp_path / "run", show=show, runtime=runtime, **SORT)
    assert metrics(run) == whole
    assert f"the transport of weights is {how!r}, as the recipe says" in told


@pytest.mark.parametrize("how", ["gloo", NIXL])
@pytest.mark.parametrize(
    "victim", [pytest.param("generator-0", marks=pytest.mark.extra), "learner"]
)
def test_a_killed_actor_costs_time_alone(tmp_path: Path, whole: str, how: str, victim: str) -> None:
    killed: list[int] = []

    def show(progress: Progress) -> None:
        if progress.phase == "step" and progress.step == 2 and not killed:
            places = json.loads((tmp_path / "run" / "actors.json").read_text())
            killed.append(places[victim]["pid"])
            os.kill(killed[0], signal.SIGKILL)

    runtime = {"name": "ray", "transport": how}
    run = burnish.train("sort", out=tmp_path / "run", show=show, runtime=runtime, **SORT)
    assert killed
    check(run, whole)


def check(run: burnish.Run, whole: str) -> None:
    """A run whose actors died has the metrics of a run in one process, and a right ledger."""
    assert metrics(run) == whole
    verdict = judge(run.path, batch=3, window=3)
    assert not verdict.problems, verdict
    assert verdict.steps == 4


def dies_once(function: Any, marker: Path) -> Any:
    """The function, which kills its process when it is called for the third time, but once."""
    calls: list[int] = []

    def dying(*args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 3 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **more)

    return dying


def dying_receiver(marker: Path, recipe: Any) -> Any:
    """A generator that dies when it was sent weights, and before it answers."""
    generator = ray.make_generator(recipe)
    generator._receiver.opened = dies_once(generator._receiver.opened, marker)
    return generator


def dying_transfer(marker: Path, recipe: Any) -> Any:
    """A generator that dies in the thread that receives weights while the learner sends them."""
    from ray.experimental.rdt.collective_tensor_transport import CollectiveTensorTransport as gloo

    gloo.recv_multiple_tensors = dies_once(gloo.recv_multiple_tensors, marker)
    return ray.make_generator(recipe)


def dying_sender(marker: Path, *given: Any) -> Any:
    """A learner that dies when its weights are to be sent."""
    learner = ray.make_learner(*given)
    learner.data = dies_once(learner.data, marker)
    return learner


@pytest.mark.parametrize(
    ("how", "who", "dying"),
    [
        ("shared", "make_generator", dying_receiver),
        ("store", "make_learner", dying_sender),
        ("gloo", "make_generator", dying_receiver),
        ("gloo", "make_generator", dying_transfer),
        ("gloo", "make_learner", dying_sender),
        pytest.param("nixl", "make_learner", dying_sender, marks=NIXL.marks),
    ],
)
def test_a_kill_in_the_middle_of_a_transfer(
    tmp_path: Path, whole: str, monkeypatch: pytest.MonkeyPatch, how: str, who: str, dying: Any
) -> None:
    monkeypatch.setattr(ray, who, partial(dying, tmp_path / "died"))
    runtime = {"name": "ray", "transport": how}
    run = burnish.train("sort", out=tmp_path / "run", show=False, runtime=runtime, **SORT)
    assert (tmp_path / "died").exists()
    check(run, whole)
