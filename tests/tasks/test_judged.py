"""Judged tasks: rubrics that are refused, criteria that evolve, and runs that resume."""

import dataclasses
import json
import pickle
import re

import numpy as np
import pytest

from burnish import api
from burnish.errors import BurnishError, ConfigError, DataError, GraderError
from burnish.graders.judge import Judge
from burnish.launch.preflight import find_problems, raise_problems
from burnish.recipe.judge import EvolveConfig, JudgeConfig
from burnish.recipe.load import load_recipe, recipe_to_toml
from burnish.recipe.plan import make_plan
from burnish.recipe.tasks import JudgedTask
from burnish.rollout.rollout import costs, describe
from burnish.tasks.judged import Evolving, check_judged, contrast, discrimination, make_judged
from burnish.tasks.stream import PromptStream
from burnish.types import Grade, Status, Turn
from tests.conftest import byte_tokenizer, make_group
from tests.endpoint import Refused, endpoint, told

RECIPE = """
[task]
name = "judged"
train = "ROWS"
validation_rows = 2
chat = false
rubric = [["Has the letter e.", 2], ["Has the letter z.", -1]]
judge = {url = "URL", model = "m", parallel = 4, seconds = 20}
evolve = {most = 2, min_std = 0.2, weight = 0.5}
[model]
name = "scratch"
tokenizer = "bytes"
layers = 1
width = 32
heads = 4
d_ff = 48
context = 64
[rollout]
batch = 8
group_size = 4
max_tokens = 16
[engine]
kv_mb = 16
precision = "fp32"
[objective]
advantage = "group_mean"
proximal = "behavior"
[train]
steps = 5
batch = 8
precision = "fp32"
[checkpoint]
every = 2
"""


def write(tmp_path, url="http://127.0.0.1:1/v1", recipe=RECIPE):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"Say {i}"}) + "\n" for i in range(8)))
    file = tmp_path / "mine.toml"
    file.write_text(recipe.replace("ROWS", str(rows)).replace("URL", url))
    return str(file)


def letters(request):
    """A judge of letters: a response meets "Has the letter e." if it has one. It proposes a letter
    that the better response has and the worse one lacks, as far as there is one."""
    if request["max_tokens"] == 1:
        return "["
    seen = told(request)
    if "response" in seen:
        wanted = [text[-2] for name, text in seen.items() if name.startswith("criterion")]
        return json.dumps([int(letter in seen["response"]) for letter in wanted])
    new = sorted(set(seen["better response"]) - set(seen["worse response"]))
    letter = next((c for c in new if c.isalnum()), "q")
    return json.dumps([f"Has the letter {letter}."])


# Rubrics


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["task.rubric=[]"], "task.rubric needs a criterion with a positive weight, got no crit"),
        (['task.rubric=[["a", -1]]'], "needs a criterion with a positive weight, got -1; add one"),
        (['task.rubric=[["a", 1], ["b", 0]]'], "a weight other than 0, got ['b', 0.0]"),
        (['task.rubric=[[" ", 1]]'], "needs criteria with a text"),
        (['task.rubric=[["a", inf]]'], "task.rubric.0.1 must be a finite number"),
        (["task.judge.url=ftp://x"], "task.judge.url must match pattern"),
        (["task.judge.key=sk-123"], "task.judge.key must match pattern"),
        (["task.judge.tries=0"], "task.judge.tries must be greater"),
        (["task.judge.mdel=x"], "unknown setting 'task.judge.mdel'; did you mean"),
        (["task.evolve.most=0"], "task.evolve.most must be greater"),
        (["task.evolve.min_std=0.5"], "task.evolve.min_std must be less than 0.5"),
    ],
)
def test_settings_that_are_wrong(overrides, message, tmp_path):
    with pytest.raises(ConfigError) as caught:
        load_recipe(write(tmp_path), overrides)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, r"rows, line 3: no field 'rubric', and task\.rubric is not set"),
        ({"rubric": []}, "line 3: .*needs a criterion with a positive weight, got no criteria"),
        ({"rubric": [["a", -1]]}, "positive weight, got -1"),
        ({"rubric": "good"}, r"rubric must be a list of \[text, weight\] pairs: .*got good"),
        ({"rubric": [["a"]]}, "Field required"),
    ],
)
def test_a_row_needs_a_rubric(given, message):
    task = JudgedTask(judge=JudgeConfig(url="http://x", model="m"))
    with pytest.raises(DataError, match=message):
        check_judged(task, {"prompt": "p"} | given, "rows, line 3")


