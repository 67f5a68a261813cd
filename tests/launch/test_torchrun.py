"""Runs on the ranks that torchrun starts: what is refused and planned, and a run like any other."""

import json
import os
import subprocess
import sys

import pytest

from burnish.errors import ConfigError
from burnish.launch import memory, torchrun
from burnish.launch.resolve import Resolved, survey
from burnish.model import checkpoint
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe.costs import Size, needs
from burnish.recipe.load import format_toml, load_recipe
from burnish.recipe.mesh import MeshConfig
from burnish.recipe.plan import make_plan
from burnish.recipe.runtime import LocalRuntime
from burnish.runs import checkpoints
from burnish.runs.metrics import iterate_rows
from tests.conftest import byte_tokenizer

ROWS = {"name": "pairs", "train": "t.jsonl", "validation": "v.jsonl", "chat": False}
MODEL = {"name": "scratch", "tokenizer": "bytes", "layers": 1, "width": 16, "heads": 2, "d_ff": 24}
SIZE = Size(parameters=1000, cached=1, context=64, longest_prompt=1, layers=4, outer=200)


def recipe(**changes):
    table = {"task": ROWS, "model": MODEL, "runtime": "torchrun", "train": {"batch": 8}}
    return load_recipe(table, changes)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"mesh": {"shard": 3}}, "use train.batch = 9"),
        ({"train": {"learn": "lora"}}, "trains all weights, got train.learn = 'lora'"),
        ({"device": "cuda:1"}, "would put all ranks on one GPU"),
        ({"runtime.generators": 2}, "runtime.generators has no effect with runtime = "),
        ({"mesh": {"shard": 0}}, "mesh.shard must be greater than or equal to 1"),
    ],
)
def test_recipes_that_a_mesh_can_not_learn(changes, told):
    with pytest.raises(ConfigError, match=told):
        recipe(**changes)


def test_a_mesh_needs_ranks_and_a_language_model():
    with pytest.raises(ConfigError, match=r"mesh\.shard has no effect"):
        load_recipe("keywords", {"mesh": {"shard": 2}})
    with pytest.raises(ConfigError, match="needs a language model, got the sorting model"):
        load_recipe("sort", {"runtime": "torchrun"})


def test_the_mesh_must_have_as_many_ranks_as_torchrun_started(monkeypatch):
    with pytest.raises(ConfigError, match="torchrun --nproc-per-node 1 -m burnish"):
        torchrun.check_ranks(recipe().mesh)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "4")
    told = "2 ranks .1 replicate × 2 shard × 1 tensor.*started 4; set mesh.shard = 4 or"
    with pytest.raises(ConfigError, match=told):
        torchrun.check_ranks(recipe(mesh={"shard": 2}).mesh)
    torchrun.check_ranks(recipe(mesh={"shard": 2, "tensor": 2}).mesh)
    with pytest.raises(ConfigError, match="each of them would be a separate run"):
        torchrun.is_follower(LocalRuntime(), MeshConfig(), [])


def test_a_script_is_no_rank(monkeypatch):
    """Two conductors would wait for each other for ever."""
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ConfigError, match=r"rank 1 runs a script.*-m burnish train RECIPE"):
        torchrun.build_on_ranks(Resolved(recipe(mesh={"shard": 2}), "cpu"))


def check_heads(given, path):
    found = survey(given, path / "run")
    memory.check_heads(given.mesh.tensor, found.model, found.frozen.get("teacher.model"))


def test_heads_must_divide(tmp_path):
    with pytest.raises(ConfigError, match=r"must divide the 2 heads and 2 key .*; use 1 or 2"):
        check_heads(recipe(mesh={"tensor": 4}), tmp_path)
    check_heads(recipe(mesh={"tensor": 2}), tmp_path)


def test_heads_of_frozen_models_must_divide(tmp_path):
    """A teacher is cut over the tensor ranks as the policy is; a reward model runs whole."""
    shape = {"vocab_size": 256, "n_layers": 1, "d_model": 16, "d_ff": 24, "context": 128}

    def taught(heads, kv_heads, ranks):
        folder = tmp_path / f"{heads}-{kv_heads}"
        folder.mkdir(exist_ok=True)
        checkpoint.save_model(
            Transformer(ModelConfig(**shape, n_heads=heads, n_kv_heads=kv_heads)), folder
        )
        byte_tokenizer().save(folder)
        own = {**MODEL, "heads": 4}
        asked = {"objective.advantage": "teacher", "teacher.model": str(folder)}
        return load_recipe(
            "keywords", {"model": own, "runtime": "torchrun", "mesh": {"tensor": ranks}} | asked
        )

    for heads, kv_heads, ranks, told in (
        (4, 1, 2, "the 4 heads and 1 key and value heads of teacher.model = .*/4-1'; use 1$"),
        (2, 2, 4, "the 2 heads and 2 key and value heads of teacher.model = .*/2-2'; use 1 or 2$"),
    ):
        given = taught(heads, kv_heads, ranks)
        with pytest.raises(ConfigError, match=rf"mesh.tensor = {ranks} must divide {told}"):
            check_heads(given, tmp_path)
        assert any("must divide" in str(e) for e in survey(given, tmp_path / "run").problems)
    check_heads(taught(2, 2, 2), tmp_path)


