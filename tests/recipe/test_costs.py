"""Estimates of memory, disk and room."""

import pytest

from burnish import api
from burnish.errors import ConfigError, MissingExtra
from burnish.launch import local, preflight
from burnish.launch.resolve import resolve, survey
from burnish.recipe.activations import WORKSPACES, Widths
from burnish.recipe.costs import (
    ACTIVATIONS,
    SORTER_BYTES,
    Size,
    estimate_seconds,
    forward_seconds,
    needs,
    shared_memory,
)
from burnish.recipe.load import load_recipe
from burnish.types import Rates

SIZE = Size(1_000_000, cached=2 * 3 * 4 * 5, context=200, longest_prompt=30, copied=2)


@pytest.mark.parametrize(
    ("overrides", "copies"),
    [
        ([], 0),
        (["train.log_kl=true"], 2),
        (["objective.kl=k3"], 1),
        (["train.log_kl=true", "objective.kl=k3"], 2),
        (["train.log_kl=true", "objective.kl=k3", "objective.kl.refresh=5"], 3),
        (["train.log_kl=true", "objective.kl=k3", "objective.kl.ema=0.9"], 3),
        (["objective.kl=k3", "objective.kl.ema=0.9"], 1),
    ],
)
def test_frozen_copies_are_those_the_learner_holds(overrides, copies):
    recipe = load_recipe("sort", overrides)
    counted = [need.what for need in needs(recipe, SIZE) if "frozen" in need.what]
    assert counted == [f"frozen copies ({copies})"] * (copies > 0)
    learner = local.build_local(resolve(recipe)).learner
    learner.begin(0)
    held = {id(p) for p in (learner.reference, learner.initial, learner.previous) if p is not None}
    assert len(held) == copies


@pytest.mark.parametrize(("precision", "average", "saved"), [("fp32", 0, 16), ("bf16", 4, 16)])
def test_an_average_of_the_reference_is_counted_in_fp32(precision, average, saved):
    """In fp32 the reference is the average; a checkpoint has 12 bytes per weight beside it."""
    sets = ["objective.kl=k3", "objective.kl.ema=0.9", "train.log_kl=false"]
    sets += [f"train.precision={precision}"]
    found = needs(load_recipe("keywords", [*sets, "checkpoint.every=1000"]), SIZE)
    sizes = {need.what: need.size for need in found}
    assert sizes.get("the reference's average", 0) == average * 1_000_000
    (disk,) = (need.size for need in found if need.resource == "disk")
    assert disk == saved * 1_000_000


WIDTHS = Widths(
    model=64, queries=64, keys=32, mlp=256, heads=4, key_heads=2, vocabulary=500, is_tied=True
)


def activations(recipe, size):
    sizes = {need.what: need.size for need in needs(recipe, size)}
    return sizes.get(ACTIVATIONS, 0)


def test_activations_are_planned_for_one_gpu():
    on_gpu = SIZE._replace(widths=WIDTHS, layers=12)
    given = ["train.precision=bf16", "train.batch=128", "rollout.max_tokens=2000"]

    def told(*sets):
        return activations(load_recipe("keywords", [*given, *sets]), on_gpu)

    whole, few = told(), told("train.micro_tokens=4096")
    again, upper = told("train.recompute=true"), told("train.learn=layers", "train.learn.last=3")
    assert few < whole
    assert again - WORKSPACES < (whole - WORKSPACES) / 3
    assert upper - WORKSPACES < (whole - WORKSPACES) / 3
    assert activations(load_recipe("keywords", given), SIZE) == 0  # on a CPU
    mesh = ["runtime=ray", "mesh.shard=2", "train.micro_tokens=4096"]
    assert told(*mesh) == 0
    rows = {"task.train": "rows.jsonl", "train.precision": "bf16"}
    for limit, is_known in ((None, False), (4096, True)):
        recipe = load_recipe("sft", rows | {"train.micro_tokens": limit})
        assert (activations(recipe, on_gpu) > 0) == is_known


