"""Runs of episodes with tools: a warm start that calls the calculator, and training after it."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from burnish import api
from burnish.environments.calculator import calculator
from burnish.environments.sandbox import PythonSource
from burnish.environments.schema import tool_schema
from burnish.environments.search import SearchSource
from burnish.environments.tools import ToolSettings
from burnish.errors import ConfigError, DataError
from burnish.launch import inputs
from burnish.model.conversation import ConversationFormat
from burnish.model.tokenizer import Tokenizer
from burnish.recipe.load import load_recipe
from burnish.tasks.environment import (
    load_starts,
    make_environment,
    open_environments,
    try_environment,
)
from burnish.tasks.pairs import check_pair
from burnish.tasks.text import TODAY
from tests.loops.test_recorder import fingerprint, stopper

SCRATCH = [
    "model=scratch", "model.tokenizer=bytes", "model.layers=1", "model.width=48", "model.heads=4",
    "model.d_ff=96", "model.context=256", "device=cpu", "train.precision=fp32",
]  # fmt: skip
TOOLS = [
    "task.name=environment", "task.tools=['calculator']", "task.train=rows.jsonl",
    "task.validation_rows=2", "task.turn_tokens=48", "task.reward=reward.py:score",
    "rollout.batch=8", "rollout.group_size=4", "train.batch=8", "train.steps=2", "device=cpu",
    "rollout.max_tokens=100", "checkpoint.every=1", "validation.every=2", "train.precision=fp32",
    "engine.precision=fp32", "engine.kv_mb=16", "log.rollouts=8", "train.learning_rate=1e-3",
    "objective.kl=none", "task.turns=3",
]  # fmt: skip
REWARD = """
def score(response, row):
    roles = [message["role"] for message in row["messages"]]
    return {"reward": float("4" in response), "results": roles.count("tool")}
"""


def conversation(number):
    call = {"name": "calculator", "arguments": {"expression": "2*2"}}
    return {
        "messages": [
            {"role": "user", "content": f"{number}"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": call}]},
            {"role": "tool", "content": "4"},
            {"role": "assistant", "content": "4"},
        ],
        "tools": [tool_schema(calculator, "test")],
    }


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """A run that has learned to call the calculator."""
    folder = tmp_path_factory.mktemp("warm")
    rows = [conversation(number) for number in range(64)]
    (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = [
        *SCRATCH, "task.name=pairs", f"task.train={folder}/talk.jsonl", "task.validation_rows=4",
        "train.batch=4", "train.learning_rate=1e-2", "task.epochs=10",
        "checkpoint.every=1000", "validation.every=1000",
    ]  # fmt: skip
    return api.sft("guess-sft", task={"validation": None}, overrides=settings, out=folder / "run")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rows = [{"prompt": f"{n}"} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(REWARD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recorded(run):
    return [json.loads(line) for line in Path(run, "rollouts.jsonl").read_text().splitlines()]


def test_a_run_with_the_calculator(warm, folder):
    run = api.train("keywords", overrides=[*TOOLS, f"model.name={warm.path}"], out=folder / "run")
    for step in run.metrics[1:]:
        assert step["mismatch/logprob_mean"] < 1e-5
        assert step["mismatch/logprob_max"] < 1e-4
        assert step["rollout/tool_calls"] > 0.5
    rows = recorded(run)
    assert len(rows) == 16
    for row in rows:
        inserted = "".join(row["tokens"][i] for i in row["forced"]).replace("<end>", "")
        sampled = "".join(t for i, t in enumerate(row["tokens"]) if i not in row["forced"])
        assert sampled.count("call calculator") >= inserted.count("4\n")
        lines, counts = inserted.split("\n")[:-1], {"tool_calls": 0, "tool_errors": 0}
        for turn in row["turns"]:  # a truncated turn has no answer, and no metrics
            counts |= turn["metrics"]
        assert len(lines) <= counts["tool_calls"]
        assert sum(line.startswith("error: ") for line in lines) <= counts["tool_errors"]
    answered = [row for row in rows if "".join(row["tokens"]).endswith("\n4<end>")]
    assert answered
    assert all((row["reward"], row["parts"]["results"]) == (1.0, 1.0) for row in answered)


def test_a_run_with_tools_repeats_and_resumes_bit_for_bit(warm, folder):
    settings = [*TOOLS, f"model.name={warm.path}"]
    api.train("keywords", overrides=settings, out=folder / "a" / "run")
    api.train("keywords", overrides=settings, out=folder / "b" / "run", stop=stopper(1))
    api.resume(folder / "b" / "run")
    assert fingerprint(folder / "a" / "run") == fingerprint(folder / "b" / "run")


def test_the_warm_start_and_the_task_write_the_same_prompt(folder):
    """A conversation to learn from begins with the tokens of the task's prompt."""
    tokenizer = Tokenizer.of_bytes()
    config = load_recipe("keywords", [*TOOLS, *SCRATCH]).task
    with closing(make_environment(config, tokenizer=tokenizer, seed=0)) as task:
        prompt = task.prompt(0)
        row = check_pair(conversation(prompt.reference["prompt"]), "row 0")
        written = ConversationFormat(tokenizer, row["tools"], now=TODAY).open(row["prompt"])
        assert prompt.token_ids.tolist() == written.tolist()
        assert prompt.text.startswith("To call a tool, write a line: call NAME {ARGUMENTS}\ncalc")


