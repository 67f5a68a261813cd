"""What a run lacks is said before it starts: extras, files, first runs, disk and memory."""

import tomllib
from pathlib import Path

import pytest

import burnish
from burnish.errors import BurnishError, ConfigError, DataError, MissingExtra, ModelError, RunError
from burnish.launch import preflight
from burnish.machine import hardware
from burnish.recipe.load import load_recipe


@pytest.fixture
def without(monkeypatch):
    """Makes modules seem not to be installed, and all others seem to be."""

    def hide(*modules):
        monkeypatch.setattr(
            preflight, "is_installed", lambda extra: preflight.EXTRAS[extra][0] not in modules
        )

    return hide


def check(recipe, out=None):
    preflight.raise_problems(preflight.find_problems(recipe, out))


@pytest.mark.parametrize("modules", [("openai", "uvicorn"), ("openai",), ("uvicorn",)])
def test_agents_name_one_extra_that_has_all_they_need(without, modules):
    """Installing the extra 'serve' first would only lead to the next error."""
    without(*modules)
    agent = ["task.name=agent", "task.agent=agent.py:run", "task.train=rows.jsonl"]
    with pytest.raises(MissingExtra, match=r"task.name = 'agent' needs the optional part 'agents'"):
        preflight.check_task_extras(load_recipe("keywords", agent).tasks)


def test_an_extra_lacks_the_packages_of_its_metadata_that_are_not_installed(monkeypatch):
    assert preflight.missing_packages("hf") == []
    real = preflight.distributions
    monkeypatch.setattr(
        preflight, "distributions", lambda name: [] if name == "transformers" else real(name=name)
    )
    assert preflight.missing_packages("hf") == ["transformers"]
    assert preflight.missing_packages("gym") == []


def check_extras(recipe):
    preflight.check_task_extras(recipe.tasks)
    preflight.check_model_extra(recipe.model)


def test_the_extras_are_those_of_the_package():
    project = tomllib.loads((Path(burnish.__file__).parents[1] / "pyproject.toml").read_text())
    named = project["project"]["optional-dependencies"].keys() - {"dev"}
    assert preflight.EXTRAS.keys() == named


@pytest.mark.parametrize(
    ("name", "overrides", "module", "extra"),
    [
        ("gsm8k", [], "math_verify", "math"),
        ("arithmetic", [], "reasoning_gym", "gym"),
        ("keywords", ["model.name=hf:a/b"], "huggingface_hub", "hf"),
    ],
)
def test_a_missing_extra_is_named_with_its_command(name, overrides, module, extra, without):
    recipe = load_recipe(name, overrides)
    without(module)
    with pytest.raises(MissingExtra, match=rf"pip install 'burnish\[{extra}\]'"):
        check_extras(recipe)
    without()
    check_extras(recipe)


def test_a_tracker_that_is_not_installed_is_an_error_before_the_run(without):
    recipe = load_recipe("sort", ["log.trackers=wandb"])
    without("wandb")
    with pytest.raises(MissingExtra, match=r"log\.trackers = \['wandb'\].*burnish\[wandb\]'"):
        check(recipe)
    check(load_recipe("sort"))
    without()
    check(recipe)


def test_missing_files_and_first_runs_name_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    both = "task.train = 'sums/train.jsonl' and task.validation = 'sums/validation.jsonl'"
    write = "burnish data sums"
    with pytest.raises(DataError) as caught:
        preflight.check_files(load_recipe("arithmetic-sft").tasks)
    assert str(caught.value) == f"{both} can't be read: no such file; first: {write}"
    with pytest.raises(ModelError, match=f"make it with: {write}; burnish sft arithmetic-sft$"):
        preflight.check_model(load_recipe("arithmetic").model)
    Path("sums").mkdir()
    for name in ("train", "validation"):
        Path(f"sums/{name}.jsonl").touch()
    preflight.check_files(load_recipe("arithmetic-sft").tasks)
    with pytest.raises(ModelError, match=r"make it with: burnish sft arithmetic-sft$"):
        preflight.check_model(load_recipe("arithmetic").model)
    Path("runs/arithmetic-sft-1").mkdir(parents=True)
    preflight.check_model(load_recipe("arithmetic").model)
    with pytest.raises(ModelError, match="no model 'elsewhere'"):
        preflight.check_model(load_recipe("keywords", ["model.name=elsewhere"]).model)
    nothing = load_recipe("sft")
    with pytest.raises(ConfigError, match="there are no prompts"):
        check(nothing)
    rows = [{"prompt": "a", "answer": "b"}] * 2
    check(load_recipe("sft", {"task": {"rows": rows}}))


def test_several_problems_are_said_together(tmp_path, monkeypatch, without):
    monkeypatch.chdir(tmp_path)
    without("math_verify")
    with pytest.raises(RunError) as caught:
        check(load_recipe("gsm8k"), tmp_path / "run")
    lines = str(caught.value).splitlines()
    assert len(lines) == 4  # a heading, the extra, the files, the first run
    assert "burnish sft gsm8k-sft" in lines[-1]


def test_a_problem_of_two_models_is_said_once(tmp_path, without):
    without("ray")
    asked = ["objective.advantage=teacher", "objective.kl=none", "runtime=ray"]
    recipe = load_recipe("keywords", [*asked, "teacher.model=smollm2-135m"])
    assert len(preflight.find_problems(recipe, tmp_path / "run")) == 1


