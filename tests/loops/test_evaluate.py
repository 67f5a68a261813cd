"""An evaluation: its files, killed and continued, few-shot, other engines, side by side."""

import json

import pytest

from burnish import api
from burnish.errors import ConfigError, GraderError, RunError
from burnish.launch import inputs, local
from burnish.launch.resolve import resolve
from burnish.launch.settings import make_evaluator
from burnish.loops import evaluate
from burnish.recipe.load import load_recipe, recipe_to_toml
from burnish.runs.results import CATEGORIES, read_evaluation, write_evaluation
from tests.loops.test_recorder import one_thread  # noqa: F401

FILES = ("results.jsonl", "figures.json", "settings.json")
REWARD = """
def score(response, row):
    kind = len(response) % 3
    if row["prompt"].endswith("9"):
        raise ValueError("no gold")
    status = "unparsed" if kind == 2 else "scored"
    return {"reward": float(kind == 0), "format": float(kind < 2), "status": status}
"""


def setting(tmp_path, smollm2, *more, rows=13):
    (tmp_path / "reward.py").write_text(REWARD)
    given = [{"prompt": f"What is {i} + {i}?", "answer": str(2 * i)} for i in range(rows)]
    given.append({"prompt": "it ends in 9", "answer": "<b>9"})
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
    size = {"layers": 1, "width": 32, "heads": 4, "d_ff": 48, "context": 128}
    return [
        *(f"model.{key}={value}" for key, value in size.items()), "model.name=scratch",
        f"model.tokenizer={smollm2}", "device=cpu", "task.chat=false", "task.workers=1",
        f"task.train={tmp_path / 'rows.jsonl'}", f"task.validation={tmp_path / 'rows.jsonl'}",
        f"task.reward={tmp_path / 'reward.py'}:score", "validation.max_tokens=5",
        "validation.samples=2", "task.name=files", *more,
    ]  # fmt: skip


@pytest.fixture
def few_together(monkeypatch):
    monkeypatch.setattr(evaluate, "TOGETHER", 8)


@pytest.mark.slow
@pytest.mark.usefixtures("few_together")
def test_killed_and_rerun_it_is_what_it_would_have_been(tmp_path, smollm2, monkeypatch):
    given = setting(tmp_path, smollm2, "engine.max_running=8")
    whole, out = tmp_path / "whole", tmp_path / "out"
    seen = []
    figures = api.evaluate("keywords", overrides=given, out=whole, show=seen.append).figures
    told = [progress for progress in seen if progress.phase == "evaluate"]
    assert {(p.doing, p.total, p.unit) for p in told} == {
        ("evaluating 14 prompts", 28, "responses")
    }
    counts = [progress.done for progress in told]
    assert counts == sorted(counts)
    assert {0, 8, 16, 24, 28} <= set(counts)
    assert told[-1].tokens_per_second > 0
    assert figures["validation/responses"] == 28
    assert figures["validation/grades_error"] == pytest.approx(2 / 28)
    assert {"validation/accuracy_low", "validation/pass_at_2", "validation/majority_at_2"} <= set(
        figures
    )
    recipe = load_recipe("keywords", given)
    evaluator = make_evaluator(recipe, *local.build_sampler(resolve(recipe)))
    again = evaluate.validation_metrics(evaluator.rows(evaluator.answered()))
    evaluator.task.close()
    assert figures == again  # as training measures it

    def show(progress):
        if progress.phase == "evaluate" and progress.done > 16:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        api.evaluate("keywords", overrides=given, out=out, show=show)
    assert api.evaluate("keywords", overrides=given, out=out).figures == figures
    for name in FILES:
        assert (out / name).read_bytes() == (whole / name).read_bytes()
    monkeypatch.setattr(evaluate, "sample", None)  # nothing is left to sample
    assert api.evaluate("keywords", overrides=given, out=out).figures == figures
    with pytest.raises(RunError, match=r"different evaluation \(validation.temperature: 1.0 → 0"):
        api.evaluate("keywords", overrides=[*given, "validation.temperature=0"], out=out)


def test_another_gold_answer_reward_or_grader_is_another_evaluation(tmp_path, smollm2, monkeypatch):

    given, out = setting(tmp_path, smollm2), tmp_path / "out"
    before = api.evaluate("keywords", overrides=given, out=out).figures

    def refused(what):
        with pytest.raises(RunError, match=rf"different evaluation \(hash of {what}: \w+ → \w+"):
            api.evaluate("keywords", overrides=given, out=out)

    for name, old, new, what in (
        ("rows.jsonl", '"answer": "4"', '"answer": "5"', r"task\.train"),
        ("reward.py", "kind == 0", "kind == 1", r"task\.reward"),
    ):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace(old, new))
        refused(what)
        (tmp_path / name).write_text(text)
    assert api.evaluate("keywords", overrides=given, out=out).figures == before
    monkeypatch.setattr(inputs, "CODE", ("graders",))
    refused("code")


