"""A run that needs more memory, cache or disk than the machine has is refused."""

import re
from pathlib import Path
from typing import Any

import pytest

from burnish.console.progress import showing
from burnish.errors import ConfigError
from burnish.launch import local, memory
from burnish.launch.resolve import resolve, survey
from burnish.machine import hardware
from burnish.recipe.costs import (
    ACTIVATIONS,
    ENGINE,
    SORTER_BYTES,
    Need,
    Size,
    needs,
    shared_memory,
)
from burnish.recipe.load import load_recipe

SIZE = Size(parameters=1_000_000, cached=100, context=256, longest_prompt=20)


def test_too_little_room_is_said(tmp_path, monkeypatch):
    """A model of a million weights in fp32: 16 MB to learn, 4 to sample, 12 a checkpoint."""
    sets = ["checkpoint.keep=3", "checkpoint.every=1", "engine.kv_mb=100", "device=cpu"]
    recipe = load_recipe("keywords", [*sets, "train.log_kl=false", "objective.kl=none"])
    available, free = [10**9, 10**8], [10**9]
    monkeypatch.setattr(hardware, "memory", lambda device="cpu": tuple(available))
    monkeypatch.setattr(hardware, "disk", lambda path: free[0])
    path = tmp_path / "run"

    def lacks(ranks=1):
        found = memory.missing_room(needs(recipe, SIZE), "cpu", path, ranks=ranks)
        return [str(error) for error in found]

    assert not lacks()
    available[1] = 10**7
    (said,) = lacks()
    assert "needs 20 MB of memory (the most: Adam's moments 8 MB" in said
    assert "10 MB are available; end other programs" in said
    available[:] = [10**9, 50_000_000]  # three ranks need 16 MB each, their engine 4 MB
    assert not lacks(ranks=2)
    (said,) = lacks(ranks=3)
    assert "needs 52 MB of memory" in said
    available[:] = [10**8, 10**8]  # on a CPU, the cache grows up to the whole memory
    (said,) = lacks()
    assert "needs 105 MB of cache" in said
    assert "(engine.kv_mb = 100) 105 MB), and 100 MB are available; lower engine.kv_mb" in said
    available[:], free[0] = [10**9, 10**9], 59_000_000
    (said,) = lacks()
    assert "of disk (the most: 5 checkpoints of 12 MB 60 MB" in said
    assert "59 MB are available; make room, choose another --out, or lower checkpoint.keep" in said
    saved = path / "checkpoints" / "step-00000001"
    saved.mkdir(parents=True)
    (saved / "tensors").write_bytes(bytes(12_000_000))  # a resumed run has this one
    assert not lacks()


def test_moments_in_main_memory_are_counted_there(tmp_path, monkeypatch):
    """Of 16 bytes per weight to learn, 8 are the moments; a critic of its own has as many."""
    rooms = {"cuda": (10**9, 10**9), "cpu": (10**9, 10**9)}
    monkeypatch.setattr(hardware, "memory", lambda device="cpu": rooms[device])
    monkeypatch.setattr(hardware, "disk", lambda path: 10**9)
    sets = ["train.precision=fp32", "train.log_kl=false", "objective.kl=none", "engine.kv_mb=1"]
    critic = ["objective.advantage=gae", "critic.shared=false"]
    for more, learned in (([], 16), (critic, 32)):
        found = []
        for offload in (False, True):
            recipe = load_recipe("keywords", [*sets, *more, f"train.offload={offload}".lower()])
            sums = dict.fromkeys(("memory", "main memory"), 0)
            for need in needs(recipe, SIZE):
                if need.what != ENGINE and need.resource in sums:
                    sums[need.resource] += need.size
            found.append(sums)
            assert not memory.missing_room(needs(recipe, SIZE), "cuda", tmp_path, ranks=1)
        assert found[0] == {"memory": learned * 10**6, "main memory": 0}
        assert found[1] == {"memory": learned * 10**6 // 2, "main memory": learned * 10**6 // 2}
    rooms["cpu"] = 10**9, 10**7
    (error,) = memory.missing_room(needs(recipe, SIZE), "cuda", tmp_path, ranks=1)
    assert "needs 16 MB of main memory (the most: " in str(error)
    assert "10 MB are available; end other programs, remove train.offload" in str(error)


def test_activations_are_noted_but_stop_no_run(tmp_path, monkeypatch):
    rooms = {"cuda": (10**9, 100_000_000), "cpu": (10**9, 10**9)}
    monkeypatch.setattr(hardware, "memory", lambda device="cpu": rooms[device])
    monkeypatch.setattr(hardware, "disk", lambda path: 10**9)
    weights = [Need("memory", "fp32 masters", 80_000_000), Need("cache", "cached", 10_000_000)]
    for size, is_noted in ((10_000_000, False), (10_000_001, True)):
        needed = [*weights, Need("memory", ACTIVATIONS, size)]
        assert not memory.missing_room(needed, "cuda", tmp_path, ranks=1)
        notes: list[str] = []
        with showing(lambda progress, notes=notes: notes.append(progress.doing)):
            memory.warn_of_activations(needed, "cuda")
            memory.warn_of_activations(weights, "cuda")
        assert len(notes) == is_noted
    assert "may need 100 MB of GPU memory, of which activations are 10 MB, and 100 MB" in notes[0]


def test_only_a_learner_on_a_gpu_moves_its_moments(tmp_path):
    size = {"layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 128}
    model = {"name": "scratch", "tokenizer": "bytes", **size}
    given = {"model": model, "device": "cpu", "task": "keywords", "train": {"offload": True}}
    recipe = load_recipe(given)
    told = r"train\.offload = true frees memory of a GPU"
    with pytest.raises(ConfigError, match=told):
        resolve(recipe, tmp_path / "run")
    assert any(re.search(told, str(one)) for one in survey(recipe, tmp_path / "run").problems)
    with pytest.raises(ConfigError, match=told):
        local.build_learner(resolve(recipe))
    # An evaluation and the actors of Ray other than the learner's may have no GPU.
    on_ray = load_recipe(given, ["runtime=ray"])
    assert resolve(recipe).device == resolve(on_ray, tmp_path / "run").device == "cpu"
    assert survey(on_ray, tmp_path / "run").problems == ()
    with pytest.raises(ConfigError, match=r"train\.offload = true can't be .* use mesh\.offload"):
        load_recipe("keywords", ["train.offload=true", "mesh.shard=2", "runtime=ray"])
    with pytest.raises(ConfigError, match="offload"):
        load_recipe("sort", ["train.offload=true"])


def test_the_room_that_weights_need(smollm2: Path) -> None:
    """Weights of several versions at once, and a learner's state."""
    model = {"name": "scratch", "tokenizer": str(smollm2), "layers": 1, "width": 32, "heads": 4}
    given: dict[str, Any] = {"model": {**model, "d_ff": 48, "context": 128}, "task": "keywords"}
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
