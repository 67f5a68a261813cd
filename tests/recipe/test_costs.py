"""Estimates of memory, disk and room."""

import pytest

from burnish import api
from burnish.errors import ConfigError, MissingExtra
from burnish.launch import local, preflight
from burnish.launch.resolve import resolve, survey
from burnish.recipe.costs import SORTER_BYTES, Size, needs, shared_memory
from burnish.recipe.load import load_recipe

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
