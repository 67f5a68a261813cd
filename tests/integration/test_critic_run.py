"""Runs with a critic: refused, planned, and resumed bit for bit."""

import json

import pytest
import torch

from burnish import api
from burnish.errors import ConfigError
from burnish.graders import keywords
from burnish.recipe.costs import Size, needs
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import make_plan
from tests.loops.test_recorder import fingerprint, stopper, tiny

PPO = ["objective.advantage=gae", "objective.advantage.lam=0.95", "objective.advantage.whiten=true"]
PPO += ["train.weight_decay=0.3", "train.eps=1e-6", "train.schedule=cosine"]
SEPARATE = [
    "critic.learning_rate=1e-3",
    "critic.warmup_rollouts=1",
    "train.learn=layers",
    "train.learn.last=1",
]
SHARED = ["critic.shared=true", "critic.learning_rate=1e-2", "train.epochs=2"]
LAGGED = ["loop.lag=1", "objective.proximal=behavior"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("more", [SEPARATE, SHARED + LAGGED], ids=["separate", "shared, lagged"])
def test_a_run_with_a_critic_resumes_bit_for_bit(more, smollm2, tmp_path, monkeypatch):
    """A random model never writes the words, so its responses are paid by their length."""
    monkeypatch.setitem(keywords.REWARDS, "use", lambda text, row: {"reward": len(text) % 7})
    asked = tiny(smollm2, "train.steps=3", "checkpoint.every=1", "train.log_kl=false", *PPO, *more)
    whole = api.train("keywords", overrides=asked, out=tmp_path / "whole")
    path = api.train("keywords", overrides=asked, out=tmp_path / "run", stop=stopper(1))
    api.resume(path)
    assert fingerprint(path) == fingerprint(whole)
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    for row in rows[1:]:
        assert row.keys() >= {"train/value_loss", "train/value_clip_fraction"}
    assert (rows[1]["train/grad_norm"] == 0) == (more is SEPARATE)
    assert rows[3]["train/grad_norm"] > 0


def load(*changes, name="keywords"):
    return load_recipe(name, changes)


def test_settings_that_can_not_work_are_refused():
    gae = "objective.advantage=gae"
    with pytest.raises(ConfigError, match=r"needs a section \[critic\].*critic\.learning_rate"):
        load(gae)
    with pytest.raises(ConfigError, match=r"critic\.clip has no effect with objective\.advantage"):
        load("critic.clip=0.3")
    with pytest.raises(ConfigError, match="the sorting model has no critic"):
        load(gae, "critic.clip=0.3", name="sort")
    with pytest.raises(ConfigError, match=r"critic\.coefficient has no effect with critic\.shared"):
        load(gae, "critic.coefficient=0.3")
    with pytest.raises(ConfigError, match=r"warmup_rollouts = 5 leaves none of the 5 rollouts"):
        load(gae, "critic.warmup_rollouts=5", "train.steps=5")
    with pytest.raises(ConfigError, match=r"critic\.clip .*greater than 0"):
        load(gae, "critic.clip=0")
    own = {"objective": {"advantage": {"name": "gae", "values": max}}, "critic": {"clip": 0.3}}
    with pytest.raises(ConfigError, match=r"critic\.clip has no effect .*values = \"max\""):
        load_recipe("keywords", own)


def test_another_advantage_leaves_a_recipe_without_its_critic():
    recipe = load("objective.advantage=gae", "critic.clip=0.3")
    assert recipe.critic.clip == 0.3
    assert load_recipe(recipe).critic == recipe.critic
    assert load_recipe(recipe, "objective.advantage=group_mean").critic is None


def test_a_plan_tells_the_critic_and_its_memory(tmp_path):
    """1,000 weights, 2 of 4 layers of 100 learn: 16 bytes each, and 2 bytes of each weight."""
    size = Size(1000, 8, 128, 10, layers=4, learned=200)
    asked = [
        "objective.advantage=gae",
        "critic.clip=0.3",
        "train.learn=layers",
        "train.learn.last=2",
    ]
    asked += ["train.precision=bf16", "engine.precision=bf16"]
    recipe = load(*asked, "critic.warmup_rollouts=7")
    (need,) = [need for need in needs(recipe, size) if need.what == "the critic"]
    assert need.size == 16 * 200 + 2 * 1000
    lines = dict(dict(make_plan(recipe, tmp_path, size))["critic"])
    assert "a separate body" in lines["values"]
    assert "V_old ± 0.3" in lines["value loss"]
    assert lines["warm-up"] == "the critic learns alone for 7 rollouts"
    shared = load(*asked, "critic.shared=true", "critic.coefficient=0.2")
    assert not [need for need in needs(shared, size) if need.what == "the critic"]
    lines = dict(dict(make_plan(shared, tmp_path, size))["critic"])
    assert lines["coefficient"] == "loss + 0.2 · value loss"
    assert not [name for name, _ in make_plan(load(), tmp_path, size) if name == "critic"]
