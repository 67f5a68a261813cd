"""Shared memory: room for weights is looked for first, and folders of dead processes go."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("ray", reason="the extra 'ray' is not installed")
from burnish import config, folders, machine, sizes
from burnish.actors import cluster
from burnish.actors.cast import LearnerPart
from burnish.actors.transport import Receiver, Sender, discard
from burnish.errors import ConfigError
from burnish.strategy import RuntimeConfig
from burnish.types import Weights

OWNER = """
import sys, time
from pathlib import Path
from burnish.folders import claim
folder = claim("run", Path(sys.argv[1]))
(folder.path / "weights").write_bytes(bytes(1000))
print(folder.path, flush=True)
time.sleep(60)
"""


def owner(root: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process that has a folder of shared memory, and its folder."""
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(root)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    with process.stdout as said:
        return process, Path(said.readline().strip())


def test_the_folders_of_dead_processes_are_removed_and_no_others(tmp_path: Path) -> None:
    (dead, lost), (living, kept) = owner(tmp_path), owner(tmp_path)
    own = folders.claim("run", tmp_path)
    (tmp_path / "burnish-run-without-lock").mkdir()
    (tmp_path / "another").mkdir()
    try:
        dead.send_signal(signal.SIGKILL)
        dead.wait(timeout=20)
        assert (lost / "weights").exists()
        assert folders.remove_dead(tmp_path) == [lost]
        assert folders.remove_dead(tmp_path) == []
        assert not lost.exists()
        assert (kept / "weights").exists()
        left = {"burnish-run-without-lock", "another", kept.name, own.path.name}
        assert {path.name for path in tmp_path.iterdir()} == left
    finally:
        living.kill()
        living.wait(timeout=20)
    own.remove()
    own.remove()
    assert not own.path.exists()


RACE = """
import sys
from pathlib import Path
from burnish.folders import claim, remove_dead
root = Path(sys.argv[1])
for _ in range(100):
    folder = claim("run", root)
    remove_dead(root)
    (folder.path / "weights").write_bytes(b"w")
    assert (folder.path / "weights").read_bytes() == b"w"
    folder.remove()
"""


def test_runs_that_begin_at_once_leave_each_other_alone(tmp_path: Path) -> None:
    """A folder is not locked for a moment after it was made."""
    command = [sys.executable, "-c", RACE, str(tmp_path)]
    runs = [subprocess.Popen(command) for _ in range(3)]
    assert [run.wait(timeout=60) for run in runs] == [0, 0, 0]


def test_weights_go_by_the_store_if_shared_memory_is_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "disk", lambda path: 64_000_000)
    how, why = cluster.choose(RuntimeConfig(), "cpu", 540_000_000)
    assert how == "store"
    assert "540 MB" in why
    assert "64 MB" in why
    assert "--shm-size" in why
    assert cluster.choose(RuntimeConfig(), "cpu", 64_000_000)[0] == "shared"
    with pytest.raises(ConfigError, match=r"'shared'.*/dev/shm.*64 MB.*540 MB.*or use 'auto'"):
        cluster.choose(RuntimeConfig(transport="shared"), "cpu", 540_000_000)
    assert cluster.choose(RuntimeConfig(transport="gloo"), "cpu", 540_000_000)[0] == "gloo"


def test_the_room_that_weights_need(smollm2: Path) -> None:
    """Weights of several versions at once, and a learner's state."""
    model = {"name": "scratch", "tokenizer": str(smollm2), "layers": 1, "width": 32, "heads": 4}
    given: dict[str, Any] = {"model": {**model, "d_ff": 48, "context": 128}, "task": "keywords"}
    given |= {"train": {"precision": "fp32", "log_kl": False}, "device": "cpu"}
    recipe = config.load(given)
    count = sizes.measured(recipe).parameters
    assert sizes.shared_memory(recipe) == (2 * 4 + 12) * count
    lagged = config.load(given, ["loop.lag=2", "objective.proximal=behavior"])
    assert sizes.shared_memory(lagged) == (4 * 4 + 12) * count
    changes = ["loop.name=free", "runtime.name=ray", "runtime.generators=3"]
    free = config.load(given, [*changes, "objective.proximal=behavior"])
    assert sizes.shared_memory(free) == (5 * 4 + 12) * count
    assert sizes.shared_memory(config.load("sort")) == sizes.LITTLE


def test_weights_travel_though_shared_memory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that was free at the start may be taken later; writing to it would end the process."""

    def full(*given: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sender, receiver = Sender("shared", str(tmp_path)), Receiver()
    first = sender.send(Weights(1, 0, {"a": torch.arange(5.0)}))
    monkeypatch.setattr(os, "posix_fallocate", full)
    second = sender.send(Weights(2, 0, {"a": torch.arange(6.0)}), in_use=[first.space])
    assert (first.is_file, second.is_file) == (True, False)
    for parcel, wanted in ((first, 5), (second, 6)):
        with receiver.opened(parcel, sender.data(parcel.space)) as weights:
            assert torch.equal(weights.tensors["a"], torch.arange(float(wanted)))
        discard(parcel)
    assert list(tmp_path.iterdir()) == []


def test_a_new_learner_removes_the_weights_of_a_dead_one(tmp_path: Path) -> None:
    learner = FakeLearner()
    dead = LearnerPart(learner, print, "shared", str(tmp_path))
    old, older = dead.weights(0, []), None
    older, old = old, dead.weights(0, [old.space])
    new = LearnerPart(learner, print, "shared", str(tmp_path))
    parcel = new.weights(1, [old.space])
    assert {str(path) for path in tmp_path.iterdir()} == {old.space, parcel.space}
    assert older.space != old.space
    again = new.weights(1, [old.space, parcel.space])
    assert {str(path) for path in tmp_path.iterdir()} == {old.space, parcel.space, again.space}


class FakeLearner:
    """A learner of one tensor."""

    version = 0

    @property
    def policy(self) -> FakeLearner:
        return self

    def probe(self) -> tuple[float, ...]:
        return ()

    def weights(self) -> Weights:
        return Weights(0, 0, {"a": torch.zeros(3)})
