"""Ranks of a mesh as actors of Ray learn what one process learns."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

import burnish
from burnish.console.progress import Progress
from burnish.errors import ConfigError
from burnish.runs import checkpoints
from burnish.runs.metrics import iterate_rows
from tests.integration.ray.test_faults import descendants

MODEL = {"name": "scratch", "tokenizer": "bytes", "layers": 1, "width": 16, "heads": 2, "d_ff": 24}


def score(text: str, row: object = None) -> float:
    return sum(map(ord, text)) % 97 / 97


def test_a_group_of_rays_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="'gloo' can't be combined with a mesh"):
        burnish.train("keywords", runtime={"name": "ray", "transport": "gloo"}, mesh={"shard": 2})


RANKS = {"runtime": {"name": "ray", "threads": 1}, "mesh": {"shard": 2}}


def train(path: Path, **more: Any) -> list[float]:
    """Runs four steps -> the gradient norm of each."""
    settings = {
        "prompts": [f"say {n}" for n in range(8)],
        "reward": score,
        "show": False,
        "task": {"chat": False},
        "model": MODEL,
        "rollout": {"batch": 8, "group_size": 4, "max_tokens": 8},
        "train": {"steps": 4, "batch": 8, "log_kl": True, "precision": "fp32"},
        "engine": {"kv_mb": 16},
        "validation": {"every": 4},
        "checkpoint": {"every": 2},
    }
    run = burnish.train("keywords", out=path, **(settings | more))
    assert all(
        saved.is_dir() == ("mesh" in more) for saved in checkpoints.list_checkpoints(run.path)
    )
    rows = iterate_rows(run.path / "metrics.jsonl")
    return [row["train/grad_norm"] for row in rows if "train/grad_norm" in row]


class Kill:
    """Kills rank 1 after the third step, and keeps the notes that the run tells."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.killed: float | None = None
        self.told: float | None = None

    def show(self, progress: Progress) -> None:
        if progress.phase == "note":
            self.notes.append(progress.doing)
            if self.killed is not None and self.told is None:
                self.told = time.monotonic()
        if progress.phase == "step" and progress.step == 3 and self.killed is None:
            family = descendants(os.getpid())
            (rank,) = [pid for pid, name in family.items() if name.startswith("ray::Rank")]
            os.kill(rank, signal.SIGKILL)
            self.killed = time.monotonic()


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="it finds ranks by /proc")
def test_ranks_are_actors_and_a_killed_one_is_named_and_started_again(tmp_path: Path) -> None:
    """fp32: the sums of two ranks are rounded in another order."""
    kill = Kill()
    alone = train(tmp_path / "alone")
    meshed = train(tmp_path / "mesh", show=kill.show, **RANKS)
    assert meshed == pytest.approx(alone, rel=1e-4)
    assert min(alone) > 0
    assert any("rank-1 died" in note for note in kill.notes), kill.notes
    assert kill.killed is not None
    assert kill.told is not None
    assert kill.told - kill.killed < 20
    assert (tmp_path / "mesh" / "restarts.txt").read_text() == "from step 2\n"
