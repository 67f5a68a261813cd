"""Episodes on Ray: the same bytes as in one process, whoever dies, and no process is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import burnish
from burnish.console.progress import Progress
from burnish.runs.ledger import judge
from tests.environments.conftest import alive, descendants, gone
from tests.integration.ray.test_runs import metrics, pid_of
from tests.integration.test_episode_run import EPISODES, GAME, STALE
from tests.loops.test_recorder import fingerprint

pytestmark = pytest.mark.slow

LAG = [*STALE, "loop.lag=1"]
TURNS = ["objective.advantage=turn_mean", "task.turn_temperatures=[1.5,0.7]"]
VINE = [
    *("objective.advantage=vine", "objective.advantage.steps=turns"),
    "objective.advantage.continuations=2",
]
APART = ["runtime=ray", "runtime.generator.cpus=0", "runtime.learner.cpus=0"]
SAME = ("metrics.jsonl", "rollouts.jsonl", "checkpoints/step-00000003")
MARKED = GAME.replace(
    "        self.heard, self.seed",
    "        open(f'{row[\"folder\"]}/{os.getpid()}', 'w').close()\n        self.heard, self.seed",
).replace("        self.heard.append", "        time.sleep(0.1)\n        self.heard.append")
"""Each process of an episode leaves a file with its number, and each turn takes a while."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "pids").mkdir()
    rows = [{"n": n, "folder": str(tmp_path / "pids")} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "game.py").write_text(MARKED)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(folder: Path, *more: str) -> list[str]:
    """The settings of a run, with absolute paths: actors have a directory of their own."""
    own = [f"task.environment={folder / 'game.py'}:Game", f"task.train={folder / 'rows.jsonl'}"]
    return [*EPISODES, *own, *more]


def played(folder: Path) -> list[int]:
    """The processes of all episodes so far."""
    return [int(file.name) for file in (folder / "pids").iterdir()]


def train(folder: Path, name: str, *more: str, **given: object) -> burnish.Run:
    given = {"show": False, **given}
    return burnish.train(
        "keywords", overrides=settings(folder, *more), out=folder / name / "run", **given
    )


@pytest.mark.parametrize(
    "more",
    [
        pytest.param([], marks=pytest.mark.extra),
        [*LAG, "task.live=3"],
        pytest.param(
            ["selection.dead_groups=active", "selection.on_bound=learn", *LAG],
            marks=pytest.mark.extra,
        ),
        [*TURNS, "selection.dead_groups=drop", *LAG],
        pytest.param(["objective.advantage=remax", "task.live=5", *LAG], marks=pytest.mark.extra),
        [*VINE, *LAG],
    ],
    ids=["sync", "lag", "active", "turns", "remax", "vine"],
)
@pytest.mark.usefixtures("cluster")
def test_the_same_bytes_as_in_one_process(folder: Path, more: list[str]) -> None:
    runs = [train(folder, "local", *more), train(folder, "ray", *more, *APART)]
    local, remote = (fingerprint(run.path) for run in runs)
    assert set(SAME) <= local.keys()
    for name in SAME:
        assert remote[name] == local[name], name
    assert all(map(gone, played(folder)))


@pytest.mark.usefixtures("cluster")
def test_a_mesh_learns_from_episodes(folder: Path) -> None:
    """What one process learns, up to the order of sums."""
    mesh = ["mesh.shard=2", "runtime.threads=1", *APART]
    local, remote = train(folder, "local"), train(folder, "mesh", *mesh)
    for one, other in zip(local.metrics[1:], remote.metrics[1:], strict=True):
        assert other["train/grad_norm"] == pytest.approx(one["train/grad_norm"], rel=1e-3)
        assert other["mismatch/logprob_mean"] < 1e-5
    assert all(map(gone, played(folder)))


@pytest.mark.parametrize(
    "victim", [pytest.param("generator-0", marks=pytest.mark.extra), "learner"]
)
@pytest.mark.usefixtures("cluster")
def test_a_killed_actor_costs_time_alone(folder: Path, victim: str) -> None:
    """Its episodes are sampled again with the same tokens, also if another actor dies later, and
    their first processes end."""
    more = [*LAG, "train.steps=6", "checkpoint.every=2"]
    whole = train(folder, "whole", *more)
    killed = []

    def show(progress: Progress) -> None:
        second = "generator-0" if victim == "learner" else "learner"
        due = {2: victim, 4: second}.get(progress.step)
        if progress.phase == "step" and due is not None and progress.step not in killed:
            killed.append(progress.step)
            time.sleep(0.2)  # episodes of the next rollout are under way
            os.kill(pid_of(folder / "killed" / "run", due), signal.SIGKILL)

    run = train(folder, "killed", *more, *APART, show=show)
    assert killed == [2, 4]
    assert metrics(run) == metrics(whole)
    found = judge(run.path, batch=2, window=2)
    assert not found.problems, found
    assert all(map(gone, played(folder)))


@pytest.mark.parametrize("on_update", ["wait", "keep"])
@pytest.mark.usefixtures("cluster")
def test_a_free_loop_keeps_its_bound(folder: Path, on_update: str) -> None:
    loop = [*STALE, "loop.name=free", "loop.max_lag=2", f"loop.on_update={on_update}"]
    pace = "free" if on_update == "keep" else "lockstep"
    loop.append(f"task.pace={pace}")
    run = train(folder, "free", *loop, "train.steps=6", "runtime.generators=2", *APART)
    found = judge(run.path, batch=2, window=2, max_lag=2)
    assert not found.problems, found
    assert found.steps == 6
    rows = [json.loads(line) for line in (run.path / "rollouts.jsonl").read_text().splitlines()]
    assert {len(row["turns"]) for row in rows} == {3}
    fresh = [step.get("mismatch/logprob_mean") for step in run.metrics[1:]]
    if on_update == "wait":
        assert max(value for value in fresh if value is not None) < 1e-5


@pytest.mark.parametrize(
    "loop",
    [LAG, pytest.param([*STALE, "loop.name=free"], marks=pytest.mark.extra)],
    ids=["lagged", "free"],
)
def test_sigterm_leaves_no_environment(folder: Path, loop: list[str]) -> None:
    more = [*loop, "train.steps=100000", "checkpoint.every=100000", *APART]
    sets = [word for setting in settings(folder, *more) for word in ("--set", setting)]
    command = [sys.executable, "-m", "burnish", "train", "keywords", *sets, "--quiet"]
    run = subprocess.Popen([*command, "--out", "run"], cwd=folder, start_new_session=True)
    file, end = folder / "run" / "metrics.jsonl", time.monotonic() + 120
    while not (file.exists() and len(file.read_text().splitlines()) > 2):
        assert run.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    while not any(map(alive, played(folder))):  # episodes are under way
        time.sleep(0.01)
    below = descendants(run.pid)
    run.send_signal(signal.SIGTERM)
    assert run.wait(120) == 143
    assert list(folder.glob("run/checkpoints/step-*"))
    assert all(gone(pid, 20) for pid in [*below, *played(folder)])
