"""Runs of multi-turn episodes: exact tokens, no gradient of inserted ones, resumption, failures."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from burnish import api
from burnish.errors import ConfigError, GraderError
from burnish.launch.local import build_local, look_at_prompts
from burnish.launch.resolve import resolve, survey
from burnish.machine import hardware
from burnish.model.tokenizer import Tokenizer
from burnish.recipe.load import load_recipe
from burnish.recipe.plan import make_plan
from burnish.runs.metrics import Timers
from burnish.runs.report import write_report
from tests.environments.conftest import descendants, gone
from tests.loops.test_recorder import fingerprint, stopper
from tests.runs.test_report import data_of

GAME = """
import os, time

class Game:
    deterministic = True

    def reset(self, row, seed):
        self.heard, self.seed, self.row = [], seed, row
        return f"{row['n']} {seed % 10}"

    def step(self, message):
        self.heard.append(message["content"])
        text = "".join(self.heard)
        turns = len(self.heard)
        if self.row["n"] in self.row.get("bad", []):
            raise RuntimeError("broken")
        return {
            "messages": f"{turns}: {sum(map(ord, text)) % 97}",
            "reward": (sum(map(ord, text)) % 11) / 10,
            "done": turns == 3,
            "metrics": {"heard": len(text)},
        }
