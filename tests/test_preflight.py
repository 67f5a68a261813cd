"""What a run lacks is said before it starts: extras, files, first runs, disk and memory."""

import shutil
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

import burnish
from burnish import config, preflight
from burnish.errors import BurnishError, ConfigError, DataError, MissingExtra, ModelError, RunError
from burnish.plan import Size

SIZE = Size(parameters=1_000_000, cached=100, context=256, longest_prompt=20)


@pytest.fixture
def without(monkeypatch):
    """Makes modules seem not to be installed, and all others seem to be."""

    def hide(*modules):
        monkeypatch.setattr(preflight, "is_installed", lambda *names: not {*names} & {*modules})

    return hide


def test_the_extras_are_those_of_the_package():
    project = tomllib.loads((Path(burnish.__file__).parents[1] / "pyproject.toml").read_text())
    named = project["project"]["optional-dependencies"].keys() - {"dev"}
    assert preflight.EXTRAS.keys() == named


@pytest.mark.parametrize(
    ("name", "overrides", "module", "extra"),
    [
        ("gsm8k", [], "math_verify", "math"),
        ("gsm8k", ["task.train=hf:a/b/train"], "datasets", "datasets"),
        ("arithmetic", [], "reasoning_gym", "gym"),
        ("keywords", ["model.name=hf:a/b"], "huggingface_hub", "hf"),
    ],
)
def test_a_missing_extra_is_named_with_its_command(name, overrides, module, extra, without):
    recipe = config.load(name, overrides)
    without(module)
    (error,) = preflight.missing_extras(recipe)
    assert isinstance(error, MissingExtra)
    assert f"pip install 'burnish[{extra}]'" in str(error)
    without()
    assert not preflight.missing_extras(recipe)


def test_missing_files_and_first_runs_name_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (sums,) = preflight.missing_files(config.load("arithmetic-sft"))
    assert isinstance(sums, DataError)
    both = "task.train = 'sums/train.jsonl' and task.validation = 'sums/validation.jsonl'"
    assert (
        str(sums) == f"{both} can't be read: no such file; first run: "
        "python examples/write_sums.py sums"
    )
    (first,) = preflight.missing_model(config.load("arithmetic"))
    assert isinstance(first, ModelError)
    asked = "make it with: python examples/write_sums.py sums; burnish sft arithmetic-sft"
    assert str(first).endswith(asked)
    Path("sums").mkdir()
    for name in ("train", "validation"):
        Path(f"sums/{name}.jsonl").touch()
    assert not preflight.missing_files(config.load("arithmetic-sft"))
    (first,) = preflight.missing_model(config.load("arithmetic"))
    assert str(first).endswith("make it with: burnish sft arithmetic-sft")
    Path("runs/arithmetic-sft-1").mkdir(parents=True)
    assert not preflight.missing_model(config.load("arithmetic"))
    (other,) = preflight.missing_model(config.load("keywords", ["model.name=elsewhere"]))
    assert "no model 'elsewhere'" in str(other)
    nothing = config.load("sft")
    with pytest.raises(ConfigError, match="there are no prompts"):
        preflight.check_sources(nothing)
    preflight.check_sources(nothing, prompts=[{"prompt": "a", "answer": "b"}])


def test_several_problems_are_said_together(tmp_path, monkeypatch, without):
    monkeypatch.chdir(tmp_path)
    without("math_verify")
    with pytest.raises(RunError) as caught:
        preflight.check_before(config.load("gsm8k"), tmp_path / "run")
    lines = str(caught.value).splitlines()
    assert len(lines) == 4  # a heading, the extra, the files, the first run
    assert "burnish sft gsm8k-sft" in lines[-1]


def test_too_little_disk_is_said(tmp_path, monkeypatch):
    recipe = config.load("keywords", ["checkpoint.keep=3", "train.log_kl=false",
                                      "objective.kl=none", "checkpoint.every=1"])  # fmt: skip
    room = SimpleNamespace(free=59_000_000)
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: asked.append(folder) or room)
    path = tmp_path / "not" / "yet"
    (error,) = preflight.lacking_disk(recipe, path, SIZE)
    assert "5 checkpoints of 12.0 MB" in str(error).replace("12 MB", "12.0 MB")
    assert "59 MB are free" in str(error)
    assert asked == [tmp_path]
    (path / "checkpoints" / "step-00000001").mkdir(parents=True)  # a resumed run has this one
    assert not preflight.lacking_disk(recipe, path, SIZE)


