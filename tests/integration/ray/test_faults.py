"""Kills of all kinds, and a Ray that dies or is full. Nothing hangs, and no data is lost."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.cli.chaos import verdict
from burnish.console.progress import Progress
from burnish.recipe.load import load_recipe
from tests.integration.ray import native

pytestmark = pytest.mark.slow

STEPS = 40
ACTORS = ("ray::Generator", "ray::Scorer", "ray::Learner")


class Kills:
    """Kills actors of a run, in turn, each at a random moment after a step of its own."""

    def __init__(self, run: Path, names: list[str], count: int, seed: int) -> None:
        self.run, self.killed = run, list[str]()
        self._due = [names[number % len(names)] for number in range(count)]
        self._chance, self._last = random.Random(seed), 0

    def show(self, progress: Progress) -> None:
        if progress.phase != "step" or not self._due or progress.step == self._last:
            return
        self._last = progress.step
        actors = json.loads((self.run / "actors.json").read_text())
        pid = actors.get(self._due[0], {}).get("pid")
        if pid is not None and is_alive(pid):
            self.killed.append(self._due.pop(0))
            threading.Timer(self._chance.uniform(0, 0.3), kill, [pid]).start()


def kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def is_alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def rewards(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["rollout/reward"] for row in rows if "rollout/reward" in row]


SORTER: dict[str, Any] = {"objective": {"proximal": "behavior"}, "train": {"steps": STEPS}}
"""It completes a request in one step."""


def check_kills(path: Path, seed: int, loop: dict[str, Any], engine: str) -> None:
    """Ten kills over all kinds of actor leave every step, every group, and a rising reward."""
    names = ["generator-0", "learner", "scorer", "generator-1"]
    kills = Kills(path / "run", names, 10, seed)
    recipe, given = "sort", SORTER
    if engine == "native":
        recipe, given = "keywords", native.settings(path, steps=STEPS // 2)
    runtime = {"name": "ray", "generators": 2, "threads": 1}
    more = {"loop": loop, "runtime": runtime, "checkpoint": {"every": 2}, "seed": seed}
    run = burnish.train(recipe, out=path / "run", show=kills.show, **given, **more)
    assert len(kills.killed) == 10
    found = verdict(run.path, load_recipe(str(run.path / "recipe.toml")))
    assert not found.problems, found
    assert found.steps == given["train"]["steps"]
    reward = rewards(run.path)
    assert len(reward) == found.steps
    if engine == "sorter":
        assert sum(reward[-10:]) > sum(reward[:10])


@pytest.mark.extra
@pytest.mark.parametrize("engine", ["sorter", "native"])
@pytest.mark.usefixtures("cluster")
def test_ten_kills_of_a_run_with_lag(tmp_path: Path, engine: str) -> None:
    check_kills(tmp_path, 0, {"lag": 1}, engine)


@pytest.mark.parametrize("engine", [pytest.param("sorter", marks=pytest.mark.extra), "native"])
@pytest.mark.usefixtures("cluster")
def test_ten_kills_of_a_free_run(tmp_path: Path, engine: str) -> None:
    loop = {"name": "free", "max_lag": 20, "on_update": "keep"}
    check_kills(tmp_path, 1, loop, engine)


def descendants(pid: int) -> dict[int, str]:
    """The names of all processes that a process has started, by their numbers."""
    parents: dict[int, tuple[int, str]] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                head, _, rest = (folder / "stat").read_text(encoding="utf-8").rpartition(")")
                parents[int(folder.name)] = int(rest.split()[1]), head.partition("(")[2]
    found = {pid: ""}
    for _ in range(8):
        found |= {child: name for child, (parent, name) in parents.items() if parent in found}
    del found[pid]
    return found


def wait_for(what: Callable[[], Any], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.2)
    return found


@pytest.fixture
def run_of_its_own(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A long run on a Ray of its own, in another process, that has finished a few steps."""
    path = tmp_path / "run"
    start = [sys.executable, "-c", "from burnish.cli.main import main; main()"]
    command = [*start, "train", "sort", "--runtime", "ray", "--quiet"]
    more = ["--set", "train.steps=100000", "--set", "checkpoint.every=1", "--out", str(path)]
    process = subprocess.Popen(
        [*command, *more], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        wait_for(lambda: (path / "actors.json").exists(), 120)
        yield process, path
    finally:
        for pid in [process.pid, *descendants(process.pid)]:
            kill(pid)
        process.communicate()


def test_a_dead_head_node_ends_in_a_clear_error(
    run_of_its_own: tuple[subprocess.Popen[str], Path],
) -> None:
    """Ray alone would end the process a minute later, without a word."""
    process, path = run_of_its_own
    family = descendants(process.pid)
    (head,) = [pid for pid, name in family.items() if name == "gcs_server"]
    kill(head)
    said, _ = process.communicate(timeout=45)
    assert process.returncode == 1
    assert "Ray's head node at" in said
    assert "no longer answers" in said
    assert "burnish resume" in said
    assert "Traceback" not in said
    assert list((path / "checkpoints").glob("step-*"))
    # Ray's own agents end a minute later.
    ours = [pid for pid, name in family.items() if name in ("raylet", *ACTORS)]
    assert len(ours) == 4
    wait_for(lambda: not any(map(is_alive, ours)), 30)


def run_apart(code: str, *arguments: object) -> str:
    """What a script prints that starts a Ray of its own."""
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


FULL = """
import sys, ray, burnish
from burnish.errors import ActorError
config = {"automatic_object_spilling_enabled": False, "local_fs_capacity_threshold": 0.0}
ray.init("local", num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False,
         log_to_driver=False, logging_level="error", _system_config=config)
try:
    burnish.train("sort", out=sys.argv[1], show=False, model={"width": 3000},
                  runtime={"name": "ray", "transport": "store"}, train={"steps": 2})
except ActorError as error:
    print(error)
ray.shutdown()
"""


def test_a_full_object_store_ends_in_a_clear_error(tmp_path: Path) -> None:
    said = run_apart(FULL, tmp_path / "run")
    assert "Ray's object store is full" in said
    assert "object-store-memory" in said


NODES = """
import json, os, sys, time, ray, burnish
from pathlib import Path
from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=2, resources={"sampling": 2}) for _ in range(2)]
path, victims = Path(sys.argv[1]), []


def show(progress):
    if progress.phase == "step" and progress.step == 3 and not victims:
        places = json.loads((path / "killed" / "actors.json").read_text())
        assert len({places[f"generator-{k}"]["node"] for k in range(2)}) == 2, places
        victims.append(places["generator-1"]["node"])
        (dead,) = [node for node in nodes if node.node_id == victims[0]]
        cluster.remove_node(dead, allow_graceful=False)
        # A worker ends a moment after its node, and this run's last steps take less than that.
        deadline = time.monotonic() + 60
        while os.path.exists(f"/proc/{places['generator-1']['pid']}"):
            assert time.monotonic() < deadline, "the worker lived on without its node"
            time.sleep(0.05)


def train(name, show):
    runtime = {"name": "ray", "address": cluster.address, "generators": 2,
               "generator": {"custom": {"sampling": 1}}}
    burnish.train("sort", out=path / name, show=show, runtime=runtime, loop={"lag": 1},
                  objective={"proximal": "behavior"}, train={"steps": 6}, checkpoint={"every": 2})
    return (path / name / "metrics.jsonl").read_text()


whole = train("whole", False)
killed = train("killed", show)
assert victims and whole == killed
places = json.loads((path / "killed" / "actors.json").read_text())
assert victims[0] not in {place["node"] for place in places.values()}, places
print("survived")
cluster.shutdown()
"""


def test_a_killed_node_is_survived(tmp_path: Path) -> None:
    """Two nodes hold a generator each; the one that is killed moves to the other."""
    assert "survived" in run_apart(NODES, tmp_path)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere"])
def test_an_address_without_a_cluster_is_refused_at_once(address: str) -> None:
    code = (
        "import sys; from burnish.cli.main import main; sys.argv[1:1] = ['train', 'sort']; main()"
    )
    command = [sys.executable, "-c", code, "--runtime", "ray", "--address", address]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert f"runtime.address = '{address}': no Ray cluster answers there" in done.stderr
    assert "Traceback" not in done.stderr


VERSION = """
import json, ray
from ray.cluster_utils import Cluster
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put
from burnish.recipe import runtime as strategy
from burnish.actors import cluster as ours
from burnish.errors import ClusterError

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
ray.init(cluster.address, log_to_driver=False)
told = {"namespace": b"cluster"}
known = json.loads(_internal_kv_get(b"CLUSTER_METADATA", **told))
changed = json.dumps(known | {"ray_version": "2.0.0"}).encode()
_internal_kv_put(b"CLUSTER_METADATA", changed, overwrite=True, **told)
ray.shutdown()
try:
    ours.start_or_join(strategy.RayRuntime(address=cluster.address))
except ClusterError as error:
    print(error)
cluster.shutdown()
"""


def test_another_version_of_ray_is_refused() -> None:
    said = run_apart(VERSION)
    assert "a different version of Ray" in said
    assert "2.0.0" in said
