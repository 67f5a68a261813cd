"""Ranks of a mesh as actors of Ray learn what one process learns."""

from __future__ import annotations

from pathlib import Path

import pytest

import burnish
from burnish.actors import cluster
from burnish.errors import ConfigError
from burnish.runs import checkpoints
from burnish.runs.metrics import iterate_rows
from burnish.strategy import RuntimeConfig

MODEL = {"name": "scratch", "tokenizer": "bytes", "layers": 1, "width": 16, "heads": 2, "d_ff": 24}


def score(text: str, row: object = None) -> float:
    return sum(map(ord, text)) % 97 / 97


def test_each_rank_needs_the_learners_resources() -> None:
    there = {"CPU": 3.0}
    assert cluster.lacking(RuntimeConfig(name="ray"), there, 2) is None
    assert "need 4 CPU" in str(cluster.lacking(RuntimeConfig(name="ray"), there, 3))


def test_a_group_of_rays_own_is_refused() -> None:
    with pytest.raises(ConfigError, match="'gloo' can't go with a mesh"):
        burnish.train("keywords", runtime={"name": "ray", "transport": "gloo"}, mesh={"shard": 2})


@pytest.mark.slow
@pytest.mark.usefixtures("cluster")
def test_ranks_are_actors(tmp_path: Path) -> None:
    """fp32: the sums of two ranks are rounded in another order."""
    settings = {
        "prompts": [f"say {n}" for n in range(8)],
        "reward": score,
        "show": False,
        "model": MODEL,
        "rollout": {"batch": 8, "group_size": 4, "max_tokens": 8},
        "train": {"steps": 3, "batch": 8, "log_kl": True},
        "engine": {"kv_mb": 16},
        "validation": {"every": 3},
        "checkpoint": {"every": 2},
    }
    ranks = {"runtime": {"name": "ray", "threads": 1}, "mesh": {"shard": 2}}
    task = {"task": {"chat": False}}
    alone = burnish.train("keywords", out=tmp_path / "alone", **settings, **task)
    meshed = burnish.train("keywords", out=tmp_path / "mesh", **settings, **task, **ranks)
    norms = [
        [row.get("train/grad_norm", 0.0) for row in iterate_rows(run.path / "metrics.jsonl")]
        for run in (alone, meshed)
    ]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)
    assert max(norms[0]) > 0
    assert all(path.is_dir() for path in checkpoints.all_of(meshed.path))