def test_a_rows_own_rubric_is_in_the_place_of_the_tasks():
    task = JudgedTask(rubric=[["a", 1]], judge=JudgeConfig(url="http://x", model="m"))
    assert check_judged(task, {"prompt": "p"}, "")["rubric"] == {"criterion_1": ("a", 1.0)}
    own = check_judged(task, {"prompt": "p", "rubric": [["b", 2], ["c", -1]]}, "")["rubric"]
    assert own == {"criterion_1": ("b", 2.0), "criterion_2": ("c", -1.0)}


def test_the_plan_tells_rubric_judge_and_calls_and_the_recipe_survives_its_file(tmp_path):
    recipe = load_recipe(write(tmp_path))
    lines = dict(dict(make_plan(recipe, tmp_path))["task"])
    assert lines["rubric"] == "+2 'Has the letter e.', -1 'Has the letter z.'"
    assert lines["judge"].startswith("m at http://127.0.0.1:1/v1: 8 calls per step and one per")
    assert (
        lines["evolving"] == "at most 2 more criteria, kept while std_g > 0.2; a call every 1 step"
    )
    assert "rubric =" not in lines["task"]
    for advantage, calls in (
        ("remax", "10 calls per step and one per held-out response"),
        ("vine", "8 calls per step and one per continuation and held-out response, or"),
    ):
        recipe = load_recipe(write(tmp_path), [f"objective.advantage={advantage}"])
        assert calls in dict(dict(make_plan(recipe, tmp_path))["task"])["judge"]
    (tmp_path / "again.toml").write_text(recipe_to_toml(recipe))
    assert load_recipe(tmp_path / "again.toml").task == recipe.task


def test_rows_of_ones_own_keep_the_judge_and_a_reward_does_not(tmp_path):
    file = write(tmp_path)
    assert api.recipe_of(file, data="other.jsonl").task.rubric == load_recipe(file).task.rubric
    assert api.recipe_of(file, data="other.jsonl").task.train == "other.jsonl"
    assert api.recipe_of(file, prompts=["Say a"]).task.rows == [{"prompt": "Say a"}]
    assert api.recipe_of(file, reward="mine.py:f").task.name == "files"


def test_a_judged_task_can_be_sent_to_another_process(tmp_path):
    task = make_judged(load_recipe(write(tmp_path)).task, tokenizer=byte_tokenizer(), seed=0)
    other = pickle.loads(pickle.dumps(task))
    for prompt, same in (
        (task.prompt(3), other.prompt(3)),
        (task.validation[0], other.validation[0]),
    ):
        assert (prompt.prompt_id, prompt.reference) == (same.prompt_id, same.reference)


def test_a_judge_that_does_not_answer_is_said_before_the_run(tmp_path):
    with pytest.raises(GraderError, match=r"does not answer .*Connection refused.*burnish serve"):
        raise_problems(find_problems(load_recipe(write(tmp_path))))


# Criteria that evolve


def group_of(index, scores, texts="wxyz", name="evolved_1"):
    """A group whose rewards are its scores; None is an error."""
    group = make_group(index, [1], [[k] for k in range(len(scores))], [0.0] * len(scores))
    grades = tuple(
        Grade(np.nan, status=Status.ERROR) if s is None else Grade(float(s), {name: float(s)})
        for s in scores
    )
    row = {"asked": f"prompt {index}", "rubric": {"criterion_1": ("Old.", 1.0)}}
    said = zip(group.completions, texts, strict=False)
    completions = tuple(dataclasses.replace(c, text=text) for c, text in said)
    prompt = dataclasses.replace(group.prompt, reference=row)
    return dataclasses.replace(group, prompt=prompt, completions=completions, grades=grades)


def test_discrimination_is_the_mean_over_groups_of_the_std_over_a_group():
    # Over G − 1: std(0, 1) = sqrt(1/2); std(0, 0, 0, 1) = sqrt((3/4) / 3) = 1/2. Errors have no
    # score, and one score has no std.
    groups = [group_of(0, [0, 1, None]), group_of(1, [0, 0, 0, 1]), group_of(2, [1, None])]
    assert discrimination(groups, "evolved_1") == pytest.approx((0.5**0.5 + 0.5) / 2)
    assert discrimination(groups, "evolved_2") is None