"""
EPISODES = [
    "task.name=environment", "task.environment=game.py:Game", "task.train=rows.jsonl",
    "task.validation_rows=2", "task.turn_tokens=5", "model=scratch", "model.tokenizer=bytes",
    "model.layers=1", "model.width=32", "model.heads=4", "model.d_ff=48", "model.context=128",
    "rollout.batch=8", "rollout.group_size=4", "train.batch=8", "train.steps=3", "device=cpu",
    "rollout.max_tokens=60", "checkpoint.every=1", "validation.every=3", "train.precision=fp32",
    "engine.precision=fp32", "engine.kv_mb=16", "log.rollouts=8", "train.learning_rate=1e-2",
    "objective.kl=none",
]  # fmt: skip
CRITIC = ["objective.advantage=gae", "critic.learning_rate=1e-2", "objective.loss=clip"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rows = [{"n": n} for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "game.py").write_text(GAME)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def recorded(run):
    return [json.loads(line) for line in Path(run, "rollouts.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "more",
    [
        [],
        [*CRITIC, "train.epochs=2"],
        ["objective.ratio=sequence", "objective.loss=clip", "train.epochs=2"],
        ["objective.kl=k3", "rollout.overlong=mask", "rollout.max_tokens=32"],
        [
            "objective.advantage=group_zscore",
            "selection.dead_groups=dynamic",
            "rollout.temperature=0.7",
        ],
        ["objective.kl.name=k1", "objective.kl.where=reward", "objective.reduction=sequence_mean"],
        ["rollout.stop=['a','e','i']", "rollout.min_tokens=2"],
        ["task.live=3"],
        ["task.pace=free", "task.live=5"],
        ["selection.dead_groups=active", "selection.on_bound=learn", "task.live=6"],
    ],
    ids=[
        "plain",
        "critic",
        "sequence ratio",
        "masked",
        "dynamic",
        "kl in reward",
        "stop",
        "live",
        "free",
        "active",
    ],
)
def test_sampled_tokens_have_the_learners_log_probabilities(folder, more):
    """What the learner computes for each sampled token, in its recorded context, is what it was
    sampled with; inserted tokens are not compared."""
    run = api.train("keywords", overrides=[*EPISODES, *more], out=folder / "run")
    for step in run.metrics[1:]:
        assert step["mismatch/logprob_mean"] < 1e-5
        assert step["mismatch/logprob_max"] < 1e-4
    for row in recorded(run):
        assert len(row["turns"]) == 3 or row["finish"] == "length"
        text = "".join(row["tokens"])
        assert row["forced"]
        inserted = "".join(row["tokens"][i] for i in row["forced"])
        assert inserted.replace("<end>", "").startswith("1: ")
        assert "1: " in text
        assert len(row["tokens"]) - len(row["forced"]) <= 15
        assert (row["limit"] is None) == (row["finish"] == "stop")


FORGETS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ m.role[0] }}:"
    "{% if m.role == 'assistant' and loop.index0 < ns.last and m.content[:7] != 'burnish' %}"
    "{{ m.content[1:] }}{% else %}{{ m.content }}{% endif %}<end>{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)
"""Leaves out the first character of turns before the last user message."""


@pytest.fixture
def forgetful(folder):
    """Settings of a model whose chat template rewrites earlier turns."""
    tokenizer = Tokenizer.of_bytes()
    tokenizer.chat_template = FORGETS
    (folder / "forgetful").mkdir()
    tokenizer.save(folder / "forgetful")
    kept = [one for one in EPISODES if "context" not in one]
    return [*kept, "model.tokenizer=forgetful", "model.context=256"]


TEMPLATE = ["rollout.history=template"]


@pytest.mark.parametrize(
    "more",
    [
        [],
        [*CRITIC, "train.epochs=2", "train.micro_tokens=400"],
        ["objective.ratio=sequence", "objective.loss=clip", "train.batch=4"],
        [
            "objective.kl=k3",
            "rollout.overlong=mask",
            "train.micro_sequences=2",
            f"rollout.stop={list('abcdefghijklmnopqrstuvwxyz')}",
            "rollout.max_tokens=14",
        ],
        ["objective.kl.name=k1", "objective.kl.where=reward", "rollout.temperature=0.7"],
        ["selection.dead_groups=dynamic", "objective.advantage=opo"],
    ],
    ids=["plain", "critic", "sequence ratio", "masked", "kl in reward", "dynamic"],
)
def test_a_rewritten_history_makes_several_sequences(folder, forgetful, more):
    run = api.train("keywords", overrides=[*forgetful, *TEMPLATE, *more], out=folder / "run")
    for step in run.metrics[1:]:
        assert step["mismatch/logprob_mean"] < 1e-5
        assert step["mismatch/logprob_max"] < 1e-4
    rows = recorded(run)
    for row in rows:
        turns = len(row["turns"])
        texts = "".join(row["tokens"])
        assert not row["forced"]  # all messages are in the prompts
        assert len(row["tokens"]) <= 15
        sequences = row.get("sequences", [])
        assert len(sequences) <= turns - 1
        for number, one in enumerate(sequences, 1):
            assert one["prompt"].startswith(row["prompt"].removesuffix("a:"))
            assert one["prompt"].endswith("<end>a:")
            assert 0 < one["start"] < len(row["tokens"]), texts
            assert one["prompt"].count("u:") > number
    assert sum(len(row.get("sequences", [])) for row in rows) > len(rows) / 2


def test_several_sequences_resume_bit_for_bit(folder, forgetful):
    many = [*forgetful, *TEMPLATE, *CRITIC, "train.epochs=2"]
    api.train("keywords", overrides=many, out=folder / "a" / "run")
    api.train("keywords", overrides=many, out=folder / "b" / "run", stop=stopper(1))
    api.resume(folder / "b" / "run")
    assert fingerprint(folder / "a" / "run") == fingerprint(folder / "b" / "run")


def test_a_template_that_rewrites_history_is_reported_once(folder, forgetful, capsys):
    run = api.train("keywords", overrides=[*forgetful, "train.steps=1"], out=folder / "run")
    said = "the chat template rewrites earlier turns after user messages"
    assert capsys.readouterr().err.count(said) == 1
    assert all("sequences" not in row for row in recorded(run))
    for history, chosen in (("append", "they stay as they were"), ("template", "a new sequence")):
        recipe = load_recipe("keywords", [*forgetful, f"rollout.history={history}"])
        found = look_at_prompts(survey(recipe, folder / "other"))
        assert found.problems == ()
        lines = dict(make_plan(recipe, folder / "other", found.size))["task"]
        assert chosen in dict(lines)["history"]
    plain = look_at_prompts(survey(load_recipe("keywords", EPISODES), folder / "other"))
    assert "history" not in dict(dict(make_plan(recipe, folder, plain.size))["task"])
    with pytest.raises(ConfigError, match=r"rollout\.history"):
        load_recipe("keywords", ["rollout.history=template"])


def test_first_messages_of_a_group_may_differ(folder):
    """Of an environment that is not deterministic: each episode has its own prompt, and all of a
    group share their baseline."""
    loose = GAME.replace("deterministic = True", "deterministic = False").replace(
        "{seed % 10}", "{os.getpid()}"
    )
    (folder / "game.py").write_text(loose)
    (folder / "reward.py").write_text(
        "def score(response, row):\n    return len(row['messages'][0]['content'])\n"
    )
    for more in ([], [*CRITIC, "train.epochs=2"], ["objective.ratio=sequence"]):
        out = folder / f"run-{len(more)}"
        run = api.train("keywords", overrides=[*EPISODES, *more], out=out)
        for step in run.metrics[1:]:
            assert step["mismatch/logprob_max"] < 1e-4
        for row in recorded(run):
            ((start, prompt),) = [tuple(one.values()) for one in row["sequences"]]
            assert start == 0
            assert prompt != row["prompt"]
            assert prompt.split()[0] == row["prompt"].split()[0]
    (folder / "game.py").write_text(loose.replace("= False", "= True"))
    with pytest.raises(GraderError, match="set deterministic = False"):
        api.train("keywords", overrides=EPISODES, out=folder / "other")


def test_each_turn_has_a_think_budget(folder):
    think = ["rollout.think.tokens=2", "rollout.think.end=!", "rollout.think.phrase='!!'"]
    more = ["task.turn_tokens=8", "rollout.max_tokens=90"]
    run = api.train("keywords", overrides=[*EPISODES, *think, *more], out=folder / "run")
    assert max(step["mismatch/logprob_max"] for step in run.metrics[1:]) < 1e-4
    rows = recorded(run)
    phrases = ["".join(row["tokens"][i] for i in row["forced"]).count("!!") for row in rows]
    assert all(n <= len(row["turns"]) for n, row in zip(phrases, rows, strict=True))
    assert sum(phrases) > 2 * len(rows)  # in most of the 3 turns


def test_inserted_tokens_have_no_gradient(folder):
    """The log-probabilities and versions recorded for inserted tokens change no gradient step, and
    neither do their advantages."""
    recipe = load_recipe("keywords", EPISODES)
    steps = []
    for noise in (0.0, 7.5):
        parts = build_local(resolve(recipe, None))
        inner = parts.train.keywords["engine"]
        original = inner._finished

        def noisy(*args, original=original, noise=noise, **how):
            completion = original(*args, **how)
            completion.logprobs[~completion.sampled] = -noise
            return completion

        inner._finished = noisy
        list(parts.train(timers=Timers()))
        steps.append({k: v.clone() for k, v in parts.learner.weights().tensors.items()})
        parts.close()
    assert all(torch.equal(steps[0][name], steps[1][name]) for name in steps[0])


STALE = ["objective.proximal=behavior"]


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["task.live=3"],
        [*STALE, "loop.lag=2"],
        [*STALE, "loop.lag=1", "buffer.capacity=4", "buffer.max_uses=2", "rollout.max_tokens=32"],
        ["selection.dead_groups=active", "selection.on_bound=learn", "loop.lag=1", *STALE],
    ],
    ids=["plain", "live", "lag", "buffer", "active"],
)
def test_a_run_repeats_and_resumes_bit_for_bit(folder, more):
    settings = [*EPISODES, *more]
    run = api.train("keywords", overrides=settings, out=folder / "a" / "run")
    api.train("keywords", overrides=settings, out=folder / "b" / "run", stop=stopper(1))
    api.resume(folder / "b" / "run")
    assert fingerprint(folder / "a" / "run") == fingerprint(folder / "b" / "run")
    name = "mismatch/logprob_mean"
    found = [step[name] for step in run.metrics if name in step]
    assert found
    assert max(found) < 1e-5


def test_the_plan_says_that_free_episodes_do_not_repeat(folder):
    def lines(*more):
        return dict(dict(make_plan(load_recipe("keywords", [*EPISODES, *more]), folder))["task"])

    assert lines()["order"] == "all take a turn, then all environments step"
    assert "a resumed or repeated run differs" in lines("task.pace=free")["order"]


def test_more_environments_than_processes_are_refused(folder, monkeypatch):
    monkeypatch.setattr(hardware, "processes", lambda: 100)
    with pytest.raises(ConfigError, match=r"task\.live = 256 exceeds .*; use task\.live = 36, or"):
        api.train("keywords", overrides=EPISODES, out=folder / "run")
    api.train("keywords", overrides=[*EPISODES, "task.live=36"], out=folder / "run")


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_episodes_resumes_bit_for_bit(folder):
    slow = GAME.replace(
        "        self.heard.append", "        time.sleep(0.2)\n        self.heard.append"
    )
    (folder / "game.py").write_text(slow)
    api.train("keywords", overrides=EPISODES, out=folder / "a" / "run")
    sets = [word for setting in EPISODES for word in ("--set", setting)]
    command = [sys.executable, "-m", "burnish", "train", "keywords", *sets, "--quiet"]
    child = subprocess.Popen([*command, "--out", "b/run"], cwd=folder)
    deadline = time.monotonic() + 120
    while not list(folder.glob("b/run/checkpoints/step-*")) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)  # the next step's episodes are under way
    child.send_signal(signal.SIGKILL)
    child.wait(30)
    api.resume(folder / "b" / "run")
    found = [fingerprint(folder / name / "run") for name in "ab"]
    for files in found:  # the command line is another one
        del files["environment.json"], files["report.html"]
    assert found[0] == found[1]


@pytest.mark.slow
def test_ranks_of_torchrun_learn_what_one_process_learns(folder):
    sets = [word for setting in EPISODES for word in ("--set", setting)]
    command = [sys.executable, "-m", "burnish", "train", "keywords", *sets, "--quiet"]
    mesh = ["--runtime", "torchrun", "--set", "mesh.shard=2"]
    found = []
    for name, more in (("alone", []), ("mesh", mesh)):
        subprocess.run([*command, *more, "--out", f"{name}/run"], check=True, timeout=300)
        rows = [json.loads(x) for x in Path(name, "run/metrics.jsonl").read_text().splitlines()]
        found.append([row["train/grad_norm"] for row in rows[1:]])
    assert found[1] == pytest.approx(found[0], rel=1e-3)
    assert max(row["mismatch/logprob_mean"] for row in rows[1:]) < 1e-5


def test_an_environment_that_fails_is_counted_and_stops_the_run(folder):
    rows = [{"n": n, "bad": [1, 2]} for n in range(8)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    many = [*EPISODES, "rollout.max_errors=1", "train.steps=4"]
    run = api.train("keywords", overrides=many, out=folder / "run")
    errors = [step["rollout/grades_error"] for step in run.metrics[1:]]
    assert max(errors) > 0
    failed = [row for row in recorded(run) if row["status"] == "error"]
    counts = [sum(row["step"] == step for row in failed) for step in (1, 2, 3, 4)]
    assert counts == [8 * share for share in errors]
    assert all(row["advantage"] is None for row in failed)
    assert all(row["reward"] is None for row in failed)
    assert all("broken" in row["turns"][-1]["error"] for row in failed)
    shown = [row for row in data_of(write_report(run.path))["rollouts"]["rows"] if row["failed"]]
    assert len(shown) == len(failed) > 0
    with pytest.raises(GraderError, match="broken"):
        api.train("keywords", overrides=[*EPISODES, "train.steps=8"], out=folder / "stopped")


def test_evaluation_plays_episodes(folder):
    run = api.train("keywords", overrides=[*EPISODES, "validation.samples=2"], out=folder / "run")
    assert run.metrics[0]["validation/reward"] > 0
    assert run.metrics[-1]["validation/turns"] == 3
    rows = [json.loads(x) for x in Path(run, "evaluations.jsonl").read_text().splitlines()]
    assert all(len(row["turns"]) == 3 for row in rows)


def test_an_environment_and_rows_replace_a_task(folder):
    kept = [
        x for x in EPISODES if not x.startswith(("task.name", "task.train", "task.environment"))
    ]
    rows = [{"n": n} for n in range(6)]
    (folder / "reward.py").write_text(
        "def score(response, row):\n    return len(row['messages'])\n"
    )
    given = {"environment": "game.py:Game", "overrides": kept}
    run = api.train("keywords", prompts=rows, out=folder / "run", **given)
    assert run.recipe.task.name == "environment"
    assert run.metrics[-1]["rollout/turns"] == 3
    recipe = api.recipe_of(run.recipe, [], data="other.jsonl", reward="reward.py:score")
    assert (recipe.task.environment, recipe.task.train) == ("game.py:Game", "other.jsonl")
    assert recipe.task.reward == "reward.py:score"
    with pytest.raises(
        ConfigError, match=r"the reward of an environment is FILE\.py:NAME, got fun"
    ):
        api.train("keywords", prompts=rows, reward=lambda text, row: 1.0, **given)


def test_an_environment_is_tried_before_the_model_is_loaded(folder):
    (folder / "game.py").write_text(GAME.replace("return f\"{row['n']} {seed % 10}\"", "return 3"))
    with pytest.raises(
        Exception, match="reset must return a list of messages or a text, got int 3"
    ):
        api.train("keywords", overrides=EPISODES, out=folder / "run")
    assert not (folder / "run").exists()


def test_settings_that_do_not_go_with_episodes_are_refused_together(folder):
    with pytest.raises(ConfigError) as caught:
        load_recipe("keywords", [*EPISODES, "objective.advantage=vine"])
    assert str(caught.value) == (
        "task.name = 'environment' can't be combined with objective.advantage.name = 'vine' yet; "
        "use objective.advantage.name = 'group_mean'"
    )


@pytest.mark.parametrize(
    ("wrong", "message", "right"),
    [
        ("rollout.min_tokens=6", "above task.turn_tokens = 5", "rollout.min_tokens=5"),
        (
            "rollout.think={tokens=5}",
            "no room for an answer within task.turn_tokens = 5; use rollout.think.tokens = 4",
            "rollout.think={tokens=4}",
        ),
    ],
)
def test_limits_of_a_turn_that_contradict_each_other(folder, wrong, message, right):
    with pytest.raises(ConfigError, match=message):
        load_recipe("keywords", [*EPISODES, wrong])
    load_recipe("keywords", [*EPISODES, right])


def test_an_engine_in_another_process_plays_episodes(folder):
    """It receives the tokens of each turn's beginning, and gives the learner's log-probabilities;
    its process ends with the run."""
    before = set(descendants(os.getpid()))
    more = ["engine.name=hf", "task.live=5"]
    own = [setting for setting in EPISODES if not setting.startswith("engine.kv_mb")]
    run = api.train("keywords", overrides=[*own, *more], out=folder / "run")
    for step in run.metrics[1:]:
        assert step["mismatch/logprob_mean"] < 1e-5
    assert {len(row["turns"]) for row in recorded(run)} == {3}
    assert all(map(gone, set(descendants(os.getpid())) - before))


def test_lengths_count_sampled_tokens(folder):
    run = api.train("keywords", overrides=EPISODES, out=folder / "run")
    for timings in run.timings:
        phases = [v for k, v in timings.items() if k.startswith("time/") and k != "time/step"]
        assert sum(phases) == pytest.approx(timings["time/step"])
        assert (timings["time/environments"] > 0) == (timings["step"] > 0)
    for row in [*run.rollouts, *run.evaluations]:
        assert row["first_messages"][0]["role"] == "user"
        for turn in row["turns"]:
            assert turn["seconds"] > 0
            sampled = {*range(turn["start"], turn["end"])}
            assert sampled.isdisjoint(row["forced"])
            assert 0 < len(turn["text"]) <= turn["end"] - turn["start"]  # a token is a byte
    inserted = [len(row["forced"]) for row in recorded(run) if row["step"] == 3]
    assert run.metrics[-1]["rollout/observation_tokens"] == pytest.approx(np.mean(inserted))
    last = [row for row in recorded(run) if row["step"] == 3]
    sampled = [len(row["tokens"]) - len(row["forced"]) for row in last]
    assert run.metrics[-1]["rollout/length"] == pytest.approx(np.mean(sampled))
    assert run.metrics[-1]["rollout/tokens_sampled"] == sum(sampled)
