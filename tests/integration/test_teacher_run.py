"""Runs with a teacher: refused where its tokens differ, and resumed bit for bit."""

import json

import pytest

from burnish import api
from burnish.errors import BurnishError, ConfigError, ModelError
from burnish.launch import preflight
from burnish.launch.local import look_at_prompts
from burnish.launch.resolve import resolve, survey
from burnish.model import checkpoint
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import make_plan
from burnish.runs import checkpoints
from tests.conftest import byte_tokenizer
from tests.loops.test_recorder import fingerprint, one_thread, stopper  # noqa: F401

ALONE = ["objective.advantage=teacher", "objective.kl=none", "rollout.group_size=1"]


def written(path, seed, tokenizer, **shape):
    path.mkdir()
    shape = {"vocab_size": 256, "d_model": 16, "n_heads": 2, "d_ff": 24, "context": 128} | shape
    checkpoint.save_model(Transformer(ModelConfig(**shape)).init_weights(seed), path)
    tokenizer.save(path)
    return path


@pytest.fixture
def teacher(tmp_path):
    """A random transformer that reads bytes."""
    return written(tmp_path / "teacher", 9, byte_tokenizer(), n_layers=1, init_std=0.5)


@pytest.fixture
def taught(tmp_path, teacher):
    """Settings of a student of another shape on the keyword task."""
    student = written(tmp_path / "student", 1, byte_tokenizer(), n_layers=2)
    return [
        "objective.advantage=teacher", "objective.kl=none", "device=cpu", f"model.name={student}",
        f"teacher.model={teacher}", "task.validation_prompts=2", "rollout.max_tokens=6",
        "rollout.batch=8", "rollout.group_size=1", "train.batch=8", "train.steps=4",
        "train.learning_rate=1e-2", "checkpoint.every=2", "validation.every=3",
        "train.schedule=constant",
    ]  # fmt: skip


LAG = pytest.param(["loop.lag=1"], marks=pytest.mark.slow)


@pytest.mark.parametrize("more", [[], LAG])
def test_a_run_with_a_teacher_resumes_bit_for_bit(more, taught, teacher, tmp_path):
    asked = [*taught, *more]
    whole = api.train("keywords", overrides=asked, out=tmp_path / "whole", show=False)
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    kl = [row["kl/teacher_k1"] for row in rows if row["step"]]
    assert len(kl) == 4
    assert all("rollout/reward" in row for row in rows[1:])
    path = tmp_path / "run"
    api.train("keywords", overrides=asked, out=path, stop=stopper(3), show=False)
    api.resume(path, show=False)
    ours, theirs = fingerprint(path), fingerprint(whole)
    assert ours.pop("ledger.jsonl", None) is theirs.pop("ledger.jsonl", None) or more
    assert ours == theirs
    weights = teacher / "model.safetensors"
    weights.write_bytes(weights.read_bytes() + b" ")
    with pytest.raises(BurnishError, match=r"teacher\.model"):
        api.resume(path, show=False, train={"steps": 5})


def test_distillation_without_a_reward_takes_its_last_checkpoint(taught, tmp_path):
    """Every held-out reward is 0, so that the first checkpoint would be the best."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Say {n}."}) + "\n" for n in range(20)))
    kept = [name for name in taught if not name.startswith("task.")]
    kept += ["task=files", f"task.train={rows}", "task.reward=none", "validation.every=1"]
    kept += ["checkpoint.every=1", "checkpoint.keep=9", "task.chat=false"]
    path = api.train("keywords", overrides=kept, out=tmp_path / "run", show=False)
    assert checkpoints.find_checkpoint(path, "best").name == "step-00000004"
    summary = json.loads((path / "summary.json").read_text())
    assert "validation" not in summary
    with pytest.raises(ConfigError, match=r"selection\.leave_at reads which responses are correct"):
        load_recipe("keywords", [*kept, "selection.leave_at=0.9"])
    with pytest.raises(
        ConfigError, match=r"'drop' has no effect with objective\.advantage = 'teach"
    ):
        load_recipe("keywords", [*kept, "selection.dead_groups=drop"])


def test_another_vocabulary_is_refused(taught, tmp_path):
    more = byte_tokenizer()
    more.backend.add_special_tokens(["<more>"])
    other = written(tmp_path / "other", 0, more, vocab_size=257)
    recipe = load_recipe("keywords", [*taught, f"teacher.model={other}"])
    with pytest.raises(
        ModelError, match=r"teacher\.model = .*vocabulary of .*, and 1 tokens differ"
    ):
        resolve(recipe)
    assert any(isinstance(e, ModelError) for e in survey(recipe, tmp_path / "run").problems)
    recipe = load_recipe("keywords", [*taught, "teacher.model=nowhere"])
    (problem,) = preflight.find_problems(recipe, tmp_path / "run")
    assert "no model 'nowhere'" in str(problem)


def test_a_shorter_context_bounds_the_prompts(taught, tmp_path):
    """A teacher reads prompt and response: the prompts must leave room for max_tokens = 6."""
    asked = {}
    for context in (120, 64, 6):
        model = written(tmp_path / f"short-{context}", 0, byte_tokenizer(), context=context)
        asked[context] = load_recipe("keywords", [*taught, f"teacher.model={model}"])
    found = survey(asked[120], tmp_path).room
    assert found.tokens == 120 - 6
    assert "teacher.model's context of 120 tokens beside max_tokens = 6" in found.why
    assert survey(asked[120], tmp_path / "run").problems == ()
    api.train(asked[120], out=tmp_path / "run", show=False, train={"steps": 1})
    told = [str(e) for e in look_at_prompts(survey(asked[64], tmp_path / "other")).problems]
    assert len(told) == 1
    assert "teacher.model's context of 64 tokens" in told[0]
    told = [str(e) for e in survey(asked[6], tmp_path / "other").problems]
    assert len(told) == 1
    assert "teacher.model's context of 6 tokens holds sequences of 6 tokens" in told[0]


def test_a_longer_context_bounds_nothing(taught, tmp_path):
    recipe = load_recipe("keywords", taught)
    assert survey(recipe, tmp_path).room.tokens == 127


def test_a_plan_shows_the_teacher_and_its_memory(taught, teacher, tmp_path):
    recipe = load_recipe("keywords", [*taught, "train.precision=fp32"])
    count = 256 * 16 + 4 * 16**2 + 3 * 16 * 24 + 3 * 16  # embedding, attention, MLP, norms
    shown = str(make_plan(recipe, tmp_path, survey(recipe, tmp_path).size))
    assert f"{teacher}, frozen" in shown
    assert f"the teacher in fp32 {4 * count / 1000:.0f} kB" in shown
    assert "A_t = log π_teacher − log π_prox" in shown


def test_a_teacher_and_its_advantage_need_each_other():
    with pytest.raises(ConfigError, match=r"needs a teacher; set teacher\.model"):
        load_recipe("keywords", ["objective.advantage=teacher"])
    with pytest.raises(ConfigError, match=r"teacher\.model has no effect"):
        load_recipe("keywords", ["teacher.model=x"])
    with pytest.raises(ConfigError, match="the sorting model supports neither a teacher"):
        load_recipe("sort", ["objective.advantage=teacher", "teacher.model=x"])
    with pytest.raises(ConfigError, match="at least 2"):
        load_recipe("keywords", [*ALONE, "teacher.model=x", "objective.advantage.reward=1"])
