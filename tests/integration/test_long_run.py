"""Think budgets, length penalties and masked responses in a run that lags, replays and resumes."""

import json
from pathlib import Path
from string import ascii_lowercase

import pytest

from burnish import api
from tests.loops.test_recorder import fingerprint, stopper

BYTES = [
    "task.chat=false", "task.must_end=false", "task.validation_prompts=2", "device=cpu",
    "model=scratch", "model.tokenizer=bytes", "model.layers=1", "model.width=32", "model.heads=4",
    "model.d_ff=48", "rollout.batch=8", "rollout.group_size=4", "train.batch=8", "train.steps=3",
    "rollout.max_tokens=16", "checkpoint.every=1", "validation.every=3",
    "train.precision=fp32",
]  # fmt: skip
LONG = ["rollout.think.tokens=5", "rollout.think.end=:", "rollout.think.phrase=so:"]
LONG += ["length=solve_rate", "rollout.overlong=mask", f"rollout.stop={list(ascii_lowercase)}"]
STALE = ["loop.lag=1", "objective.loss=clip", "objective.proximal=behavior"]
STALE += ["buffer.capacity=4", "buffer.max_uses=2", "buffer.order=uniform"]


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], STALE], ids=["synchronous", "lagged and replayed"])
def test_stopped_and_resumed_equals_never_stopped(more, tmp_path):
    overrides = [*BYTES, *LONG, *more]
    whole = api.train("keywords-scratch", overrides=overrides, out=tmp_path / "a" / "run")
    api.train("keywords-scratch", overrides=overrides, out=tmp_path / "b" / "run", stop=stopper(1))
    api.resume(tmp_path / "b" / "run")
    assert fingerprint(tmp_path / "a" / "run") == fingerprint(tmp_path / "b" / "run")
    steps = whole.metrics[1:]
    assert any(0 < step["rollout/overlong"] < 1 for step in steps)
    assert all(step["rollout/part_length"] < 0 for step in steps)
    assert all(step.get("mismatch/logprob_max", 0) < 1e-4 for step in steps)
    lines = Path(tmp_path / "a" / "run" / "rollouts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    put = [row for row in rows if row["forced"]]
    assert put
    assert all("".join(row["tokens"][5:8]) == "so:" for row in put)
    assert all(row["forced"] == [5, 6, 7] for row in put)
