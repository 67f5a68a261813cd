"""What needs no model is refused before torch is loaded, and so within two seconds."""

import json
import resource
import subprocess
import sys

import pytest

from burnish.errors import BurnishError, DataError, RunError
from burnish.graders import rewards
from burnish.launch import preflight
from burnish.launch.preflight import find_problems, raise_problems
from burnish.recipe.load import load_recipe
from burnish.runs.directory import check_new

CODE = """
import contextlib, io, json, sys
from burnish.cli.main import main
for arguments in json.loads(sys.argv.pop()):
    sys.argv[1:] = arguments
    said = io.StringIO()
    with (
        contextlib.redirect_stderr(said),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.suppress(SystemExit),
    ):
        main()
    print(json.dumps([said.getvalue(), "torch" in sys.modules]))
"""
GOOD = '{"prompt": "a", "answer": "b"}\n' * 20


@pytest.fixture
def files(tmp_path):
    (tmp_path / "good.jsonl").write_text(GOOD)
    (tmp_path / "bad.jsonl").write_text(GOOD + "{nonsense\n")
    (tmp_path / "bad.toml").write_text("[task\n")
    (tmp_path / "reward.py").write_text(
        "def right(response, row):\n    return 1\n"
        "def wrong_type(response, row):\n    return 'good'\n"
    )
    hangs = "import time\ndef score(response, row):\n    time.sleep(60)\n"
    (tmp_path / "hangs.py").write_text(hangs)
    (tmp_path / "missing.py").write_text(
        "import nothing_of_that_name\ndef score(response, row):\n    return 1\n"
    )
    (tmp_path / "broken.py").write_text("def right(:\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "recipe.toml").write_text("")
    (tmp_path / "words").mkdir()
    (tmp_path / "words" / "train.jsonl").write_text(GOOD)
    return tmp_path


OWN = ["train", "keywords", "--data", "good.jsonl", "--reward"]


REFUSED = [
    (["train", "sort", "--set", "lr=1"], "verl's lr is train.learning_rate"),
    (["settings", "rollout.bath"], "no setting 'rollout.bath'; did you mean 'rollout.batch'"),
    (["train", "sort", "--out", "run"], "run must be new or empty, but it contains"),
    (["train", "sort", "--out", "."], "must be new or empty, but it contains bad.jsonl; choose"),
    (["train", "bad.toml"], "bad.toml is not a TOML file"),
    (["train", "keywords", "--data", "none.jsonl"], "can't be read: no such file"),
    (["train", "keywords", "--data", "bad.jsonl"], "bad.jsonl, line 21: not JSON"),
    (["sft", "--data", "bad.jsonl"], "bad.jsonl, line 21: not JSON"),
    ([*OWN, "keyword"], "number, citations, none, got 'keyword'"),
    ([*OWN, "none.py:right"], "there is no file"),
    ([*OWN, "broken.py:right"], "broken.py:right: the file can't be loaded: "),
    ([*OWN, "reward.py:wrong"], "reward.py has ['right', 'wrong_type'], no function"),
    (["train", "keywords", "--set", "model.name=nothing"], "no model 'nothing'; a model must be"),
    (["train", "arithmetic"], "burnish data sums; burnish sft arithmetic-sft"),
    (["train", "math", "--set", "model.name=smollm2-135m"], "can't be read: no such file"),
    (["eval", "keywords", "--set", "task={name = 'files', train = 'good.jsonl'}"], "no reward"),
    (["generate", "x", "--model", "nothing"], "no model 'nothing'"),
    ([*OWN, "hangs.py:score", "--set", "task.wall_seconds=1"], "took more than 1 s (task.wall_sec"),
    ([*OWN, "reward.py:right", "--reward", "reward.py:wrong_type"], "got str 'good'"),
    ([*OWN, "reward.py:right", "--reward", "reward.py:right"], "two rewards with the name 'right'"),
    ([*OWN, "missing.py:score"], "No module named 'nothing_of_that_name' (line 1); install the"),
    (["resume", "nowhere"], "nowhere is not a run directory"),
    (["resume", "words"], "words is not a run directory"),
    (["export", "nowhere", "model"], "nowhere is not a run directory"),
]


def run(cases, cwd):
    """What each command wrote to stderr, and whether torch was loaded by then."""
    done = subprocess.run(
        [sys.executable, "-c", CODE, json.dumps(cases)],
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('["')]


def test_errors_that_need_no_model_load_no_torch(files):
    outcomes = run([arguments for arguments, _ in REFUSED], files)
    for (arguments, message), (said, loaded) in zip(REFUSED, outcomes, strict=True):
        assert message in said, arguments
        assert not loaded, arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--help"], ""),
        (["recipes"], ""),
        (["plan", "sort", "--set", "train.step=3"], "did you mean 'train.steps'?"),
        (["plan", "sort", "--set", "train.batch=7"], "must be a multiple of"),
    ],
)
def test_help_the_list_of_recipes_and_a_recipe_error_load_no_torch(arguments, message, tmp_path):
    ((said, loaded),) = run([arguments], tmp_path)
    assert message in said
    assert bool(said) == bool(message)
    assert not loaded


def test_an_error_comes_within_two_seconds(files):
    """In the processor's time, since others may be at work; the whole process is measured."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    ((said, _),) = run([["train", "keywords", "--data", "bad.jsonl"]], files)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "not JSON" in said
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0


@pytest.mark.parametrize(
    ("recipe", "package", "overrides"),
    [
        ("math", "math_verify", ["model.name=smollm2-135m"]),
        ("arithmetic", "reasoning_gym", ["model.name=smollm2-135m"]),
        ("keywords", "huggingface_hub", ["model.name=hf:org/name"]),
    ],
)
def test_a_missing_extra_is_named_at_once(recipe, package, overrides, monkeypatch):
    real = preflight.importlib.util.find_spec
    monkeypatch.setattr(
        preflight.importlib.util, "find_spec", lambda name: None if name == package else real(name)
    )
    with pytest.raises(BurnishError, match="install it: pip install"):
        raise_problems(find_problems(load_recipe(recipe, overrides)))


def test_a_run_without_a_checkpoint_is_no_model(tmp_path):
    (tmp_path / "recipe.toml").write_text('task = "keywords"\nmodel = "smollm2-135m"\n')
    recipe = load_recipe("keywords", [f"model.name={json.dumps(str(tmp_path))}"])
    with pytest.raises(RunError, match="has no checkpoint yet"):
        raise_problems(find_problems(recipe))


@pytest.mark.parametrize(
    "text",
    [
        "from other import right",
        "import right",
        "if 1:\n    def right(response, row): ...",
        "right = lambda response, row: 1",
        "from other import *",
        "def __getattr__(name): ...",
        "class right:\n    pass",
    ],
)
def test_a_reward_that_may_be_there_is_left_to_the_worker(text, tmp_path):
    (tmp_path / "reward.py").write_text(text + "\n")
    rewards.check_reward_source(f"{tmp_path / 'reward.py'}:right")
    (tmp_path / "reward.py").write_text("def wrong(): ...\n")
    with pytest.raises(DataError, match=r"has \['wrong'\], no function 'right'"):
        rewards.check_reward_source(f"{tmp_path / 'reward.py'}:right")


def test_a_directory_that_a_killed_run_only_locked_is_new(tmp_path):
    (tmp_path / ".lock").write_text("")
    check_new(tmp_path)
    (tmp_path / "recipe.toml").write_text("")
    with pytest.raises(RunError, match="must be new or empty"):
        check_new(tmp_path)
