"""The entry points of multi-turn episodes: eval, generate, plan, and the pages of a run."""

import json
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console

from burnish import api
from burnish.cli import main, tables
from burnish.runs.report import write_report
from tests.loops.test_recorder import stopper
from tests.runs.test_report import data_of

GAME = """
class Game:
    def reset(self, row, seed):
        self.row, self.turns, self.seed = row, 0, seed
        if row.get("unlucky") and row["unlucky"].pop():
            raise ValueError("no board")
        return f"play {row.get('n')} \\x1b[31m"

    def step(self, message):
        self.turns += 1
        if self.row.get("fail"):
            raise RuntimeError("broken \\x1b[31m")
        done = self.turns == LAST
        return {"messages": f"answer {self.turns} \\x1b[31m", "reward": 0.5, "done": done,
                "metrics": {"correct": self.seed % 2}}
"""
TINY = [
    "task.name=environment", "task.environment=game.py:Game", "task.train=rows.jsonl",
    "task.validation_rows=2", "task.turn_tokens=3", "task.turns=4", "model=scratch",
    "model.tokenizer=bytes", "model.layers=1", "model.width=32", "model.heads=4", "model.d_ff=48",
    "model.context=128", "rollout.batch=4", "rollout.group_size=2", "train.batch=4",
    "train.steps=2", "device=cpu", "rollout.max_tokens=100", "checkpoint.every=1",
    "validation.every=2", "train.precision=fp32", "engine.precision=fp32", "engine.kv_mb=16",
    "objective.kl=none", "log.rollouts=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A directory with a run of two steps, the second after it was resumed."""
    folder = tmp_path_factory.mktemp("episodes")
    rows = [{"n": n} for n in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "game.py").write_text(GAME.replace("LAST", "2"))
    (folder / "longer.py").write_text(GAME.replace("LAST", "3").replace("self.seed % 2", "1"))
    (folder / "endless.py").write_text(GAME.replace("LAST", "99"))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        api.train("keywords", overrides=TINY, out="run", stop=stopper(1))
        api.resume("run")
    return folder


@pytest.fixture
def burnish(place, monkeypatch, capsys):
    """Runs a command in this process, in the directory of the run."""
    monkeypatch.chdir(place)
    monkeypatch.setattr(tables, "out_console", Console(highlight=False, width=160))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["burnish", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            main.main()
        said = capsys.readouterr()
        return SimpleNamespace(code=end.value.code or 0, out=said.out, err=said.err)

    return run


def figures(out):
    lines = (line.split() for line in out.splitlines())
    return {words[0]: float(words[1]) for words in lines if words[0].startswith("validation/")}


def test_a_run_that_was_resumed_shows_its_episodes(place):
    rows = data_of(write_report(place / "run"))["rollouts"]["rows"]
    assert {row["step"] for row in rows if row["source"] == 0} == {1, 2}
    assert all(len(row["turns"]) == 2 for row in rows)
    assert all(turn["seconds"] > 0 for row in rows for turn in row["turns"])


def test_a_run_is_evaluated_with_its_environment_or_another(burnish, place):
    done = burnish("eval", "run", "-n", 4, "--out", "evals/own")
    assert done.code == 0, done.err
    own = figures(done.out)
    assert own["validation/turns"] == 2
    assert own["validation/reward"] == 1
    assert {"validation/pass_at_2", "validation/pass_at_4"} <= set(own)
    assert "answer 1" in (place / "evals/own/report.html").read_text()
    assert "\x1b" not in (place / "evals/own/report.html").read_text()
    done = burnish("eval", "run", "--environment", "longer.py:Game", "--out", "evals/other")
    assert done.code == 0, done.err
    other = figures(done.out)
    assert (other["validation/turns"], other["validation/accuracy"]) == (3, 1)
    done = burnish("compare", "evals/own", "evals/other", "--out", "evals/both.html")
    assert done.code == 0, done.err


def test_a_model_is_evaluated_by_a_recipe_with_an_environment(burnish):
    given = [word for name in TINY[2:6] for word in ("--set", name)]
    given += ["--model", "run", "--environment", "longer.py:Game", "--max-tokens", 100]
    done = burnish("eval", "keywords", *given)
    assert done.code == 0, done.err
    assert figures(done.out)["validation/turns"] == 3


def test_a_run_with_rows_of_a_script_is_evaluated(place, monkeypatch):
    monkeypatch.chdir(place)
    rows = [{"n": n} for n in range(6)]
    kept = [setting for setting in TINY if not setting.startswith("task.train")]
    run = api.train("keywords", prompts=rows, overrides=[*kept, "train.steps=1"], out="scripted")
    found = api.evaluate(run, environment="longer.py:Game", out="scripted-eval")
    assert found.figures["validation/turns"] == 3


def test_other_commands_take_a_run_with_episodes(burnish, place):
    for command in (["runs", "."], ["report", "run"], ["compare", "run", "run"]):
        done = burnish(*command)
        assert done.code == 0, done.err
    assert "run" in api.Run(place / "run")._repr_html_()
    planned = burnish("plan", *[w for x in TINY for w in ("--set", x)], "keywords")
    assert "at most 4 turns, each of at most 3 tokens" in planned.out


def test_an_episode_is_printed_turn_by_turn(burnish):
    done = burnish("generate", "run", "--environment", "game.py:Game", "--row", '{"n": 7}')
    assert done.code == 0, done.err
    lines = done.out.splitlines()
    assert lines[:3] == ['── row {"n": 7} ──', "── user ──", "play 7 \\x1b[31m"]
    heads = [line for line in lines if line.startswith("── ")]
    assert [head.split(":")[0] for head in heads[2:]] == [
        "── turn 1, assistant",
        "── environment",
        "── user ──",
        "── turn 2, assistant",
        "── environment",
        "── user ──",
        "── ended by the environment after 2 turns; reward 1 ──",
    ]
    assert "ms, reward 0.5, correct " in heads[3]
    assert "answer 2 \\x1b[31m" in lines
    again = burnish(
        "generate", "--model", "run", "--environment", "game.py:Game", "--row", '{"n": 7}'
    )
    said = [line for line in again.out.splitlines() if " ms" not in line]
    assert said == [line for line in lines if " ms" not in line]
    other = burnish(
        "generate", "run", "--environment", "game.py:Game", "--data", "rows.jsonl", "--seed", 5
    )
    assert other.out.startswith('── row {"n": ')


@pytest.mark.parametrize(
    ("options", "end"),
    [
        ([], "truncated after 4 turns, the limit (--turns); reward 2"),  # the limit of its run
        (["--turns", 1], "truncated after 1 turn, the limit (--turns); reward 0.5"),
        (
            ["--max-tokens", 5],
            "truncated after 1 turn: 5 tokens (--max-tokens), or the model's context; reward 0.5",
        ),
    ],
)
def test_a_truncated_episode_says_at_which_limit(burnish, options, end):
    done = burnish("generate", "run", "--environment", "endless.py:Game", *options)
    assert done.code == 0, done.err
    assert done.out.splitlines()[-1] == f"── {end} ──"


def test_an_environment_that_fails_is_printed(burnish):
    done = burnish("generate", "run", "--environment", "game.py:Game", "--row", '{"fail": true}')
    assert done.code == 1
    assert "failed: RuntimeError: broken \\x1b[31m (game.py, line 12)" in done.out
    assert done.out.splitlines()[-1] == "── the environment failed in turn 1 ──"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["x", "--row", "{}"], "--row, --data and --turns need --environment"),
        ([], "generate needs a prompt"),
        (["run", "more", "--environment", "game.py:Game"], "one episode of one model"),
        (["--environment", "game.py:Game"], "one episode of one model"),
        (["run", "--environment", "game.py:Game", "-n", 2], "without -n and --raw"),
        (
            ["run", "--environment", "game.py:Game", "--row", "[3]"],
            "must be a JSON object, got '[3]'",
        ),
        (["run", "--environment", "game.py:Game", "--row", "{"], "must be a JSON object, got '{'"),
        (
            ["run", "--environment", "game.py:Game", "--row", "{}", "--data", "rows.jsonl"],
            "give one of the two",
        ),
        (["run", "--environment", "none.py:Game"], "none.py"),
    ],
)
def test_wrong_options_of_generate_are_answered(burnish, arguments, error):
    done = burnish("generate", *arguments)
    assert done.code == 1
    assert error in done.err