TOOL_FILE = """
def weather(city):
    "Return the weather."
"""


def test_tools_are_checked_before_the_model_is_loaded(folder):
    (folder / "tools.py").write_text(TOOL_FILE)
    for tool, said in (
        ("tools.py:weather", "parameter city of weather: has no type hint; write, for example"),
        ("tools.py:nothing", r"tools\.py defines weather, but not 'nothing'"),
        ("search:docs", r"tool search: there is no folder .*docs"),
    ):
        settings = [*TOOLS, *SCRATCH, f"task.tools=['calculator', '{tool}']"]
        with pytest.raises(DataError, match=said):
            api.train("keywords", overrides=settings, out=folder / "run")
    with pytest.raises(DataError, match="no function 'other'"):
        api.train("keywords", overrides=[*TOOLS, *SCRATCH, "task.reward=reward.py:other"])
    assert not (folder / "run").exists()


def test_rows_need_prompts_only_without_an_environment(folder):
    (folder / "rows.jsonl").write_text('{"n": 1}\n{"n": 2}\n{"n": 3}\n')
    with pytest.raises(DataError, match="no field 'prompt', only 'n'"):
        api.train("keywords", overrides=[*TOOLS, *SCRATCH], out=folder / "run")
    config = load_recipe("keywords", [*TOOLS, "task.environment=guess"]).task
    rows, _ = load_starts(config, 0)
    try_environment(config, rows[0])


def test_settings_that_do_not_go_together():
    tools = [one for one in TOOLS if not one.startswith(("task.tools", "task.reward"))]
    for settings, said in (
        (["task.reward=exact"], "needs an environment or tools; set task.environment ="),
        (["task.tools=['calculator']"], "needs a reward for the last message, .* set task.reward"),
        (["task.tools=['calculate']"], "task.tools"),
        (["task.environment=guess", "task.tool_seconds=3"], "task.tool_seconds has no effect"),
        (["task.environment=guess", "task.tool_format=plain"], "task.tool_format has no effect"),
        ([TOOLS[1], "task.reward=x.py:f", "task.sandbox=off"], "task.sandbox has no effect with"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_recipe("keywords", [*tools, *settings])
    task = load_recipe("keywords", [*TOOLS, "task.tools=['python']", "task.sandbox=off"]).task
    assert (task.tools, task.sandbox) == (["python"], "off")


def test_the_limits_of_the_recipe_reach_the_environments():
    settings = ["task.tools=['python', 'search:docs', 'f.py:f']", "task.memory_mb=100"]
    more = ["task.tool_seconds=3", "task.wall_seconds=7", "task.sandbox=off"]
    pool = open_environments(load_recipe("keywords", [*TOOLS, *settings, *more]).task, "plain")
    assert pool.limits.wall_seconds == 10.0
    assert pool._tools == ToolSettings(
        (PythonSource(100 << 20, False), SearchSource(str(Path("docs").resolve())), "f.py:f"),
        "plain",
        call_seconds=3.0,
        step_seconds=7.0,
    )


def test_files_of_tools_are_inputs(folder):
    (folder / "docs").mkdir()
    (folder / "docs" / "a.txt").write_text("a")
    (folder / "tools.py").write_text(TOOL_FILE)
    settings = ["task.tools=['calculator', 'search:docs', 'tools.py:weather']"]
    task = load_recipe("keywords", [*TOOLS, *settings]).task
    first = dict(inputs._hash_task(task))
    assert {"tools.search:docs", "tools.tools.py:weather", "reward"} <= first.keys()
    (folder / "docs" / "a.txt").write_text("b")
    changed = dict(inputs._hash_task(task))
    assert [key for key in first if first[key] != changed[key]] == ["tools.search:docs"]
