"""Runs on Ray: equal to runs in one process, whoever dies on the way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import burnish
from burnish.errors import ActorError
from burnish.progress import Progress
from burnish.runs.ledger import judge
from burnish.runs.metrics import iterate_rows
from tests.loops import test_extended as extended

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

STALE = {"proximal": "behavior"}
SORT = {"train": {"steps": 6}, "validation": {"every": 3}, "checkpoint": {"every": 2}}


def metrics(run: burnish.Run) -> str:
    return (run.path / "metrics.jsonl").read_text()


def train(path: Path, runtime: str, lag: int = 0, **more: object) -> burnish.Run:
    settings = SORT | {"loop": {"lag": lag}} | ({"objective": STALE} if lag else {})
    return burnish.train(
        "sort", out=path, show=more.pop("show", False), runtime={"name": runtime} | more, **settings
    )


@pytest.mark.parametrize("lag", [0, 2])
def test_same_as_in_one_process(tmp_path: Path, lag: int) -> None:
    local = train(tmp_path / "local", "local", lag)
    remote = train(tmp_path / "ray", "ray", lag)
    assert metrics(remote) == metrics(local)
    if lag:
        assert '"train/lag": 20' in metrics(local).splitlines()[-1]
        assert '"drift/staleness"' in metrics(local).splitlines()[-1]
    rows = list(iterate_rows(remote.path / "timeline.jsonl"))
    assert {row["actor"] for row in rows} == {"generator-0", "scorer", "learner"}
    assert [row["version"] for row in rows if row["what"] == "learn"] == [10, 20, 30, 40, 50, 60]


def test_full_batches_are_the_same_as_in_one_process(tmp_path: Path) -> None:
    """Prompts leave, rollouts are filled while the next one is in flight, and the ledger has every
    group."""
    chosen = {"dead_groups": "dynamic", "leave_at": 0.5, "on_bound": "learn"}
    sizes = {"rollout": {"batch": 6, "group_size": 2}, "train": {"steps": 4, "batch": 6}}
    sizes |= {"task": {"prompts": 40}, "selection": chosen, "objective": STALE, "loop": {"lag": 1}}
    runs = [
        burnish.train("sort", out=tmp_path / name, show=False, runtime=name, **sizes)
        for name in ("local", "ray")
    ]
    assert metrics(runs[0]) == metrics(runs[1])
    assert '"rollout/asked_per_used": 1.3' in metrics(runs[0])
    for run in runs:
        verdict = judge(run.path, batch=3, window=3)
        assert not verdict.problems, verdict
        assert verdict.dropped > 0


@pytest.mark.parametrize("name", ["lag 1", "dynamic"])
def test_an_extended_run_equals_a_long_one(tmp_path: Path, name: str) -> None:
    whole = extended.train(tmp_path / "whole", 6, extended.SETTINGS[name])
    parts = extended.train(tmp_path / "parts", 3, extended.SETTINGS[name], "ray")
    burnish.resume(parts.path, overrides=["train.steps=6"], show=False)
    extended.assert_same(parts, whole)
    verdict = judge(parts.path, batch=3, window=3)
    assert not verdict.problems, verdict


def pid_of(run: Path, name: str) -> int:
    pid: int = json.loads((run / "actors.json").read_text())[name]["pid"]
    return pid


@pytest.mark.parametrize("victim", ["generator-0", "scorer", "learner"])
def test_a_killed_actor_costs_time_alone(tmp_path: Path, victim: str) -> None:
    whole = train(tmp_path / "whole", "local", 1)
    killed = []

    def show(progress: Progress) -> None:
        if progress.phase == "step" and progress.step == 3 and not killed:
            killed.append(pid_of(tmp_path / "killed", victim))
            os.kill(killed[0], signal.SIGKILL)

    run = train(tmp_path / "killed", "ray", 1, show=show)
    assert killed
    assert metrics(run) == metrics(whole)
    verdict = judge(run.path, batch=3, window=3)
    assert not verdict.problems, verdict
    assert verdict.steps == 6


@pytest.mark.parametrize("on_update", ["wait", "recompute", "keep"])
def test_free_running_keeps_its_bound(tmp_path: Path, on_update: str) -> None:
    loop = {"name": "free", "max_lag": 20, "on_update": on_update}
    run = burnish.train(
        "sort", out=tmp_path / "free", show=False, loop=loop, objective=STALE, runtime="ray", **SORT
    )
    verdict = judge(run.path, batch=3, window=3, max_lag=20)
    assert not verdict.problems, verdict
    assert verdict.steps == 6
    assert verdict.lag > 0


def test_a_free_run_goes_on_whatever_it_drops(tmp_path: Path) -> None:
    """A rollout adds ten versions, so that every group that is begun while the learner works is
    stale; others are dead, or their prompts have left."""
    run = burnish.train(
        "sort",
        out=tmp_path / "free",
        show=False,
        loop={"name": "free", "max_lag": 2, "on_stale": "drop", "on_update": "recompute"},
        objective=STALE,
        runtime={"name": "ray", "generators": 2},
        selection={"dead_groups": "drop", "leave_at": 0.5},
        rollout={"batch": 6, "group_size": 2},
        train={"steps": 6, "batch": 6},
        task={"prompts": 40},
    )
    verdict = judge(run.path, batch=3, window=3, max_lag=2)
    assert not verdict.problems, verdict
    assert verdict.steps == 6
    assert verdict.dropped > 0


def test_a_killed_generator_of_a_free_run_gets_its_groups_again(tmp_path: Path) -> None:
    killed = []

    def show(progress: Progress) -> None:
        if progress.phase == "step" and progress.step in (2, 4) and progress.step not in killed:
            killed.append(progress.step)
            victim = "generator-1" if progress.step == 2 else "learner"
            os.kill(pid_of(tmp_path / "free", victim), signal.SIGKILL)

    run = burnish.train(
        "sort",
        out=tmp_path / "free",
        show=show,
        loop={"name": "free", "max_lag": 20, "on_update": "keep"},
        objective=STALE,
        runtime={"name": "ray", "generators": 2},
        **SORT,
    )
    verdict = judge(run.path, batch=3, window=3, max_lag=20)
    assert killed == [2, 4]
    assert not verdict.problems, verdict
    assert (verdict.steps, verdict.restarts) == (6, 1)


def test_a_stopped_learner_is_reported(tmp_path: Path) -> None:
    """SIGSTOP leaves a process that is alive and answers nothing."""
    stopped = []

    def show(progress: Progress) -> None:
        if progress.phase == "step" and not stopped:
            stopped.append(pid_of(tmp_path / "run", "learner"))
            os.kill(stopped[0], signal.SIGSTOP)

    try:
        with pytest.raises(ActorError) as caught:
            train(tmp_path / "run", "ray", show=show, deadline=40)
    finally:
        os.kill(stopped[0], signal.SIGKILL)
    told = str(caught.value)
    assert "for learner to answer 'learn'" in told
    assert "its process is stopped" in told
    assert "The run waits here" in told


def test_a_replay_buffer_resumes_bit_for_bit(tmp_path: Path) -> None:
    buffer = {"capacity": 9, "order": "weighted", "max_uses": 2}
    settings = SORT | {"objective": STALE, "loop": {"lag": 1}, "buffer": buffer, "show": False}
    whole = burnish.train("sort", out=tmp_path / "whole", **settings)
    seen: list[int] = []

    def stop() -> bool:
        seen.append(1)
        return len(seen) == 3

    parts = burnish.train("sort", out=tmp_path / "parts", stop=stop, **settings)
    burnish.resume(parts.path, show=False)
    assert metrics(parts) == metrics(whole)
    verdict = judge(parts.path, batch=3, window=12, max_uses=2)
    assert not verdict.problems, verdict
