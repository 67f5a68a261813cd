"""Runs on Ray: equal to runs in one process, whoever dies on the way."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

import burnish
from burnish.cli.chaos import verdict
from burnish.console.progress import Progress
from burnish.errors import ActorError
from burnish.recipe.load import load_recipe
from burnish.runs.ledger import judge
from burnish.runs.metrics import iterate_rows
from tests.integration import test_extended_run as extended
from tests.integration.ray import native

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


@pytest.mark.parametrize(("dead_groups", "lag"), [("dynamic", 1), ("active", 0), ("active", 1)])
def test_full_batches_are_the_same_as_in_one_process(
    tmp_path: Path, dead_groups: str, lag: int
) -> None:
    """Prompts leave, rollouts are filled while the next one is in flight, and the ledger has every
    group. With lag 0 the run in one process is the synchronous loop."""
    chosen = {"dead_groups": dead_groups, "leave_at": 0.5, "on_bound": "learn"}
    sizes = {"rollout": {"batch": 6, "group_size": 2}, "train": {"steps": 4, "batch": 6}}
    sizes |= {"task": {"prompts": 40}, "selection": chosen, "loop": {"lag": lag}}
    sizes |= {"objective": STALE} if lag else {}
    runs = [
        burnish.train("sort", out=tmp_path / name, show=False, runtime=name, **sizes)
        for name in ("local", "ray")
    ]
    assert metrics(runs[0]) == metrics(runs[1])
    assert max(row.get("rollout/asked_per_used", 0) for row in runs[0].metrics) > 1
    for run in runs if lag else runs[1:]:
        found = verdict(run.path, load_recipe(str(run.path / "recipe.toml")))
        assert not found.problems, found
        assert found.dropped > 0


@pytest.mark.parametrize("name", [pytest.param("lag 1", marks=pytest.mark.extra), "dynamic"])
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


@pytest.mark.parametrize("engine", [pytest.param("sorter", marks=pytest.mark.extra), "native"])
@pytest.mark.parametrize("victim", ["generator-0", "scorer", "learner"])
def test_a_killed_actor_costs_time_alone(tmp_path: Path, victim: str, engine: str) -> None:
    """Also if another one dies with it: a generator after the learner, the learner after others.
    The native engine takes a step per token, so that samples are in flight."""
    recipe, given = "sort", SORT | {"objective": STALE}
    if engine == "native":
        recipe, given = "keywords", SORT | native.settings(tmp_path, groups=3)
    given = given | {"loop": {"lag": 1}}
    whole = burnish.train(recipe, out=tmp_path / "whole", show=False, **given)
    killed = []

    def show(progress: Progress) -> None:
        second = "generator-0" if victim == "learner" else "learner"
        due = {3: victim, 5: second}.get(progress.step)
        if progress.phase == "step" and due is not None and progress.step not in killed:
            killed.append(progress.step)
            os.kill(pid_of(tmp_path / "killed", due), signal.SIGKILL)

    run = burnish.train(recipe, out=tmp_path / "killed", show=show, runtime="ray", **given)
    assert killed == [3, 5]
    assert metrics(run) == metrics(whole)
    found = judge(run.path, batch=3, window=3)
    assert not found.problems, found
    assert found.steps == 6


@pytest.mark.parametrize("on_update", ["wait", "recompute", "keep"])
def test_free_running_keeps_its_bound(tmp_path: Path, on_update: str) -> None:
    loop = {"name": "free", "max_lag": 20, "on_update": on_update}
    run = burnish.train(
        "sort", out=tmp_path / "free", show=False, loop=loop, objective=STALE, runtime="ray", **SORT
    )
    found = judge(run.path, batch=3, window=3, max_lag=20)
    assert not found.problems, found
    assert found.steps == 6
    assert found.lag > 0


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
    found = judge(run.path, batch=3, window=3, max_lag=2)
    assert not found.problems, found
    assert found.steps == 6
    assert found.dropped > 0


@pytest.mark.parametrize("on_stale", [pytest.param("wait", marks=pytest.mark.extra), "drop"])
@pytest.mark.parametrize("engine", [pytest.param("sorter", marks=pytest.mark.extra), "native"])
def test_a_killed_generator_of_a_free_run_gets_its_groups_again(
    tmp_path: Path, engine: str, on_stale: str
) -> None:
    """A generator dies, then the learner, then the generator again: it must not get the groups of
    the incarnation before."""
    killed = []
    recipe, given = "sort", SORT | {"objective": STALE}
    if engine == "native":
        recipe, given = "keywords", SORT | native.settings(tmp_path, groups=3)

    def show(progress: Progress) -> None:
        victim = {2: "generator-1", 4: "learner", 5: "generator-1"}.get(progress.step)
        if progress.phase == "step" and victim is not None and progress.step not in killed:
            killed.append(progress.step)
            os.kill(pid_of(tmp_path / "free", victim), signal.SIGKILL)

    loop = {"name": "free", "max_lag": 20, "on_update": "keep", "on_stale": on_stale}
    runtime = {"name": "ray", "generators": 2, "threads": 1}
    run = burnish.train(
        recipe, out=tmp_path / "free", show=show, loop=loop, runtime=runtime, **given
    )
    found = verdict(run.path, load_recipe(str(run.path / "recipe.toml")))
    assert killed == [2, 4, 5]
    assert not found.problems, found
    assert (found.steps, found.restarts) == (6, 1)


def test_a_stopped_learner_is_reported(tmp_path: Path) -> None:
    """SIGSTOP leaves a process that is alive and answers nothing."""
    stopped = []

    def show(progress: Progress) -> None:
        if progress.phase == "step" and not stopped:
            stopped.append(pid_of(tmp_path / "run", "learner"))
            os.kill(stopped[0], signal.SIGSTOP)

    try:
        with pytest.raises(ActorError) as caught:
            train(tmp_path / "run", "ray", show=show, deadline=60)
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGKILL)
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
    found = judge(parts.path, batch=3, window=12, max_uses=2)
    assert not found.problems, found
