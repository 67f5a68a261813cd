"""A run that learns a reward model: resumed bit for bit, exported, and used in a rollout."""

import json
import math

import pytest
import tiny as small
import torch

from burnish import api
from burnish.errors import ConfigError, ModelError
from burnish.launch import local
from burnish.launch.resolve import resolve
from burnish.model import checkpoint, reward
from burnish.model.reward import last_slots
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import make_plan
from burnish.rollout.packing import pack
from burnish.runs import checkpoints
from tests.learner.preference_pairs import ROWS, groups, make_model, one_by_one
from tests.loops.test_recorder import fingerprint, one_thread, stopper  # noqa: F401


@pytest.fixture
def base(tmp_path):
    """A model directory with a tokenizer of bytes and settings of a run that learns a reward."""
    checkpoint.save_model(small.model(4), tmp_path / "base")
    small.tokenizer().save(tmp_path / "base")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS * 4))
    return [
        f"model.name={tmp_path / 'base'}", f"task.train={tmp_path / 'rows.jsonl'}", "device=cpu",
        "task.chat=false", "task.epochs=4", "train.batch=8", "train.learning_rate=3e-3",
        "validation.every=8", "checkpoint.every=4", "train.schedule=cosine",
        "train.final_share=0.2", "train.weight_decay=0.1",
    ]  # fmt: skip


def test_a_run_learns_to_rank_resumes_and_is_read_by_transformers(base, tmp_path):
    whole = api.train("reward", overrides=base, out=tmp_path / "whole", show=False)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["validation/loss"] == pytest.approx(math.log(2))  # all rewards start at 0
    assert rows[-1]["validation/accuracy"] == 1.0
    path = tmp_path / "run"
    api.train("reward", overrides=base, out=path, stop=stopper(6), show=False)
    api.resume(path, show=False)
    assert fingerprint(path) == fingerprint(whole)
    chosen = api.export(path, tmp_path / "model", show=False)
    model = reward.load_reward_model(tmp_path / "model", dtype=torch.float64)
    assert torch.equal(
        model.weight.float(), checkpoints.load_checkpoint(chosen)[0]["policy.master.weight"]
    )
    assert model.pad == small.END
    with pytest.raises(ConfigError, match="write it with: burnish export"):
        resolve(load_recipe("keywords", [f"model.name={path}"]))
    transformers = pytest.importorskip("transformers", reason="an extra")
    kind = transformers.AutoModelForSequenceClassification
    theirs = kind.from_pretrained(tmp_path / "model", dtype=torch.float64)
    assert type(theirs).__name__ == "LlamaForSequenceClassification"
    sides = [(g.prompt.token_ids, c.token_ids) for g in groups() for c in g.completions]
    width = max(len(p) + len(c) for p, c in sides)
    padded = torch.full((len(sides), width), small.END)
    for row, (p, c) in zip(padded, sides, strict=True):
        row[: len(p) + len(c)] = torch.tensor([*p, *c])
    with torch.no_grad():
        got = theirs(padded, attention_mask=padded != small.END).logits.squeeze(1)
        ours = model.score(pack(groups())).rewards[last_slots(pack(groups()))]
    torch.testing.assert_close(got, ours, rtol=1e-6, atol=1e-6)


def test_a_learned_reward_scores_a_rollout(base, tmp_path):
    model = make_model(torch.float32, pad=small.END)
    model.save(tmp_path / "learned", source=tmp_path / "base")
    asked = [
        f"model.name={tmp_path / 'base'}", "task.chat=false", "device=cpu", "rollout.batch=8",
        "rollout.group_size=4", "rollout.max_tokens=5", "train.batch=8", "train.steps=2",
        "task.validation_prompts=2", "objective.kl=none", "task.most=1", "task.least=1",
        f"reward_model.name={tmp_path / 'learned'}", "reward_model.task=0.5",
        "train.precision=fp32", "train.micro_tokens=90", "validation.max_tokens=5",
    ]  # fmt: skip
    recipe = load_recipe("keywords", asked)
    task, _ = local.build_task(resolve(recipe))
    rows = groups()
    pairs = [(g.prompt, c) for g in rows for c in g.completions]
    torch.testing.assert_close(
        torch.tensor(task.rewards(pairs)), one_by_one(model, rows).detach(), rtol=1e-5, atol=1e-5
    )
    run = api.train("keywords", overrides=asked, out=tmp_path / "run", show=False)
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    own, learned = row["rollout/part_task"], row["rollout/part_learned"]
    assert row["rollout/reward"] == pytest.approx(learned + 0.5 * own)
    shown = str(make_plan(recipe, tmp_path))
    assert "learned(prompt, response) + 0.5 × the task's reward" in shown
    with pytest.raises(ModelError, match=r"no score\.weight of one row"):
        local.build_task(
            resolve(load_recipe("keywords", [*asked, f"reward_model.name={tmp_path / 'base'}"]))
        )


def test_what_goes_together():
    with pytest.raises(ConfigError, match="the sorting model supports neither"):
        load_recipe("sort", ["reward_model.name=x"])
    with pytest.raises(ConfigError, match="'none' leaves nothing to learn from"):
        load_recipe("keywords", ["task=files", "task.train=x", "task.reward=none"])
    load_recipe(
        "keywords", ["task=files", "task.train=x", "task.reward=none", "reward_model.name=x"]
    )
    with pytest.raises(ConfigError, match="no effect with task"):
        load_recipe("reward", ["reward_model.name=x"])
    told = r"train\.micro_sequences = 1 would separate the two responses of a pair.* = 2 or more"
    sequences = {"task.train": "x", "train.micro_tokens": None, "train.micro_sequences": 2}
    load_recipe("reward", sequences)
    with pytest.raises(ConfigError, match=told):
        load_recipe("reward", sequences | {"train.micro_sequences": 1})
