"""Runs on tasksets of the package verifiers: what is learned was sampled, and what is not."""

import json
from pathlib import Path

import pytest

from burnish import api
from burnish.environments import taskset
from burnish.errors import ConfigError, GraderError, MissingExtra
from burnish.launch.preflight import check_rows, check_task_extras
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import make_plan

FOLDER = Path(__file__).parents[1] / "tasksets"
LETTERS = [
    "task.name=verifiers", f"task.taskset={FOLDER}/letters.py", "task.validation_rows=2",
    "task.turn_tokens=6", "model=scratch", "model.tokenizer=bytes", "model.layers=1",
    "model.width=32", "model.heads=4", "model.d_ff=48", "model.context=128", "rollout.batch=8",
    "rollout.group_size=4", "train.batch=8", "device=cpu", "rollout.max_tokens=60",
    "validation.every=10", "train.precision=fp32", "engine.precision=fp32", "engine.kv_mb=16",
    "log.rollouts=8", "train.learning_rate=1e-2", "objective.kl=none", "train.steps=2",
]  # fmt: skip
needs_verifiers = pytest.mark.skipif(
    not taskset.is_installed(), reason="the extra 'verifiers' is not installed"
)


def recorded(run):
    return [json.loads(line) for line in Path(run, "rollouts.jsonl").read_text().splitlines()]


@needs_verifiers
@pytest.mark.slow
def test_a_taskset_trains_for_ten_steps(tmp_path):
    """Each answer of the two turns is learned once, with the probability that it was sampled
    with."""
    run = api.train("keywords", overrides=[*LETTERS, "train.steps=10"], out=tmp_path / "run")
    steps = run.metrics[1:]
    assert len(steps) == 10
    for step in steps:
        assert step["mismatch/logprob_mean"] < 1e-5
        assert step["mismatch/logprob_max"] < 1e-4
    rows = recorded(run)
    assert rows
    for row in rows:
        assert row["status"] == "scored", row
        assert len(row["turns"]) == 2
        said = "".join(turn["text"] for turn in row["turns"])
        letter = row["question"].removeprefix("Write ")[0]
        assert row["reward"] == pytest.approx(said.count(letter) / max(1, len(said)))