def test_the_best_and_the_worst_come_from_the_group_that_differs_most():
    groups = [group_of(0, [0, 0.5]), group_of(1, [None, 0.2, 1, 0.1]), group_of(2, [0.1, 1])]
    assert contrast(groups)[1:] == ("y", "z")
    assert contrast([group_of(0, [1, 1]), group_of(1, [None, None])]) is None


def test_of_an_episode_the_last_turn_is_contrasted():
    """The judge graded nothing else."""
    group = group_of(0, [1, 0], ("call a\nbest", "call b\nworst"))
    completions = tuple(
        dataclasses.replace(
            c, turns=tuple(Turn(0, 1, text, (), None, {}, None) for text in c.text.split("\n"))
        )
        for c in group.completions
    )
    assert contrast([dataclasses.replace(group, completions=completions)])[1:] == ("best", "worst")


def evolving(url, **settings):
    judge = Judge(JudgeConfig(url=url, model="m", tries=1, seconds=20))
    return Evolving(EvolveConfig(**{"most": 2, "min_std": 0.2, "weight": 0.5, **settings}), judge)


def test_criteria_come_stay_and_leave():
    answers = iter(['["New.", "Old."]', "No.", '["New.", "Newer."]', '["a", "b", "c"]', '["D."]'])
    with endpoint(lambda request: next(answers)) as (url, requests):
        own = evolving(url)
        assert own.note([group_of(0, [1, 1])])["rubric/version"] == 0  # nothing to contrast
        assert not requests
        # The base rubric has "Old." already.
        metrics = own.note([group_of(0, [0, 1])])
        assert own.active == {"evolved_1": "New."}
        assert (metrics["rubric/version"], metrics["rubric/active"]) == (1, 1)
        assert (metrics["rubric/calls"], metrics["rubric/tokens"]) == (1, 10)
        assert told(requests[0]) == {
            "criterion 1": "Old.",
            "prompt": "prompt 0",
            "better response": "x",
            "worse response": "w",
        }
        # It discriminates (std sqrt(1/2)), and the next answer has the wrong form.
        metrics = own.note([group_of(1, [0, 1])])
        assert (metrics["rubric/failed"], metrics["rubric/std"]) == (1, pytest.approx(0.5**0.5))
        assert own.active == {"evolved_1": "New."}
        assert told(requests[1])["criterion 2"] == "New."
        # All meet it: it leaves, and does not come back; rewards that differ bring another.
        group = group_of(2, [0, 1], name="other")
        grades = tuple(dataclasses.replace(g, parts={"evolved_1": 1.0}) for g in group.grades)
        metrics = own.note([dataclasses.replace(group, grades=grades)])
        assert own.active == {"evolved_2": "Newer."}
        assert metrics["rubric/std"] == 0
        # More than there is room for is another form.
        assert own.note([group_of(3, [0, 1], name="other")])["rubric/failed"] == 1
        own.note([group_of(3, [0, 1], name="other")])
        assert own.active == {"evolved_2": "Newer.", "evolved_3": "D."}
        assert own.note([group_of(3, [0, 1], name="evolved_2")]).keys() == {
            *("rubric/std", "rubric/version", "rubric/active")
        }  # no room, no call
    assert [row["step"] for row in own.versions] == [2, 4, 6]
    assert [list(row["criteria"]) for row in own.versions] == [
        ["evolved_1"],
        ["evolved_2"],
        ["evolved_2", "evolved_3"],
    ]
    again = evolving(url)
    again.load_state(json.loads(json.dumps(own.state())))
    assert again.state() == own.state()
    again.load_state(PromptStream.BEGINNING)
    assert (again.active, again.steps) == ({}, 0)


def test_costs_add_up():
    group = group_of(0, [0, 1])
    grades = tuple(
        dataclasses.replace(g, cost={"calls": n, "tokens": 10.0 * n, "retries": n - 1})
        for n, g in enumerate(group.grades, 1)
    )
    found = describe([dataclasses.replace(group, grades=grades)])
    assert (found["judge/calls"], found["judge/tokens"], found["judge/retries"]) == (3, 30, 1)
    assert costs([group]) == {}


# Runs


def rows_of(run, name="metrics.jsonl"):
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