def test_too_little_memory_is_said():
    recipe = config.load("keywords", ["engine.kv_mb=100"])
    assert not preflight.lacking_memory(recipe, SIZE, 10**9, "cuda")
    (error,) = preflight.lacking_memory(recipe, SIZE, 10**8, "cuda")
    assert "of GPU memory and more for activations" in str(error)
    assert "engine's cache of" in str(error)
    assert not preflight.lacking_memory(recipe, SIZE, 10**8, "cpu")  # there it fills in time
    (error,) = preflight.lacking_memory(recipe, SIZE, 10**6, "cpu")
    assert "1.0 MB are free" in str(error).replace("1 MB", "1.0 MB")
    assert not preflight.lacking_memory(recipe, None, 0)  # its model is not here
    assert not preflight.lacking_memory(recipe, SIZE, 10**8, "cpu", total=10**9)
    (error,) = preflight.lacking_memory(recipe, SIZE, 10**8, "cpu", total=10**8)
    said = "engine.kv_mb = 100 asks for 105 MB, and the machine has 100 MB of memory; use less than"
    assert str(error) == f"{said} 95"


def test_a_run_does_not_begin(tmp_path, monkeypatch, without):
    """Before torch is asked for anything: no directory is left either."""
    monkeypatch.chdir(tmp_path)
    without("math_verify")
    row = '{"question": "1 + 1?", "answer": "#### 2"}\n'
    Path("rows.jsonl").write_text(row * 9)
    task = {"train": "rows.jsonl", "validation": None}
    small = {"task": task, "model": "smollm2-135m"}
    for call in (burnish.train, burnish.evaluate):
        with pytest.raises(MissingExtra, match=r"burnish\[math\]"):
            call("gsm8k", **small)
    with pytest.raises(DataError, match=r"task\.train = 'none\.jsonl' can't be read"):
        burnish.sft(data="none.jsonl")
    assert [path.name for path in tmp_path.iterdir()] == ["rows.jsonl"]


def test_a_model_that_a_run_learned_needs_what_the_run_needed(tmp_path, without):
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run / "recipe.toml").write_text('[task]\nname = "keywords"\n[model]\nname = "hf:a/b"\n')
    recipe = config.load("keywords", {"model": run})
    without("huggingface_hub")
    (error,) = preflight.problems(recipe)
    assert "the model hf:a/b needs the optional part 'hf'" in str(error)
    (run / "recipe.toml").write_text('[task]\nname = "keywords"\n[model]\nname = "gone"\n')
    (error,) = preflight.problems(recipe)
    assert "no model 'gone'" in str(error)


def test_a_place_that_cannot_be_written_is_said_first(tmp_path):
    (tmp_path / "file").touch()
    (error,) = preflight.before(config.load("sort"), tmp_path / "file" / "run")
    assert (
        str(error)
        == f"can't write to {tmp_path / 'file'}: a file or read-only; choose another --out"
    )


def test_a_cache_larger_than_memory_is_a_message(smollm2, tmp_path):
    asked = {"engine": {"kv_mb": 10**8}, "device": "cpu", "model": smollm2}
    for call in (burnish.train, burnish.evaluate):
        with pytest.raises(BurnishError, match=r"engine\.kv_mb = 10+ asks for 104857\.6 GB"):
            call("keywords", out=tmp_path / "run", **asked)
    assert not (tmp_path / "run").exists()


def test_a_run_that_does_not_fit_does_not_begin(smollm2, tmp_path, monkeypatch):
    from burnish import machine

    monkeypatch.setattr(machine, "memory", lambda: (10**9, 10**6))
    with pytest.raises(BurnishError, match="end other programs"):
        burnish.train("keywords", out=tmp_path / "run", device="cpu", model=smollm2)
    assert not (tmp_path / "run").exists()