def test_files_that_a_mixture_lacks_are_named_by_its_parts(tmp_path):
    parts = {name: {"name": "math", "train": f"no/{name}.jsonl"} for name in ("one", "two")}
    task = {"name": "mixture", "weights": {"one": 1, "two": 1}, "tasks": parts}
    with pytest.raises(DataError, match=r"task\.tasks\.one\.train = .* and task\.tasks\.two\."):
        preflight.check_files(load_recipe({"task": task, "model": "smollm2-135m"}).tasks)


def test_the_bytes_that_are_free_where_a_directory_would_be(tmp_path):
    assert hardware.disk(tmp_path / "not" / "yet") > 0


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
    recipe = load_recipe("keywords", {"model": run})
    without("huggingface_hub")
    (error,) = preflight.find_problems(recipe)
    assert "the model hf:a/b needs the optional part 'hf'" in str(error)
    (run / "recipe.toml").write_text('[task]\nname = "keywords"\n[model]\nname = "gone"\n')
    (error,) = preflight.find_problems(recipe)
    assert "no model 'gone'" in str(error)


def test_a_place_that_cannot_be_written_is_said_first(tmp_path):
    (tmp_path / "file").touch()
    (error,) = preflight.find_problems(load_recipe("sort"), tmp_path / "file" / "run")
    assert (
        str(error)
        == f"can't write to {tmp_path / 'file'}: it is a file or read-only; choose another --out"
    )


def test_a_cache_larger_than_memory_is_a_message(smollm2, tmp_path):
    asked = {"engine": {"kv_mb": 10**8}, "device": "cpu", "model": smollm2}
    for call in (burnish.train, burnish.evaluate):
        with pytest.raises(BurnishError, match=r"104857\.6 GB of cache .*engine\.kv_mb = 10+"):
            call("keywords", out=tmp_path / "run", **asked)
    assert not (tmp_path / "run").exists()


def test_a_run_that_does_not_fit_does_not_begin(smollm2, tmp_path, monkeypatch):
    monkeypatch.setattr(hardware, "memory", lambda device="cpu": (10**10, 10**6))
    with pytest.raises(BurnishError, match="end other programs"):
        burnish.train("keywords", out=tmp_path / "run", device="cpu", model=smollm2)
    assert not (tmp_path / "run").exists()


def test_a_pretrained_model_has_no_default_learning_rate(tmp_path):
    """The default suits a small model that starts from random weights."""
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "answer": "b"}\n' * 2)
    task = {"name": "files", "train": f"{tmp_path}/rows.jsonl", "reward": "inclusion"}
    recipe = {"name": "r", "task": task, "model": {"name": "smollm2-135m"}}
    lora, pairs = {"train": {"learn": "lora"}}, {"task": task | {"name": "pairs"}}
    del pairs["task"]["reward"]

    def problems(recipe, out=tmp_path / "new"):
        found = [str(problem) for problem in preflight.find_problems(recipe, out)]
        return [one for one in found if "learning_rate" in one]

    for more, rate in (({}, "1e-6"), (lora, "1e-4"), (pairs, "1e-5")):
        (said,) = problems(load_recipe(recipe | more))
        assert said.endswith(f"as 'smollm2-135m' is; begin with train.learning_rate = {rate}")
        assert problems(load_recipe(recipe | more, [f"train.learning_rate={rate}"])) == []
        assert problems(load_recipe(load_recipe(recipe | more), ["name=other"])) == [said]
        assert problems(load_recipe(recipe | more), None) == []  # an evaluation
    assert problems(load_recipe(recipe | {"model": {"name": "scratch"}})) == []


def test_a_model_without_a_chat_template_needs_plain_prompts(tmp_path):
    (tmp_path / "model").mkdir()
    name = tmp_path / "model"
    rows = [{"prompt": f"{i} + 1 =", "answer": "5"} for i in range(4)]
    given = {"name": "files", "rows": rows, "reward": "inclusion"}
    model = {"name": str(name)}

    def problems(**task):
        recipe = load_recipe({"task": given | task, "model": model})
        return [str(problem) for problem in preflight.find_problems(recipe)]

    told = (
        f"{name} has no chat template, which task.chat = true needs; set task.chat = false, so "
        "that prompts are plain texts, or name a model with a chat template"
    )
    assert problems() == [told]
    assert problems(chat=False) == []
    (name / "tokenizer_config.json").write_text('{"chat_template": null}')
    assert problems() == [told]
    (name / "tokenizer_config.json").write_text('{"chat_template": "x"}')
    assert problems() == []
    (name / "tokenizer_config.json").unlink()
    (name / "chat_template.jinja").write_text("x")
    assert problems() == []
    recipe = load_recipe("guess", [f"model.name={name}"])  # episodes have a plain format
    (name / "chat_template.jinja").unlink()
    preflight.check_chat(recipe.tasks, recipe.model)
    bytes_of = {"name": "scratch", "tokenizer": "bytes"}
    recipe = load_recipe({"task": given, "model": bytes_of})
    with pytest.raises(ModelError, match=r"bytes has no chat template.*set task\.chat = false"):
        preflight.check_chat(recipe.tasks, recipe.model)
