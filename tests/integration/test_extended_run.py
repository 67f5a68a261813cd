"""A lagged run that is given more steps later equals a run that had them from the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import burnish
from burnish.errors import DataError
from burnish.runs import checkpoints

FEW = {"rollout": {"batch": 6, "group_size": 2}, "task": {"prompts": 40}}
"""Groups of two, of which many are dead."""
BUFFER = {"buffer": {"capacity": 9, "order": "weighted", "max_uses": 2}}
SETTINGS: dict[str, dict[str, Any]] = {
    "lag 1": {},
    "lag 2": {"loop": {"lag": 2}},
    "buffer": BUFFER,
    "drop": FEW | {"selection": {"dead_groups": "drop"}},
    "drop, buffer": FEW | BUFFER | {"selection": {"dead_groups": "drop"}},
    "dynamic": FEW
    | {"selection": {"dead_groups": "dynamic", "leave_at": 0.5, "on_bound": "learn"}},
    "active": FEW | {"loop": {"lag": 2}, "selection": {"dead_groups": "active"}},
}


def train(path: Path, steps: int, settings: dict[str, Any], runtime: str = "local") -> burnish.Run:
    own: dict[str, Any] = {"loop": {"lag": 1}, "objective": {"proximal": "behavior"}} | settings
    sizes = {"batch": settings["rollout"]["batch"]} if "rollout" in settings else {}
    own["train"] = {"steps": steps, "schedule": "constant"} | sizes
    own |= {"validation": {"every": 1}, "checkpoint": {"every": 3}, "runtime": runtime}
    return burnish.train("sort", out=path, show=False, **own)


def assert_same(one: burnish.Run, other: burnish.Run) -> None:
    for name in ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl", "log.txt"):
        assert (one.path / name).read_text() == (other.path / name).read_text(), name
    (ours, numbers), (theirs, same) = (
        checkpoints.load_checkpoint(checkpoints.latest(run.path)) for run in (one, other)
    )
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    for key in ("step", "learner", "prompts", "groups", "uses"):
        assert numbers[key] == same[key], key


@pytest.mark.parametrize("name", SETTINGS)
def test_an_extended_run_equals_a_long_one(tmp_path: Path, name: str) -> None:
    whole = train(tmp_path / "whole", 6, SETTINGS[name])
    parts = train(tmp_path / "parts", 3, SETTINGS[name])
    assert (parts.path / "summary.json").exists()
    if name == "lag 1":
        burnish.resume(parts.path, overrides=["train.steps=4"], show=False)
    burnish.resume(parts.path, overrides=["train.steps=6"], show=False)
    assert_same(parts, whole)


def test_a_run_that_needs_no_more_prompts_ends_without_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All prompts have left when the last rollout that is learned from was issued."""
    from burnish.tasks.stream import PromptStream

    real = PromptStream.take

    def take(self: PromptStream, count: int) -> Any:
        if self.next_index >= 9:
            raise DataError("none is left to ask")
        return real(self, count)

    monkeypatch.setattr(PromptStream, "take", take)
    run = train(tmp_path / "run", 3, {})
    assert (run.path / "summary.json").exists()
    with pytest.raises(DataError, match="none is left to ask"):
        burnish.resume(run.path, overrides=["train.steps=4"], show=False)