def test_a_plan_has_the_memory_of_a_rank(tmp_path):
    """Of 1,000 parameters in fp32: masters, gradients and moments are 4, 4 and 8 kB, over 2 × 2
    ranks. All weights are gathered, or two of four layers of 200 and 200 outer parameters, over 2
    tensor ranks, beside the gradients of the latter: 4 · (1000 + 600) / 2 and 4 · 2 · 600 / 2."""
    mesh, train = {"replicate": 2, "shard": 2, "tensor": 2}, {"precision": "fp32"}
    one, less = recipe(mesh=mesh, train=train), recipe(mesh=mesh | {"gather": "layer"}, train=train)
    found = {need.what: need.size for need in needs(one, SIZE) if need.resource == "memory"}
    assert found == {
        "fp32 masters": 1000,
        "gradients": 1000,
        "Adam's moments": 2000,
        "gathered weights and gradients": 3200,
    }
    assert {n.what: n.size for n in needs(less, SIZE)}["gathered weights and gradients"] == 2400
    lines = dict(dict(make_plan(one, tmp_path, SIZE))["mesh"])
    assert lines["ranks"] == "8 = 2 replicate × 2 shard × 2 tensor"
    assert lines["packs"].startswith("about 2 of 8 responses")


def refusals(folder, *own):
    """The words of two ranks, each with settings of its own, that can't be a run together."""
    write_recipe(folder)
    meeting = torchrun.Meeting(2, "127.0.0.1")
    ranks = []
    for number, settings in enumerate(own):
        given = [word for text in settings for word in ("--set", text)]
        command = [sys.executable, "-m", "burnish", "sft", "r.toml", "--out", "run", *given]
        place = os.environ | meeting.place | {"RANK": str(number), "LOCAL_WORLD_SIZE": "2"}
        ranks.append(
            subprocess.Popen(command, cwd=folder, env=place, stderr=subprocess.PIPE, text=True)
        )
    told = []
    for one in ranks:
        try:
            told.append(one.communicate(timeout=60)[1].strip())
        finally:
            one.kill()
    assert [one.returncode for one in ranks] == [1, 1], told
    assert not (folder / "run" / "metrics.jsonl").exists()
    return told


@pytest.mark.slow
def test_ranks_with_different_recipes_are_refused(tmp_path):
    """As two machines with two command lines."""
    same = ("mesh.shard=2", "train.batch=8")
    told = refusals(
        tmp_path,
        (*same, "train.learning_rate=0.001"),
        (*same, "train.learning_rate=0.002"),
    )
    expected = (
        "error: the recipes of ranks 0 and 1 differ (train.learning_rate: 0.001 → 0.002); start "
        "all ranks with one command line"
    )
    # Rank 0 has made the run's directory, from which both can start with one command line.
    lead = "correct the cause first, or the error returns; then continue with"
    assert told == [f"{expected}\n{lead}: burnish resume run", expected]


def test_a_mesh_of_another_size_than_the_ranks_is_refused(tmp_path):
    settings = ("mesh.shard=2", "mesh.tensor=2", "train.batch=8")
    expected = (
        "error: the mesh has 4 ranks (1 replicate × 2 shard × 2 tensor), and torchrun has started "
        "2; set mesh.shard = 2 or mesh.replicate = 2, or start 4"
    )
    assert refusals(tmp_path, settings, settings) == [expected] * 2


def write_recipe(folder):
    rows = [json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(40)]
    (folder / "t.jsonl").write_text("".join(rows[:32]))
    (folder / "v.jsonl").write_text("".join(rows[32:]))
    (folder / "r.toml").write_text(format_toml({"task": ROWS, "model": MODEL}))


@pytest.mark.slow
def test_a_run_on_ranks_is_a_run_like_any_other(tmp_path):
    """Two ranks learn the losses of one process; the run goes on on another mesh."""
    write_recipe(tmp_path)

    def burnish(*given):
        command = [sys.executable, "-m", "burnish", *given, "--quiet"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stdout + done.stderr

    sets = "train.batch=8", "checkpoint.every=2", "train.precision=fp32"
    less = [word for one in sets for word in ("--set", one)]
    burnish("sft", "r.toml", "--out", "alone", *less)
    burnish(
        "sft", "r.toml", "--out", "shards", *less, "--runtime", "torchrun", "--set", "mesh.shard=2"
    )
    assert (tmp_path / "shards/checkpoints/step-00000004").is_dir()
    losses = [
        [row["train/loss"] for row in iterate_rows(tmp_path / run / "metrics.jsonl") if row["step"]]
        for run in ("alone", "shards")
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    first = checkpoints.list_checkpoints(tmp_path / "shards")[0].name
    tensor = ["--set", "mesh.shard=1", "--set", "mesh.tensor=2"]
    burnish("resume", "shards", "--from", first, *tensor)
    after = [
        row["train/loss"] for row in iterate_rows(tmp_path / "shards/metrics.jsonl") if row["step"]
    ]
    assert after == pytest.approx(losses[0], abs=1e-5)
