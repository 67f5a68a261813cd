"""Runs of all loops that end early, because a validation metric no longer improves."""

import json
import shutil

import pytest

from burnish import api
from burnish.runs import checkpoints
from tests.loops.test_recorder import LAGGED, fingerprint, one_thread, stopper  # noqa: F401
from tests.loops.test_supervised import settings

NEVER = ["validation.every=2", "validation.patience=2", "checkpoint.every=3"]
"""With a metric that can't improve, a run ends after step 4."""
LENGTH = [*NEVER, "validation.metric=validation/length", "train.steps=30", "train.epochs=2"]
WHY = "validation/length has not improved in 2 validations since step 0"


def last_step(run):
    return run.metrics[-1]["step"]


def go_back_to(run, step):
    """Make a run look as if it had been killed at its end, and leave only older checkpoints."""
    for path in checkpoints.list_checkpoints(run.path):
        if checkpoints.step_of(path) > step:
            path.unlink()
    (run / "summary.json").unlink(missing_ok=True)


@pytest.mark.parametrize("more", [[], LAGGED], ids=["sync", "lagged"])
def test_stopped_or_killed_and_resumed_equals_never_stopped(more, tmp_path):
    asked = {"overrides": [*LENGTH, *more], "show": False}
    whole = api.train("sort", out=tmp_path / "whole", **asked)
    assert last_step(whole) == 4
    stopped = api.train("sort", out=tmp_path / "stopped", stop=stopper(3), **asked)
    api.resume(stopped, show=False)
    assert fingerprint(stopped) == fingerprint(whole)
    killed = tmp_path / "killed"
    shutil.copytree(whole.path, killed)
    killed = api.Run(killed)
    go_back_to(killed, 3)
    api.resume(killed, show=False)
    assert fingerprint(killed) == fingerprint(whole)


@pytest.mark.slow
def test_a_supervised_run_ends_early_by_its_loss(smollm2, tmp_path):
    goal = ["validation.metric=validation/loss", "validation.goal=max"]  # the loss falls
    asked = settings(smollm2, tmp_path, *NEVER, *goal)
    whole = api.train("sft", overrides=asked, out=tmp_path / "whole", show=False)
    assert last_step(whole) == 4
    assert whole.best.score == whole.metrics[4]["validation/loss"]
    run = api.train("sft", overrides=asked, out=tmp_path / "run", stop=stopper(3), show=False)
    api.resume(run, show=False)
    assert fingerprint(run) == fingerprint(whole)
    asked = settings(smollm2, tmp_path, *NEVER)
    falling = api.train("sft", overrides=asked, out=tmp_path / "falling", show=False)
    assert last_step(falling) == 8
    assert falling.best.score == -min(
        row["validation/loss"] for row in falling.metrics if "validation/loss" in row
    )


@pytest.mark.slow
@pytest.mark.parametrize("loop", ["lagged", pytest.param("free", marks=pytest.mark.extra)])
def test_a_run_on_ray_ends_early(loop, tmp_path):
    pytest.importorskip("ray", reason="ray is not installed")
    given = {"loop": {"name": "free", "max_lag": 20}, "objective": {"proximal": "behavior"}}
    if loop == "lagged":
        given = {}
    run = api.train(
        "sort", overrides=LENGTH, out=tmp_path / "run", show=False, runtime="ray", **given
    )
    assert last_step(run) == 4
    assert json.loads((run / "summary.json").read_text())["ended_early"] == WHY
    if loop == "lagged":
        local = api.train("sort", overrides=LENGTH, out=tmp_path / "local", show=False)
        assert run.metrics == local.metrics
    api.resume(run, show=False)
    assert last_step(run) == 4
