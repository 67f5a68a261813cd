"""Runs whose steps are valued by continuations: resumed bit for bit, with lag and with actors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from burnish import api
from burnish.runs import checkpoints
from tests.loops.test_recorder import stopper, tiny

STALE = ["loop.lag=1", "objective.proximal=behavior", "objective.loss=clip"]
STALE += ["rollout.repetition_penalty=1.3", "rollout.min_p=0.01", "rollout.truncated=true"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


REWARD = """
def mixed(response, row):
    return sum(map(ord, response)) % 7 / 6
"""
PROMPTS = [{"prompt": f"Say {word}."} for word in "abcdefghij"]


def train(path: Path, *more: str, **how: Any) -> Path:
    """A small random transformer over bytes; the reward differs between responses."""
    reward = path.parent / "reward.py"
    reward.write_text(REWARD)
    steps = ["objective.advantage=vine", "objective.advantage.steps=2", "objective.kl=none"]
    cost = ["objective.advantage.continuations=2", "train.steps=3", "log.rollouts=8"]
    given = [s for s in tiny("bytes", *steps, *cost, *more) if not s.startswith("task.")]
    given += ["task.chat=false", "task.validation_rows=2"]
    how |= {"prompts": PROMPTS, "reward": f"{reward}:mixed", "overrides": given}
    return api.train("keywords", **how, out=path, show=False).path


def rows(path: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path / name).read_text().splitlines()]


def test_a_run_learns_from_the_gains_of_steps(tmp_path: Path) -> None:
    path = train(tmp_path / "run")
    metrics = rows(path, "metrics.jsonl")[1:]
    written = rows(path, "rollouts.jsonl")
    for row in metrics:
        own = [r for r in written if r["step"] == row["step"]]
        # A response of 6 tokens has steps at 0, 2 and 4, one of 5 too, one of 4 at 0 and 2.
        lengths = [len(r["tokens"]) for r in own]
        assert row["rollout/steps_per_response"] == np.mean([-(-n // 2) for n in lengths])
        assert [[s for s, _ in r["steps"]] for r in own] == [list(range(0, n, 2)) for n in lengths]
        # Two continuations from each of tokens 2 and 4, which have up to 4 and 2 tokens.
        assert 0 < row["rollout/continuation_tokens"] <= 8 * 2 * (4 + 2)
    assert len({row["advantage"] for row in written}) > 10
    for row in written:
        # The value before the first step is the mean reward of the others.
        same = [r for r in written if (r["step"], r["group"]) == (row["step"], row["group"])]
        others = [r["reward"] for r in same if r["sample"] != row["sample"]]
        assert row["steps"][0][1] == pytest.approx(np.mean(others))
        # The mean advantage over tokens, from the values.
        after = [value for _, value in row["steps"][1:]] + [row["reward"]]
        gains = [b - a for (_, a), b in zip(row["steps"], after, strict=True)]
        places = [min(t // 2, len(gains) - 1) for t in range(len(row["tokens"]))]
        mean = np.mean([gains[place] for place in places])
        assert row["advantage"] == pytest.approx(mean, abs=1e-6)


def test_stopped_and_resumed_equals_never_stopped(tmp_path: Path) -> None:
    """With a rollout in flight, whose values the checkpoint holds."""
    whole = train(tmp_path / "whole", *STALE)
    path = train(tmp_path / "run", *STALE, stop=stopper(1))
    tensors, _ = checkpoints.load_checkpoint(checkpoints.latest(path))
    assert "groups.values" in tensors
    api.resume(path, show=False)
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        assert (path / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.slow
def test_generators_on_ray_value_steps_alike(tmp_path: Path) -> None:
    """One generator, one thread each: the same bits as in one process."""
    local = train(tmp_path / "local", *STALE, "train.steps=2")
    apart = ["runtime=ray", "runtime.threads=1", "runtime.generator.cpus=0"]
    apart += ["runtime.learner.cpus=0"]
    remote = train(tmp_path / "ray", *STALE, *apart, "train.steps=2")
    assert (local / "metrics.jsonl").read_bytes() == (remote / "metrics.jsonl").read_bytes()
