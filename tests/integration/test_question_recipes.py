"""The recipes calculator and search at a tiny size: a warm start on their own rows, and training in
which every sampled token has the sampler's log-probability, whatever was inserted before it."""

import json
from itertools import islice
from pathlib import Path

import pytest

from burnish import api
from burnish.cli.data import write_data
from tests.integration.test_tool_run import SCRATCH

TINY = [
    "task.validation_rows=2", "task.turn_tokens=100", "rollout.batch=8", "rollout.group_size=4",
    "rollout.max_tokens=1400", "train.batch=8", "train.steps=2", "device=cpu",
    "train.precision=fp32", "engine.precision=fp32", "engine.kv_mb=64", "log.rollouts=8",
]  # fmt: skip


def alike(talks):
    """One conversation with many questions, which a tiny model learns by heart."""
    for number in range(64):
        asked, *others = talks[0]["messages"]
        yield {**talks[0], "messages": [{**asked, "content": f"{number}"}, *others]}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["calculator", "search"])
def test_every_sampled_token_has_the_samplers_log_probability(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_data(name, None, {})
    path = Path(name, "train.jsonl")
    talks = [json.loads(path.read_text().splitlines()[0])]
    path.write_text("".join(json.dumps(row) + "\n" for row in alike(talks)))
    warm = [
        *SCRATCH, "model.context=2048", "task.validation_rows=4", "train.batch=4",
        "train.learning_rate=1e-2", "task.epochs=10", "checkpoint.every=1000",
        "validation.every=1000",
    ]  # fmt: skip
    api.sft(f"{name}-sft", task={"validation": None}, overrides=warm, out="warm", show=False)
    rows = map(json.loads, Path(name, "questions.jsonl").read_text().splitlines())
    prompts = [{**row, "prompt": str(n)} for n, row in enumerate(islice(rows, 16))]
    Path(name, "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    run = api.train(name, overrides=[*TINY, "model.name=warm"], out="run", show=False)
    for step in run.metrics[1:]:
        assert step["mismatch/logprob_mean"] < 1e-5
        assert step["mismatch/logprob_max"] < 1e-4
        assert step["rollout/tool_calls"] > 0
        assert step["rollout/observation_tokens"] > 0
        assert step["rollout/grades_error"] == 0
    assert any(row["forced"] for row in run.rollouts)
