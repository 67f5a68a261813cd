"""Pieces of an objective, a rollout and a reward on Ray: the same bytes as in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from burnish import api
from burnish.model import checkpoint
from burnish.model.reward import RewardModel
from burnish.model.tokenizer import Tokenizer
from burnish.model.transformer import ModelConfig, Transformer
from tests.endpoint import endpoint
from tests.loops.test_recorder import fingerprint
from tests.tasks.test_judged import letters

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("cluster")]

REWARD = """
def mixed(response, row):
    return sum(map(ord, response)) % 7 / 6
"""
TINY = [
    "device=cpu", "task.name=files", "task.chat=false", "task.validation_rows=2",
    "model.name=scratch", "model.tokenizer=bytes", "model.layers=2", "model.width=32",
    "model.heads=4", "model.d_ff=48", "model.context=128", "engine.kv_mb=16", "objective.kl=none",
    "rollout.batch=8", "rollout.group_size=4", "rollout.max_tokens=12", "train.batch=8",
    "train.steps=2", "train.learning_rate=1e-2", "checkpoint.every=2", "validation.every=2",
    "log.rollouts=8",
]  # fmt: skip
APART = ["runtime=ray", "runtime.generator.cpus=0", "runtime.learner.cpus=0"]
SAME = ("metrics.jsonl", "rollouts.jsonl", "checkpoints/step-00000002")
CRITIC = ["objective.advantage=gae", "objective.advantage.whiten=true", "critic.learning_rate=1e-2"]
THINK = ["rollout.think.tokens=5", "rollout.think.end=:", "rollout.think.phrase=so:"]
RUNS = {
    "a critic of its own, an adapter, a think budget, a learned reward, an alarm": [
        *(*CRITIC, *THINK, "critic.warmup_rollouts=1", "train.learn=lora", "train.learn.rank=2"),
        *("objective.kl=k3", "train.log_kl=true", "train.mismatch_max=1e-4"),
        *("reward_model.name=LEARNED", "reward_model.task=0.5"),
    ],
    "a shared critic, the last layer, a penalty, a judge, solved prompts": [
        *(*CRITIC, "critic.shared=true", "train.learn=layers", "train.learn.last=1"),
        *("length=solve_rate", "rollout.overlong=mask", "train.epochs=2"),
        *("task.name=judged", "task.judge.url=URL", "task.judge.model=m", "task.evolve.most=2"),
        *("selection.leave_at=0.9", "selection.target=0.5"),
    ],
    "greedy responses, dead groups": ["objective.advantage=remax", "selection.dead_groups=drop"],
    "active sampling": [
        *("selection.dead_groups=active", "selection.on_bound=learn", "rollout.group_size=2"),
        *('rollout.stop=["a", "e", "i", "o", "u"]', "rollout.max_tokens=40"),
    ],
    "a teacher": ["objective.advantage=teacher", "teacher.model=TEACHER"],
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts, a reward, a teacher and a learned reward; both models read bytes."""
    path = tmp_path_factory.mktemp("inputs")
    (path / "reward.py").write_text(REWARD)
    rows = [
        {"prompt": f"Say {word}.", "rubric": [["Has the letter e.", 1]]} for word in "abcdefghij"
    ]
    (path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shape = ModelConfig(
        Tokenizer.of_bytes().vocab_size, n_layers=1, d_model=16, n_heads=2, d_ff=24, context=128
    )
    model = Transformer(shape).init_weights(9)
    checkpoint.save_model(model, path / "teacher")
    Tokenizer.of_bytes().save(path / "teacher")
    learned = RewardModel(model, None)
    learned.weight.data.normal_(generator=torch.Generator().manual_seed(1))
    learned.save(path / "learned", source=path / "teacher")
    return path


def train(path: Path, inputs: Path, url: str, *settings: str) -> dict[str, Any]:
    """The files of a run that must be the same."""
    given = [f"task.train={inputs / 'rows.jsonl'}", *TINY, *settings]
    if "task.name=judged" not in settings:
        given.append(f"task.reward={inputs / 'reward.py'}:mixed")
    names = {"TEACHER": str(inputs / "teacher"), "LEARNED": str(inputs / "learned"), "URL": url}
    for name, value in names.items():
        given = [one.replace(name, value) for one in given]
    run = api.train("keywords", overrides=given, out=path, show=False)
    return {name: bits for name, bits in fingerprint(run.path).items() if name in SAME}


@pytest.mark.parametrize("pieces", RUNS)
def test_the_same_bytes_as_in_one_process(pieces: str, inputs: Path, tmp_path: Path) -> None:
    with endpoint(letters) as (url, _):
        local = train(tmp_path / "local" / "run", inputs, url, *RUNS[pieces])
        remote = train(tmp_path / "ray" / "run", inputs, url, *RUNS[pieces], *APART)
    assert local.keys() == set(SAME)
    for name in SAME:
        assert remote[name] == local[name], name