def test_an_evaluation_before_the_first_step_stops_when_errors_are_too_many(tmp_path, smollm2):
    """Each held-out response but the first row's fails; 4 of 30 are more than a tenth."""
    other = [{"prompt": f"What is {i} + 0?", "answer": str(i)} for i in range(1, 9)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    rows = [f"task.train={tmp_path / 'train.jsonl'}", "train.steps=1", "rollout.max_tokens=5"]
    rows += ["rollout.batch=4", "rollout.group_size=2", "train.batch=4", "engine.kv_mb=16"]
    given = setting(tmp_path, smollm2, *rows, rows=14)
    text = (
        (tmp_path / "reward.py").read_text().replace('.endswith("9")', '.endswith("+ 0?") is False')
    )
    (tmp_path / "reward.py").write_text(text)
    told = []
    with pytest.raises(GraderError) as caught:
        api.train("keywords", overrides=given, out=tmp_path / "run", show=told.append)
    said = str(caught.value)
    assert said.startswith("4 of 30 responses have no grade so far, more than a share of 0.1; mend")
    assert "raise rollout.max_errors. response" in said
    assert "ValueError: no gold (reward.py, line 5)" in said
    assert "'prompt': 'What is 1 + 1?'" in said
    shown = [progress.grading for progress in told if progress.grading]
    assert shown[-1].endswith("of 30 graded, 4 not graded")
    given += ["rollout.max_errors=1"]
    api.train("keywords", overrides=given, out=tmp_path / "tolerant", show=False)


def test_the_page_counts_escapes_and_compares(tmp_path, smollm2):
    given = setting(tmp_path, smollm2, rows=40)
    one, two = tmp_path / "one", tmp_path / "two"
    api.evaluate("keywords", overrides=given, out=one)
    api.evaluate("keywords", overrides=[*given, "validation.temperature=0.7"], out=two)
    rows = read_evaluation(one).rows
    parts = [name for name in CATEGORIES if name not in ("unparsed", "truncated", "timed out")]
    assert all(sum(CATEGORIES[name](row) for name in parts) == 1 for row in rows)
    counted = {name: sum(map(holds, rows)) for name, holds in CATEGORIES.items()}
    assert counted["grader failed"] == 2  # the last prompt, twice
    assert counted["timed out"] == 0
    page = (one / "report.html").read_text()
    for name, count in counted.items():
        assert f"<td>{name}</td><td>{count:,} (" in page
        found = page.split(f"<summary>{name}</summary>")[1].split("<summary>")[0].count("<article ")
        assert found == count if count < 10 else found >= 10
    hostile = json.loads((one / "results.jsonl").read_text().splitlines()[0])
    hostile["response"] = "<img src=x onerror=alert(1)>&amp;"
    with (one / "results.jsonl").open("a") as file:
        file.write(json.dumps(hostile) + "\n")
    both = write_evaluation([one, two], tmp_path / "both.html").read_text()
    assert "<img" not in both
    assert "<td>validation.temperature</td><td>1.0</td><td>0.7</td>" in both
    assert "<td>validation.samples</td>" not in both


def test_what_is_evaluated(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text(
        'name = "mine"\n[task]\nname = "keywords"\n[model]\nname = "x"\n'
    )
    assert api.evaluation_recipe(str(run)).model.name == str(run)
    assert api.evaluation_recipe(str(run), "other").model.name == "other"
    sorted_run = tmp_path / "sorted"
    sorted_run.mkdir()
    (sorted_run / "recipe.toml").write_text("")
    with pytest.raises(ConfigError, match=r"trained the sorting model, .*sorted/report\.html has"):
        api.evaluation_recipe(sorted_run)
    assert api.evaluation_recipe("keywords", changes=["seed=4"]).seed == 4
    with pytest.raises(ConfigError, match="sft is a supervised recipe, whose responses"):
        api.evaluation_recipe("sft")
    with pytest.raises(ConfigError, match="did you mean 'keywords'"):
        api.evaluation_recipe("keyword")


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("guess", []),
        (
            "guess",
            [
                *("critic.learning_rate=1e-4", "objective.advantage=gae"),
                "objective.advantage.over=turns",
            ],
        ),
        ("guess", ["objective.advantage=vine", "objective.advantage.steps=turns"]),
        ("guess", ["objective.advantage=remax"]),
        ("demo-small", ["objective.advantage=vine", "task.name=files", "task.train=rows.jsonl"]),
    ],
)
@pytest.mark.parametrize("who", ["environment", "agent"])
def test_an_evaluation_needs_no_advantage(recipe, settings, who, tmp_path):
    """So --agent and --environment work with recipes whose advantage they do not support."""
    before = load_recipe(recipe, settings)
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text(recipe_to_toml(before))
    for source in (before, run):
        found = api.evaluation_recipe(source, **{who: "play.py:play"})
        assert (found.task.name, getattr(found.task, who)) == (who, "play.py:play")
        assert (found.objective.advantage.name, found.critic) == ("raw", None)
    kept = api.evaluation_recipe(before).objective
    assert kept == before.objective