@pytest.mark.parametrize("advantage", ["remax", "vine"])
def test_calls_for_baselines_and_continuations_are_counted(advantage, tmp_path):
    """All requests that the endpoint got are in the metrics, the judge's retries among them."""

    def forgetful(request):
        if len(request["messages"]) == 2:
            return "Well."
        return letters(request | {"messages": request["messages"][:2]})

    sets = [f"objective.advantage={advantage}", "train.steps=2", "rollout.group_size=2"]
    sets += ["rollout.batch=4", "train.batch=4", "rollout.max_errors=0"]
    sets += ["objective.advantage.steps=6"] if advantage == "vine" else []
    with endpoint(forgetful) as (url, requests):
        file = write(tmp_path, url, re.sub("evolve = .*", "", RECIPE))
        run = api.train(file, overrides=sets, out=tmp_path / "run", show=False)
    scored = [r for r in requests if "\nresponse: " in r["messages"][:2][-1]["content"]]
    rows = rows_of(run)
    for name, seen in (
        ("calls", len(scored)),
        ("retries", len([r for r in scored if len(r["messages"]) > 2])),
        ("tokens", 10 * len(scored)),
    ):
        held_out = sum(row.get(f"validation/judge/{name}", 0) for row in rows)
        assert sum(row.get(f"judge/{name}", 0) for row in rows) == seen - held_out, name
    assert sum(row.get("judge/calls", 0) for row in rows) > 2 * 8  # more than the responses' own


SAME = ("metrics.jsonl", "rollouts.jsonl", "evaluations.jsonl", "rubrics.jsonl")


@pytest.mark.slow
@pytest.mark.parametrize("lag", [0, 2])
def test_a_run_that_was_stopped_has_the_same_rubrics_and_rewards(lag, tmp_path):
    with endpoint(letters) as (url, requests):
        file, changes = write(tmp_path, url), [f"loop.lag={lag}"]
        whole = api.train(file, overrides=changes, out=tmp_path / "whole", show=False)
        asked = [request["messages"] for request in requests]
        stops = iter([False, False, True])
        part = api.train(
            file, overrides=changes, out=tmp_path / "part", show=False, stop=lambda: next(stops)
        )
        assert (part / "rubrics.jsonl").read_text() != (whole / "rubrics.jsonl").read_text()
        api.resume(part, show=False)
    for name in SAME:
        assert (part / name).read_text() == (whole / name).read_text(), name
    versions = rows_of(whole, "rubrics.jsonl")
    assert [row["version"] for row in versions] == list(range(1, len(versions) + 1))
    assert len(versions) >= 2
    assert all(len(row["criteria"]) <= 2 for row in versions)
    first, *steps = rows_of(whole)
    assert (first["validation/judge/calls"], first["validation/judge/retries"]) == (2, 0)
    assert all(row["judge/calls"] == 8 for row in steps)
    scored = [m for m in asked if "\nresponse: " in m[-1]["content"]]
    # Five steps, the rollouts a lagged run samples ahead of its end, and two validations.
    assert len(scored) == 8 * (5 + lag) + 2 * 2
    # What the judge was asked first is what the first step's responses earned: a letter each.
    base = {"reward", "parts", "response"}
    for row in rows_of(whole, "rollouts.jsonl"):
        parts, said = row["parts"], row["response"]
        assert base <= row.keys()
        assert parts["criterion_1"] == ("e" in said)
        new = {name: s for name, s in parts.items() if name.startswith("evolved_")}
        total = 2 * parts["criterion_1"] - parts["criterion_2"] + 0.5 * sum(new.values())
        assert row["reward"] == pytest.approx(total / (2 + 0.5 * len(new)))
    # Held-out responses are scored by the rubric of the recipe alone.
    held_out = rows_of(whole, "evaluations.jsonl")
    assert {*held_out[-1]["parts"]} == {"criterion_1", "criterion_2", "ended"}


def test_a_judge_that_fails_in_mid_run_halts_it_with_a_checkpoint(tmp_path):
    def answer(request):
        if len(requests) > 2 + 8 + 1:  # validation, a step, a proposal if rewards differ
            raise Refused(500, "gone")
        return letters(request)

    with endpoint(answer) as (url, requests), pytest.raises(BurnishError) as caught:
        api.train(write(tmp_path, url), out=tmp_path / "run", show=False)
    assert re.search(r"[78] of 8 responses got no grade.*rollout\.max_errors", str(caught.value))
    assert re.search(r"the judge at http://\S+ failed: ValueError: status 500", str(caught.value))
    assert (tmp_path / "run" / "checkpoints" / "step-00000001").exists()
    assert len(rows_of(tmp_path / "run")) == 2