def test_long_contexts_recomputation_and_offload_take_time():
    """A forward pass: 2 operations per weight, at 0.7 of the rate; 4 · 32 per token of context and
    width and layer, at 0.33. Recomputation is a fourth pass. The moments, 8 bytes per weight, move
    at 50 GB/s in both directions at the same time."""
    rates, on_gpu = Rates("cuda", "bf16", 1000.0, 1000.0), SIZE._replace(widths=WIDTHS, layers=12)
    short, long = (forward_seconds(on_gpu, context, rates) for context in (0, 1000))
    assert short == pytest.approx(2e6 / 0.7e12)
    assert long - short == pytest.approx(4 * 1000 * 64 * 12 / 0.33e12)
    assert forward_seconds(SIZE, 1000, rates) == short
    own_head = on_gpu._replace(widths=WIDTHS._replace(is_tied=False))
    assert forward_seconds(own_head, 0, rates) == pytest.approx(2 * (1e6 - 64 * 500) / 0.7e12)
    given = ["train.log_kl=false", "objective.kl=none", "train.steps=3", "train.epochs=1"]
    plain, again, moved = (
        estimate_seconds(load_recipe("keywords", [*given, *sets]), on_gpu, rates)
        for sets in ([], ["train.recompute=true"], ["train.offload=true"])
    )
    recipe = load_recipe("keywords", given)
    response = 0.6 * recipe.rollout.max_tokens
    tokens = 3 * (recipe.rollout.batch * response + recipe.rollout.prompts * 30)
    forward = forward_seconds(on_gpu, 30 + response / 2, rates)
    assert again - plain == pytest.approx(tokens * forward)
    assert moved - plain == pytest.approx(recipe.gradient_steps * 8e6 / 50e9)


def test_starting_kernels_takes_time_on_a_gpu():
    """At unlimited rates, each of 3 steps takes 48 decoding steps per 64 responses and 3 passes per
    pack, in 12 layers. A token takes 2 µs when it is sampled, and again when it is learned."""
    rates, on_gpu = Rates("cuda", "bf16", 1e15, 1e15), SIZE._replace(widths=WIDTHS, layers=12)
    given = ["train.log_kl=false", "objective.kl=none", "train.steps=3", "train.epochs=1"]
    given += ["task.validation_rows=0", "task.name=files", "task.train=rows.jsonl"]
    given += ["task.reward=reward.py:f", "rollout.max_tokens=48", "rollout.batch=64"]
    given += ["train.batch=64", "engine.max_running=64"]

    def told(*sets):
        return estimate_seconds(load_recipe("keywords", [*given, *sets]), on_gpu, rates)

    assert told("engine.max_running=32") - told() == pytest.approx(3 * 48 * 12 * 6.5e-5)
    tokens = 64 * 0.6 * 48 + 8 * 30
    halves = told(f"train.micro_tokens={tokens // 2 + 1:.0f}")
    assert halves - told() == pytest.approx(3 * 3 * 12 * 2e-4)
    least = 3 * 48 * 12 * 6.5e-5 + 3 * 3 * 12 * 2e-4
    assert told() == pytest.approx(least + 3 * 2 * tokens * 2e-6, rel=1e-3)


def test_a_pack_must_have_room_for_a_prompt(tmp_path, smollm2):
    tiny = ["model.name=scratch", f"model.tokenizer={smollm2}", "model.layers=1", "device=cpu"]
    recipe = load_recipe("keywords", [*tiny, "train.micro_tokens=64", "validation.max_tokens=64"])
    with pytest.raises(ConfigError, match=r"micro_tokens = 64 .*max_tokens = 64 leaves no room"):
        api.train(recipe, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_model_is_measured_from_its_files(smollm2, tmp_path):
    def measure(recipe):
        return survey(recipe, tmp_path / "run").size

    few = ["train.steps=1", "task.validation_prompts=9"]
    size = measure(load_recipe("keywords", [f"model.name={smollm2}", *few]))
    assert size[:3] == (134_515_008, 2 * 30 * 3 * 64, 8192)
    assert measure(load_recipe("sort")) is None
    assert measure(load_recipe("keywords", ["model.name=hf:no/such"])) is None


def test_a_model_is_measured_also_if_another_package_is_missing(smollm2, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "is_installed", lambda extra: extra != "wandb")
    given = [f"model.name={smollm2}", "log.trackers=wandb", "task.validation_prompts=9"]
    found = survey(load_recipe("keywords", given), tmp_path / "run")
    assert [type(problem) for problem in found.problems] == [MissingExtra]
    assert found.size.parameters == 134_515_008


def test_shared_memory_holds_several_versions_and_a_state(smollm2):
    model = {"name": "scratch", "tokenizer": str(smollm2), "layers": 1, "width": 32, "heads": 4}
    given = {"model": {**model, "d_ff": 48, "context": 128}, "task": "keywords"}
    given |= {"train": {"precision": "fp32", "log_kl": False}, "device": "cpu"}
    recipe = load_recipe(given)
    size = resolve(recipe).size
    count = size.parameters
    assert shared_memory(recipe, size) == (2 * 4 + 12) * count
    lagged = load_recipe(given, ["loop.lag=2", "objective.proximal=behavior"])
    assert shared_memory(lagged, size) == (4 * 4 + 12) * count
    changes = ["loop.name=free", "runtime.name=ray", "runtime.generators=3"]
    free = load_recipe(given, [*changes, "objective.proximal=behavior"])
    assert shared_memory(free, size) == (5 * 4 + 12) * count
    assert shared_memory(load_recipe("sort"), None) == SORTER_BYTES
